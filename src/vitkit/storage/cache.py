"""Whole files from URLs on this machine's disk: fetched once, kept while there is room, safe between processes.

An entry is a file whose name is made of its URL, size and version: what changed behind a URL is another entry. It
appears whole (`io.replacing`), so whoever finds one may read it. A reader holds a shared lock on it; whoever makes room
removes only what it can lock alone, longest unused first. Locks end with their process.

The folder is that of VITKIT_CACHE; VITKIT_CACHE_SIZE limits it ("200GB"), by default to 50 GB or half of what is free.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from vitkit import io
from vitkit.errors import ConfigError, StorageError, WriteError
from vitkit.storage.address import is_url, last_name
from vitkit.storage.remote import Stat, fetch, stat

_LIMIT = 50 * 10**9
_OFTEN = 20  # room is made each time that this part of the limit was fetched
_TOUCHED = 60  # seconds until a use is written down again
_TWICE = 1 << 20  # bytes of a file that two processes may fetch at once: it costs less than a lock
_FILES_AHEAD = 2  # that are fetched at once, each in ranges, before they are read

_known: dict[str, Stat] = {}  # what listings said, so that nobody asks for each file again
_held: dict[Path, int] = {}  # files that this process was given the path of, with a handle that keeps them
_fetched = 0  # bytes since room was made
_guard = threading.Lock()
_ahead: ThreadPoolExecutor | None = None  # fetches what will be read soon
_coming: dict[Path, Future[None]] = {}  # what it was asked for


def remember(url: str, known: Stat) -> None:
    _known[url] = known


def known_stat(url: str) -> Stat:
    """What a listing said, or what the server says."""
    found = _known.get(url)
    return found if found is not None else stat(url)


def stamp(where: str) -> str:
    """Size and version of a file, local or behind a URL; "" where there is none, or where no listing named it."""
    if is_url(where):
        found = _known.get(where)
        return "" if found is None else f"{found.size:,} bytes {found.version}"
    with suppress(OSError, ValueError):
        status = os.stat(where)
        return f"{status.st_size:,} bytes {status.st_mtime_ns}"
    return ""


def file_size(where: str) -> int:
    """In bytes; 0 where it takes a request to know."""
    if is_url(where):
        return max(0, _known[where].size) if where in _known else 0
    with suppress(OSError, ValueError):
        return os.stat(where).st_size
    return 0


def open_regular(where: str | Path) -> int:
    """As `io.open_regular`, also for a URL. While the descriptor is open its entry stays."""
    if not is_url(where):
        return io.open_regular(where)
    url = str(where)
    known = known_stat(url)
    path = entry(url, known)
    while True:
        try:
            file = _locked(path)
        except FileNotFoundError:
            coming = _coming.get(path)
            if coming is not None and not coming.done():
                wait([coming])
            else:
                _fill(path, url, known)
            continue
        if known.size in (-1, os.fstat(file).st_size):
            _touch(path)
            return file
        os.close(file)  # somebody wrote into the cache
        path.unlink(missing_ok=True)


def local(where: str | Path) -> Path:
    """The path of a file on this machine, fetched first where it is behind a URL; it stays while this process lives."""
    if not is_url(where):
        return Path(where)
    known = known_stat(str(where))
    _known.setdefault(str(where), known)
    path = entry(str(where), known)
    if path not in _held:
        _held[path] = open_regular(where)
    return path


def entry(url: str, known: Stat) -> Path:
    key = hashlib.blake2b(f"{url}\0{known.size}\0{known.version}".encode(errors="surrogatepass"), digest_size=16)
    name = re.sub(r"[^\w.-]", "_", last_name(url))[-80:]
    return folder() / key.hexdigest()[:3] / f"{key.hexdigest()[3:]}-{name}"


def folder() -> Path:
    return io.cache_folder() / "remote"


def prefetch(urls: Iterable[str]) -> None:
    """Fetch what will be read soon, beside whatever this process does; what fails is asked for again by its reader."""
    global _ahead
    for url in urls:
        known = known_stat(url)
        path = entry(url, known)
        if path in _coming or path.exists():
            continue
        for done in [p for p, coming in _coming.items() if coming.done()]:
            del _coming[done]
        _ahead = _ahead or ThreadPoolExecutor(_FILES_AHEAD, "vitkit-prefetch")
        _coming[path] = _ahead.submit(_fill, path, url, known)


def _forget_prefetching() -> None:
    """A process that was forked has none of the threads, and must not wait for a lock that one of them held."""
    global _ahead, _guard
    _ahead, _guard = None, threading.Lock()
    _coming.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_prefetching)


def _locked(path: Path) -> int:
    """An open entry with a shared lock, still there under its name."""
    while True:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        with suppress(ImportError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # it was removed just now, to make room


def _touch(path: Path) -> None:
    with suppress(OSError):
        if os.stat(path).st_mtime < time.time() - _TOUCHED:
            os.utime(path)


def _fill(path: Path, url: str, known: Stat) -> None:
    """Fetch an entry; where the disk is full, again with half of what the cache holds, while there is less to hold."""
    global _fetched
    held = sys.maxsize
    while True:
        try:
            with _alone(path, known.size):
                if not path.exists():  # another process may have fetched it meanwhile
                    with io.replacing(path) as file:
                        fetch(url, known, file.fileno())
            break
        except WriteError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if (now := make_room(make_room(sys.maxsize) // 2)) >= held:
                advice = "free some space, choose another --cache-dir, or a smaller VITKIT_CACHE_SIZE"
                raise StorageError(f"{io.cache_folder()} is full; {advice}, then repeat the command") from e
            held = now
    with _guard:
        _fetched += max(0, known.size)
        due = _fetched > limit() // _OFTEN
        _fetched = 0 if due else _fetched
    if due:
        make_room(limit())


def _alone(path: Path, size: int) -> AbstractContextManager[object]:
    """Of large entries one process fetches, and the others wait."""
    return io.locked(folder() / "locks" / path.parent.name) if size > _TWICE else nullcontext()


# --- making room -------------------------------------------------------------------------------------


def limit() -> int:
    """Bytes that the cache may hold."""
    if text := os.environ.get("VITKIT_CACHE_SIZE", "").strip():
        try:
            return io.parse_bytes(text)
        except ConfigError as e:
            raise ConfigError(f"VITKIT_CACHE_SIZE: {e}") from None
    place = next(p for p in (folder(), *folder().parents) if p.exists())
    return min(_LIMIT, shutil.disk_usage(place).free // 2 + (1 << 30))


def make_room(most: int) -> int:
    """Remove what was unused for longest until at most so many bytes are left; what is in use stays. Bytes left."""
    entries = []
    for shelf in os.scandir(folder()) if folder().is_dir() else ():
        if len(shelf.name) == 3 and shelf.is_dir():
            entries += _entries(shelf.path)
    left = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if left <= most:
            break
        left -= size if _dropped(path) else 0
    return left


def _entries(shelf: str) -> list[tuple[float, int, Path]]:
    """When each was used last, how large it is, and where."""
    entries = []
    with os.scandir(shelf) as found:
        for e in found:
            with suppress(OSError):  # removed just now
                if not e.name.startswith(".") and e.is_file(follow_symlinks=False):
                    entries.append((e.stat().st_mtime, e.stat().st_size, Path(e.path)))
    return entries


def _dropped(path: Path) -> bool:
    """Whether an entry was removed; one that somebody holds is not."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        with suppress(ImportError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(file)
