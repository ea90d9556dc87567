"""What a tracker is to a run: five calls, made by a thread of their own, each of which may fail.

A run continues whatever they do: see `vitkit.training.track`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Numbers = dict[str, float]


@dataclass(frozen=True)
class About:
    """What a tracker is told about a run."""

    folder: Path
    settings: dict[str, str]  # by name, as they are written
    tags: dict[str, str]

    @property
    def name(self) -> str:
        return self.folder.resolve().name


class Tracker(ABC):
    @classmethod  # noqa: B027  # most need nothing
    def check(cls) -> None:
        """Raise before the run starts when this tracker can never work: a package or a login is missing."""

    @abstractmethod
    def open(self, about: About, id: str | None) -> str:
        """Begin a run in the tracker, or continue the one of this id; its id."""

    @abstractmethod
    def sent(self) -> Mapping[str, int]:
        """The last step that the tracker has of each metric: nothing is sent twice."""

    @abstractmethod
    def log(self, lines: Sequence[tuple[int, Numbers]]) -> None:
        """Steps and their numbers, in order."""

    @abstractmethod
    def close(self, state: str, summary: Numbers, files: Sequence[Path]) -> None:
        """The run has ended: finished, stopped or failed; `summary` is what it reached."""
