"""What lies below a URL: the names of all files, asked for once; and folders that were published with a manifest.

A published folder holds `manifest.json` and, below `objects/`, files whose names begin with their SHA-256. The manifest
says which object is which file; only what it names is there. An address inside such a folder, as s3://b/run/best.safetensors,
is looked up in it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from vitkit import io
from vitkit.errors import Denied, NotThere, StorageError
from vitkit.storage.address import above, is_web, join, last_name, split
from vitkit.storage.cache import local, remember
from vitkit.storage.remote import AT_ONCE, find, read_current, stat

MANIFEST, OBJECTS = "manifest.json", "objects"
FORMAT, VERSION = "vitkit folder", 1
_LEVELS = 4  # between a file and the manifest of its folder, at most


@dataclass
class RemoteFolder:
    """A folder behind a URL, as a listing gave it; `str` is its URL."""

    url: str
    folders: dict[str, RemoteFolder] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return last_name(self.url)

    def walk(self) -> Iterator[RemoteFolder]:
        """This folder and all below it, by name; hidden ones are left out."""
        yield self
        for name in sorted(self.folders):
            if not name.startswith("."):
                yield from self.folders[name].walk()

    def add(self, path: str) -> None:
        *above_it, name = path.split("/")
        inside = self
        for part in above_it:
            inside = inside.folders.setdefault(part, RemoteFolder(join(inside.url, part)))
        inside.files.append(name)

    def paths(self, suffix: str) -> list[str]:
        """The URLs of the files below with such an ending, by name."""
        return [join(f.url, name) for f in self.walk() for name in sorted(f.files) if name.lower().endswith(suffix)]


def listing(url: str) -> RemoteFolder:
    """All that lies below a URL; an error in words where nothing does. What it says of each file is remembered."""
    if is_web(url):
        hint = "name a file: a list (.csv, .jsonl, .parquet), .npz, or shards such as data/train-{0000..0099}.tar"
        raise StorageError(f"{url} is no single file, and web servers do not list folders; {hint}")
    found = find(url)
    if not found:
        raise StorageError(f"there is nothing at {url}; check the address, capitals count")
    root = RemoteFolder(url.rstrip("/"))
    for path, known in sorted(found.items()):
        if path and not path.endswith("/"):
            remember(join(url, path), known)
            root.add(path)
    return root


def exists(url: str) -> bool:
    try:
        remember(url, stat(url))
        return True
    except NotThere:
        return False


def absent(urls: Sequence[str]) -> list[str]:
    """Those of some files that are not there, asked for at once."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [url for url, there in zip(urls, pool.map(exists, urls), strict=True) if not there]


def beside(folder: str | RemoteFolder, names: Iterable[str]) -> Path | None:
    """The first of some files in a folder behind a URL, fetched; a listing tells without asking."""
    if isinstance(folder, RemoteFolder):
        return next((local(join(folder.url, name)) for name in names if name in folder.files), None)
    return next(_readable(folder, names), (None, None))[1]


def _readable(folder: str, names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Those of some files, which may be there or not, that are there and may be read."""
    for name in names:
        with suppress(NotThere, Denied):
            yield name, local(join(folder, name))


# --- folders with a manifest -------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    object: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    generation: int
    writer: str
    files: dict[str, Piece]

    def to_bytes(self) -> bytes:
        files = {name: vars(piece) for name, piece in sorted(self.files.items())}
        about = {"format": FORMAT, "version": VERSION, "generation": self.generation, "writer": self.writer}
        return io.json_text({**about, "files": files}, indent=1).encode()


def read_manifest(folder: str) -> Manifest | None:
    """What was published at a URL; None when nothing was."""
    url = join(folder, MANIFEST)
    try:
        about = io.parse_json(read_current(url))
        if about["format"] != FORMAT or about["version"] != VERSION:
            raise ValueError(f"{about['format']} of version {about['version']}")
        files = {str(name): _piece(str(name), piece) for name, piece in about["files"].items()}
        return Manifest(int(about["generation"]), str(about["writer"]), files)
    except NotThere:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise StorageError(f"{url} is not a manifest of vitkit ({e}); choose another address") from e


def _piece(name: str, about: dict[str, object]) -> Piece:
    """A manifest may come from a stranger: it names files inside its folder, and nothing else."""
    size, content = about["bytes"], str(about["sha256"])
    safe = _inside(name) and _inside(str(about["object"])) and str(about["object"]).startswith(f"{OBJECTS}/")
    if not safe or not isinstance(size, int) or len(content) != 64:
        raise ValueError(f"it describes {name[:100]!r} wrongly")
    return Piece(str(about["object"]), size, content)


def _inside(name: str) -> bool:
    return (
        not name.startswith("/") and "\\" not in name and all(part not in ("", ".", "..") for part in name.split("/"))
    )


def search_above(url: str) -> str | None:
    """The object that a published folder above has under this address."""
    folder, inside = above(url), last_name(url)
    for _ in range(_LEVELS):
        if not split(folder)[1] and not is_web(folder):
            return None
        try:
            manifest = read_manifest(folder)
        except Denied:
            manifest = None
        if manifest is not None:
            piece = manifest.files.get(inside)
            return None if piece is None else join(folder, piece.object)
        folder, inside = above(folder), f"{last_name(folder)}/{inside}"
    return None


def fetched_folder(url: str, wanted: Callable[[str], bool]) -> Path:
    """A folder of this machine with the files of one behind a URL that are wanted, by their path in it.

    It holds links into the cache, whose files stay while this process lives.
    """
    manifest = read_manifest(url)
    if manifest is not None:
        pieces = {name: piece for name, piece in manifest.files.items() if wanted(name)}
        files = {name: _checked(join(url, piece.object), piece) for name, piece in pieces.items()}
    else:
        root = listing(url)
        paths = [join(f.url, name) for f in root.walk() for name in f.files]
        names = {path.removeprefix(f"{root.url}/"): path for path in paths}
        files = {name: local(path) for name, path in names.items() if wanted(name)}
    return _linked(url, files)


def fetched_with(url: str, names: Iterable[str]) -> Path:
    """A file in a folder with those of a few names beside it, which is there among a great deal more."""
    found = {**dict(_readable(above(url), names)), last_name(url): local(url)}
    return _linked(above(url), found) / last_name(url)


def _checked(url: str, piece: Piece) -> Path:
    path = local(url)
    if path.stat().st_size != piece.bytes or io.sha256(path) != piece.sha256:
        path.unlink(missing_ok=True)
        raise StorageError(f"{url} is not what its manifest says; publish it again, or restore it from a copy")
    return path


def _linked(url: str, files: dict[str, Path]) -> Path:
    key = hashlib.blake2b(repr((url, sorted((n, str(p)) for n, p in files.items()))).encode(), digest_size=12)
    place = io.cache_folder() / "folders" / key.hexdigest() / last_name(url)
    if not place.is_dir():
        with io.replacing_folder(place) as made:
            for name, path in files.items():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                os.symlink(path.absolute(), made / name)
    return place
