"""A folder of this machine published at a URL, so that whoever reads there sees a finished state or none.

Objects never change: a file is stored under its SHA-256, and what is there was compared with it. The manifest that
names them is written last; a kill before that leaves the state before. Objects that neither the manifest nor the one
before it names are removed afterwards.

One writer at a time. `lock.json` says who writes, and counts while it does. Whoever finds the lock of another waits
until it has seen that the count stands still; the lock of a process of this machine that is dead does not count.
Before each manifest the one that is there is read: when it is another's, nothing is written.
"""

from __future__ import annotations

import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from vitkit import io
from vitkit.errors import NotThere, StorageError
from vitkit.locks import InUse
from vitkit.progress import SILENT, Progress
from vitkit.storage import remote
from vitkit.storage.address import is_url, join, last_name
from vitkit.storage.folders import MANIFEST, OBJECTS, Manifest, Piece, exists, read_manifest

LOCK = "lock.json"
BEAT, PATIENCE = 10.0, 35.0  # seconds between two counts; without one, until a writer counts as dead


def workplace(out: str | Path) -> Path:
    """Where what is meant for `out` is made: there, or for a URL in a folder of this machine that belongs to it."""
    if not is_url(out):
        return Path(out)
    key = blake2b(str(out).rstrip("/").encode(), digest_size=12).hexdigest()
    return io.cache_folder() / "out" / key / last_name(str(out))


class Publisher:
    """`folder` is where the files are made; hidden ones are not published."""

    def __init__(self, url: str, progress: Progress = SILENT) -> None:
        self.url, self.progress, self.folder = url.rstrip("/"), progress, workplace(url)
        self.me = f"process {os.getpid()} on {platform.node()}, {os.urandom(6).hex()}"
        self.published: Manifest | None = None
        self._digests: dict[tuple[str, int, int], str] = {}  # of files that did not change since
        self._ending = threading.Event()

    # --- one writer at a time ----------------------------------------------------------------------

    @contextmanager
    def claimed(self) -> Iterator[Publisher]:
        """Hold the lock, with the folder of this machine as it was published."""
        self._claim()
        beating = threading.Thread(target=self._beat, daemon=True)
        beating.start()
        try:
            self.pull()
            yield self
        finally:
            self._ending.set()
            beating.join()
            with suppress(StorageError, OSError):
                if self._owner().get("writer") == self.me:
                    remote.remove(join(self.url, LOCK))

    def _claim(self) -> None:
        while not remote.create(self._mine(0), join(self.url, LOCK)):
            if self._lives(owner := self._owner()):
                who = str(owner.get("writer", "another process")).rsplit(",", 1)[0]
                raise InUse(f"{self.url} is in use by {who}; wait until it ends, or choose another --out")
            remote.put_bytes(self._mine(0), join(self.url, LOCK))
            if self._owner().get("writer") == self.me:  # nobody took it in the same moment
                return

    def _mine(self, count: int) -> bytes:
        return io.json_text({"writer": self.me, "count": count}).encode()

    def _owner(self) -> dict[str, object]:
        try:
            url = join(self.url, LOCK)
            found = io.parse_json(remote.read(url, whole=remote.stat(url).size))
            return found if isinstance(found, dict) else {}
        except (NotThere, ValueError):
            return {}

    def _lives(self, owner: dict[str, object]) -> bool:
        """By what can be seen: clocks of several machines are not compared."""
        words = str(owner.get("writer", "")).replace(",", "").split()
        if len(words) == 5 and words[3] == platform.node() and words[1].isdecimal():
            return _is_running(int(words[1]))
        until = time.monotonic() + PATIENCE
        self.progress.note(f"waiting up to {PATIENCE:.0f} s to see whether {owner.get('writer')} still writes there")
        while time.monotonic() < until:
            time.sleep(BEAT / 10)
            if (now := self._owner()) != owner:
                return bool(now)
        return False

    def _beat(self) -> None:
        count = 0
        while not self._ending.wait(BEAT):
            count += 1
            with suppress(StorageError, OSError):
                if self._owner().get("writer") == self.me:
                    remote.put_bytes(self._mine(count), join(self.url, LOCK))

    # --- reading and writing -----------------------------------------------------------------------

    def pull(self) -> None:
        """Make the folder what was published: what is only here is removed, for it was never confirmed."""
        self.published = pull(self.url, self.folder)

    def push(self) -> None:
        """Publish what the folder holds now."""
        before = read_manifest(self.url)
        if before != self.published:
            who = before.writer.rsplit(",", 1)[0] if before else "somebody, who removed it"
            raise InUse(f"{self.url} was changed by {who} since this began; end one of them, or choose another --out")
        names = [p.relative_to(self.folder).as_posix() for p in sorted(self.folder.rglob("*")) if p.is_file()]
        shown = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
        have = {piece.object for piece in before.files.values()} if before else set()
        files = dict(filter(None, (self._store(name, have) for name in shown)))
        now = Manifest((before.generation if before else 0) + 1, self.me, files)
        if before is None or before.files != files:
            remote.put_bytes(now.to_bytes(), join(self.url, MANIFEST))
            self.published = now
            self._remove_old(before)

    def _store(self, name: str, have: set[str]) -> tuple[str, Piece] | None:
        """A file as an object; None when it vanished. What may still grow is copied first."""
        with io.working_folder(self.folder.with_name(f"{self.folder.name}.upload")) as aside:
            try:
                path = self.folder / name
                status = path.stat()
                key = (name, status.st_size, status.st_mtime_ns)
                if key in self._digests:
                    digest, size = self._digests[key], status.st_size
                else:
                    path = Path(shutil.copyfile(path, aside / "file"))
                    digest, size = io.sha256(path), path.stat().st_size
            except FileNotFoundError:
                return None
            piece = Piece(f"{OBJECTS}/{digest}-{Path(name).name}", size, digest)
            if piece.object not in have:
                remote.put(path, join(self.url, piece.object))
            self._digests[key] = digest
            return name, piece

    def _remove_old(self, before: Manifest | None) -> None:
        kept = {piece.object for m in (before, self.published) if m is not None for piece in m.files.values()}
        for path in remote.find(join(self.url, OBJECTS)):
            if f"{OBJECTS}/{path}" not in kept:
                remote.remove(join(self.url, OBJECTS, path))


