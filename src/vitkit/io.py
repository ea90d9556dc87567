"""Files and folders written all or nothing: a reader sees the old content or the new, never half of either."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from vitkit.errors import UNSAFE, ConfigError, NotThere, WriteError, as_text, printable

_FORMULA = tuple("=+-@＝＋－＠")  # what a spreadsheet takes for the beginning of one
_NUMBER = re.compile(r"[-+]?\d+([.,]\d+)?")


def cache_folder() -> Path:
    """Where fetched sets and decoded caches are kept: VITKIT_CACHE, or ~/.cache/vitkit."""
    chosen = os.environ.get("VITKIT_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "vitkit"


def sha256(content: bytes | Path) -> str:
    import hashlib

    digest = hashlib.sha256()
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def open_regular(path: str | Path) -> int:
    """A descriptor for reading a file; OSError for a pipe, which may wait forever, or a device, which may never end."""
    file = os.open(path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK")))
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "a folder, pipe or device, not a file", str(path))


def read_regular(path: str | Path) -> bytes:
    """The content of a file that is no pipe and no device."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def open_text(path: str | Path, encoding: str = "utf-8", errors: str = "strict", newline: str | None = None) -> TextIO:
    """The same as text."""
    return os.fdopen(open_regular(path), "r", encoding=encoding, errors=errors, newline=newline)


def read_json(path: str | Path) -> Any:
    """What a stranger's file holds; OSError or ValueError where it cannot be read."""
    return parse_json(read_regular(path))


def read_into(file: int, start: int, into: memoryview) -> None:
    """Fill memory from a place in a file, whoever else reads it at the same time; ValueError where it ends before.

    A memory map would end the process when somebody makes the file shorter.
    """
    while into:
        if hasattr(os, "preadv"):
            got = os.preadv(file, [into], start)
        else:  # Windows
            os.lseek(file, start, os.SEEK_SET)
            content = os.read(file, len(into))
            got = len(content)
            into[:got] = content
        if not got:
            raise ValueError("it ends too early")
        into, start = into[got:], start + got


def write_at(file: int, start: int, content: bytes) -> None:
    """All of `content` at a place in a file: one call may write less, 2 GB at most and what a full disk still takes."""
    left = memoryview(content)
    while left:
        written = os.pwrite(file, left, start)
        left, start = left[written:], start + written


def parse_json(text: str | bytes) -> Any:
    """The JSON of a stranger: brackets nested without end are a ValueError, like all else that is wrong with it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def dumps(value: object, **how: Any) -> str:
    """Text that any reader of JSON accepts: numbers that are not finite, for which JSON has no word, are null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **how)
    except ValueError:
        return json.dumps(_finite(value, how.get("default")), ensure_ascii=False, allow_nan=False, **how)


def _finite(value: Any, default: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item, default) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, default) for item in value]
    return value if default is None or isinstance(value, (str, int, type(None))) else _finite(default(value), default)


def parse_bytes(text: str | int) -> int:
    """ "1GB" -> 1,000,000,000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?", str(text).strip().upper())
    number = float(found[1]) * _UNITS[found[2]] if found else 0
    if number < 1:
        raise ConfigError(f"{text!r} is no size; write 1GB, 500MB or a number of bytes")
    return int(number)


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def canonical(value: object) -> str:
    """JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which takes the place of `path` when all went well and vanishes otherwise."""
    with _beside(path, folder=False) as beside:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` when all went well and vanishes otherwise."""
    with _beside(path, folder=True) as beside:
        _refuse_file(path)
        yield beside
        if not (path.is_dir() and _exchange(beside, path)):
            if path.is_dir():
                path.rename(beside.with_suffix(".old"))
            os.replace(beside, path)
            remove_leftovers(path)


