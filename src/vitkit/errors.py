"""What went wrong, where, and what to do next.

Every error a user can cause is one of these. The command prints the message in one or two lines
and exits with code 2; in Python they can be caught one by one or all as `VitkitError`.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager


class VitkitError(Exception):
    """The base of all errors that vitkit raises on purpose. The message ends with the next action."""

    exit_code = 2  # of the command


class ConfigError(VitkitError, ValueError):
    """A model or a run was described in a way that cannot be built."""


class InputError(VitkitError, ValueError):
    """A tensor or an image does not fit the model it was given to."""


class CheckpointError(VitkitError):
    """A checkpoint cannot be read, written, or does not fit the model."""


class DataError(VitkitError):
    """A data set cannot be found, read or used."""


class TrainError(VitkitError):
    """A training run cannot start or cannot continue."""


class WriteError(VitkitError, OSError):
    """A file or folder cannot be written; what was there before is untouched."""

    def __str__(self) -> str:
        return str(self.args[-1])


class StorageError(VitkitError):
    """What is behind a URL cannot be read or written."""


class Denied(StorageError):
    """What is at a URL may not be read; stores also say so of what is not there, to whoever may not list."""


class NotThere(StorageError, FileNotFoundError):
    """Nothing is at a URL."""

    def __str__(self) -> str:
        return str(self.args[-1])


class MissingPackage(VitkitError, ImportError):
    """An optional package is needed for what was asked."""

    def __init__(self, package: str, purpose: str, extra: str, install: str = "") -> None:
        install = install or f"pip install 'vitkit[{extra}]'"
        super().__init__(f"{purpose} needs the package '{package}': {install}")


# control characters, line separators, marks that turn the direction of text, halves of pairs and non-characters
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def as_text(value: object) -> str:
    """Names that are text: bytes of a file name that are none, and halves of pairs in JSON, get backslashes."""
    return str(value).encode(errors="backslashreplace").decode()


def printable(text: str, keep: str = "") -> str:
    """Names from files, safe to show on one line: bytes that are no text and control characters get backslashes.

    Without this an escape sequence in the name of a file would be obeyed by the terminal it is printed on.
    """
    return UNSAFE.sub(lambda c: c[0] if c[0] in keep else c[0].encode("unicode_escape").decode(), text)


def reason_of(error: BaseException) -> str:
    """What a library says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def in_words(what: str, remedy: str) -> Iterator[None]:
    """Whatever a library raises on damaged input, which may be almost anything, becomes a `DataError`."""
    try:
        yield
    except (DataError, MissingPackage):
        raise
    except Exception as e:
        raise DataError(f"{what}: {reason_of(e)}; {remedy}") from e


def shell_word(value: object) -> str:
    """A path or name inside a command that is shown, so that it can be pasted into a shell: quoted where need be."""
    return shlex.quote(str(value))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean a or b?' for the known names nearest to `word`, or '' when none is near."""
    near = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def check_one_of(word: object, known: Collection[str], wrong: str) -> None:
    """An error that begins with `wrong`, and ends with the choices, for a word that is not known."""
    if word not in known:
        raise ConfigError(f"{wrong}.{did_you_mean(str(word), known)} Choose one of: {', '.join(known)}")