def pull(url: str, folder: Path) -> Manifest | None:
    manifest = read_manifest(url)
    files = manifest.files if manifest is not None else {}
    for path in sorted(folder.rglob("*"), reverse=True) if folder.is_dir() else ():
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            with suppress(OSError):  # it still holds something
                path.rmdir()
        elif name not in files:
            path.unlink()
    for name, piece in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != piece.bytes or io.sha256(path) != piece.sha256:
            download(join(url, piece.object), path, piece.sha256)
    return manifest


def download(url: str, path: Path, digest: str = "") -> None:
    """Straight to a path, all or nothing."""
    known = remote.stat(url)
    with io.replacing(path) as file:
        remote.fetch(url, known, file.fileno())
    if digest and io.sha256(path) != digest:
        raise StorageError(f"{url} is not what its manifest says; restore it from a copy, or choose another --out")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


# --- single files ------------------------------------------------------------------------------------


@contextmanager
def output_file(out: str | Path, about: Path) -> Iterator[None]:
    """What is made in the `workplace` of a file is stored at its URL in the end, with the small file `about` it.

    Both are fetched first where they are there. A store shows an object whole or not at all.
    """
    path = workplace(out)
    if not is_url(out):
        yield
        return
    urls = {each: join(str(out).rsplit("/", 1)[0], each.name) for each in (path, about)}
    for each, url in urls.items():
        each.unlink(missing_ok=True)
        if exists(url):
            download(url, each)
    yield
    for each, url in urls.items():
        remote.put(each, url)