@contextmanager
def working_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` to make things in, which vanishes in the end; after a kill the next one removes it."""
    with _beside(path, folder=True) as beside:
        yield beside


@contextmanager
def adding_to_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, whose files then go into `path`, beside whatever else is there.

    Nothing in `path` changes before all are written. Where it holds nothing else, it changes in one step.
    """
    with working_folder(path) as new:
        _refuse_file(path)
        yield new
        files = [p.relative_to(new) for p in new.rglob("*") if p.is_file()]
        there = [p.relative_to(path) for p in path.rglob("*") if not p.is_dir()] if path.is_dir() else []
        if not path.exists():
            os.replace(new, path)
        elif not set(there) <= set(files) or not _exchange(new, path):
            for name in files:
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(new / name, path / name)


def _refuse_file(path: Path) -> None:
    """A file is never replaced by a folder."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file stands there; name a folder")


@contextmanager
def _beside(path: Path, folder: bool) -> Iterator[Path]:
    """A new file or folder next to `path`; what is left under its name in the end is removed."""
    beside, handle = path, -1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        beside, handle = _start(path, folder)
        yield beside
    except (WriteError, NotThere):  # of a file inside a folder that is being filled; of what was to be copied
        raise
    except (OSError, RuntimeError) as e:
        if (cause := _os_error(e)) is None:
            raise
        why = cause.strerror or cause
        raise WriteError(cause.errno, f"{path} cannot be written ({why}); nothing was changed") from e
    finally:
        if beside != path:
            _remove(beside)
        if handle >= 0:
            os.close(handle)


def _start(path: Path, folder: bool) -> tuple[Path, int]:
    """Something new beside `path`, and a handle whose lock says that it is in use for as long as this process lives."""
    while True:
        beside = path.with_name(f".{path.name}.{os.urandom(4).hex()}.part")
        if folder:
            beside.mkdir()
        else:
            beside.touch(exist_ok=False)
        with suppress(FileNotFoundError):  # taken for a leftover before it was locked
            handle = os.open(beside, os.O_RDONLY)
            _lock(handle, wait=True)
            if beside.exists():
                return beside, handle
            os.close(handle)


def remove_folder(path: Path, of: Path) -> None:
    """Remove a folder that lies beside `of`, in one step for whoever looks; after a kill `of`'s next writer does."""
    if path.is_dir():
        beside = of.with_name(f".{of.name}.{os.urandom(4).hex()}.part")
        with suppress(OSError):
            os.replace(path, beside)
            path = beside
        _remove(path)


def remove_leftovers(path: Path, inside: bool = False) -> None:
    """Remove what writers of `path`, or of any file inside it, left when they were killed; those that live hold a lock.

    A folder that was moved out of the way and not yet replaced is put back.
    """
    folder, own = (path, ".+") if inside else (path.parent, re.escape(path.name))
    name = re.compile(rf"\.({own})\.[0-9a-f]{{8}}\.(part|old)")
    with os.scandir(folder) as entries:
        lefts = [(Path(entry), folder / found[1]) for entry in entries if (found := name.fullmatch(entry.name))]
    for left, target in lefts:
        with suppress(OSError):
            if left.suffix == ".old" and not target.exists():
                os.replace(left, target)
                continue
            handle = os.open(left, os.O_RDONLY)
            if _lock(handle, wait=False):
                _remove(left)
            os.close(handle)


def _remove(path: Path) -> None:
    """A file or a folder, if it is there and the disk lets us; it is only a leftover otherwise."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _lock(handle: int, wait: bool) -> bool:
    """False when another process has the lock, or the file system or system knows none."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    except (ImportError, OSError):
        return False


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step, so that there is never neither; only Linux can, and not on every disk."""
    import ctypes

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _os_error(error: BaseException | None) -> OSError | None:
    """What the system said, also where a library has laid words of its own over it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """A file to read and append to, for one process at a time; the system unlocks it when a process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        with suppress(ImportError):  # on Windows there is no fcntl; one process is enough there
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def move(path: Path, target: Path) -> None:
    """Give a file or folder another name on the same disk, a file once all of it is there."""
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    os.replace(path, target)


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def write_npy(file: BinaryIO, array: Any) -> None:
    """As `numpy.save`, which goes around Python's file and does not notice that the disk has become full."""
    import numpy as np

    whole = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(whole))
    file.write(whole.data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, as_text(text).encode())


def write_json(path: Path, value: object, indent: int | None = 2) -> None:
    write_text(path, json_text(value, indent))


def json_text(value: object, indent: int | None = None) -> str:
    """JSON that is text, and safe to print; names of files come back to the last byte."""
    text = dumps(value, indent=indent)
    return UNSAFE.sub(lambda c: c[0] if c[0] == "\n" else f"\\u{ord(c[0]):04x}", text)


def csv_cell(value: object) -> object:
    """Text that neither a terminal nor a spreadsheet obeys: escapes get backslashes, formulas a leading apostrophe."""
    if not isinstance(value, str):
        return value
    text = printable(value, keep="\n")
    return f"'{text}" if text.lstrip()[:1] in _FORMULA and text and not _NUMBER.fullmatch(text) else text
