"""TensorBoard: its events are written with every run, beside log.jsonl, by `vitkit.training.log`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vitkit.training.trackers.base import About, Numbers, Tracker


class TensorBoard(Tracker):
    """Nothing is left to do: `tensorboard --logdir runs` shows every run."""

    def open(self, about: About, id: str | None) -> str:
        return about.name

    def sent(self) -> Mapping[str, int]:
        return {}

    def log(self, lines: Sequence[tuple[int, Numbers]]) -> None:
        pass

    def close(self, state: str, summary: Numbers, files: Sequence[Path]) -> None:
        pass
