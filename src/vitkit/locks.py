"""One process at a time for what must not be written by two; the system frees a lock when its process dies."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitkit.errors import VitkitError, WriteError

_held: set[Path] = set()  # by this process, to which the system would give a lock twice


class InUse(VitkitError):
    """Another process, which lives, writes there."""


@contextmanager
def only_one(path: Path, what: str, instead: str) -> Iterator[None]:
    """Hold the lock file `path`, which vanishes in the end; of a killed process it stays, and does not matter.

    what, instead  of the error when another process has it: "the run in x", "choose another --out"
    """
    handle, real, empty = -1, path.absolute(), not path.parent.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _taken(real, what, instead)
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
