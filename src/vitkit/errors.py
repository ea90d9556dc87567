"""What went wrong, where, and what to do next.

Every error a user can cause is one of these. The command prints the message in one or two lines
and exits with code 2; in Python they can be caught one by one or all as `VitkitError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VitkitError(Exception):
    """The base of all errors that vitkit raises on purpose. The message ends with the next action."""


class ConfigError(VitkitError, ValueError):
    """A model or a run was described in a way that cannot be built."""


class InputError(VitkitError, ValueError):
    """A tensor or a picture does not fit the model it was given to."""


class CheckpointError(VitkitError):
    """A checkpoint cannot be read, written, or does not fit the model."""


class DataError(VitkitError):
    """A set of pictures cannot be found, read or used."""


class TrainError(VitkitError):
    """A training run cannot begin or cannot go on."""


class MissingPackage(VitkitError, ImportError):
    """An optional package is needed for what was asked."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}': pip install 'vitkit[{extra}]'")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean a or b?' for the known names nearest to `word`, or '' when none is near."""
    near = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""
