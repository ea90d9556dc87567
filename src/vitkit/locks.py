"""One process at a time for what must not be written by two; the system frees a lock when its process dies."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from vitkit.errors import VitkitError, WriteError

_PAUSE = 0.1  # seconds between two looks whether a lock is free
_held: set[Path] = set()  # by this process, to which the system would give a lock twice


class InUse(VitkitError):
    """Another process, which lives, writes there."""


@contextmanager
def only_one(path: Path, what: str, instead: str, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path`, which vanishes in the end; of a killed process it stays, and does not matter.

    what, instead  of the error when another process has it: "the run in x", "choose another --out"
    patience       seconds to wait for that process to end
    """
    handle, real, empty = -1, path.absolute(), not path.parent.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _waited(real, what, instead, patience)
        _held.add(real)
    except OSError as e:
        raise WriteError(e.errno, f"{path} cannot be written ({e.strerror or e}); nothing was changed") from e
    try:
        yield
    finally:
        _held.discard(real)
        with suppress(OSError):
            path.unlink()
        if empty:
            with suppress(OSError):  # something was written
                path.parent.rmdir()
        os.close(handle)


def in_turn(path: Path, what: str) -> AbstractContextManager[None]:
    """As `only_one`, but waits until the others have done, or died."""
    return only_one(path, what, "end it", patience=math.inf)


def _waited(path: Path, what: str, instead: str, patience: float) -> int:
    end = time.monotonic() + patience
    while True:
        try:
            return _taken(path, what, instead)
        except InUse:
            if time.monotonic() >= end:
                raise
            time.sleep(_PAUSE)


def _taken(path: Path, what: str, instead: str) -> int:
    """The file, opened and locked, and still there under its name."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if path in _held or not _lock(handle):
            owner = os.read(handle, 200).decode(errors="replace") or "another process"
            os.close(handle)
            raise InUse(f"{what} is in use by {owner}; wait until it ends, or {instead}")
        with suppress(OSError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
                return handle
        os.close(handle)  # its owner removed it just now


def _lock(handle: int) -> bool:
    """False when another process has it. Children, which may outlive a process that was killed, do not inherit it."""
    try:
        import fcntl

        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except (ImportError, OSError):  # a system or a disk without locks
        pass
    return True
