"""Shards -> where every image is: from the index beside them, made first where there is none.

One process makes an index, in parallel over shards, while others that want it wait. Every finished shard is kept: after
a kill the next process continues. A shard that was rewritten is scanned again, and no other. Where the folder cannot be
written, the index is in the cache; a set that is scanned in a moment needs none.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from vitkit.data.loader import in_order
from vitkit.data.source import Names
from vitkit.data.sources.shardindex import Part, ShardIndex, Stamp, Stored, common_labels, open_index, write_index
from vitkit.data.sources.tarscan import Label, scan
from vitkit.errors import DataError, Denied, StorageError, WriteError
from vitkit.io import cache_folder, remove_folder
from vitkit.locks import in_turn
from vitkit.progress import Progress
from vitkit.storage import file_size, is_url, join, listing, local, plain

INDEX = "shards.index"
_WORTH = 1 << 24  # bytes of shards; fewer are scanned in a moment
_PARALLEL = 1 << 27  # bytes of shards that are worth starting processes for
_TICK = 50_000_000  # nanoseconds: files written to twice in less may have the same times
_LARGEST = (1 << 32) - 1  # bytes of an image


class ShardTable:
    """Every image of some shards, in their order; 12 bytes of memory each, keys are read when asked for."""

    def __init__(self, files: Sequence[str], parts: Sequence[Part]) -> None:
        self.files, self.parts = tuple(files), tuple(parts)
        self.firsts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        self.offsets = np.empty(self.firsts[-1], np.uint64)
        self.sizes = np.empty(self.firsts[-1], np.uint32)
        for part, first in zip(parts, self.firsts, strict=False):
            self.offsets[first : first + len(part)] = part.offsets
            self.sizes[first : first + len(part)] = np.minimum(part.sizes, _LARGEST)
        self._keys: tuple[int, Names] = (-1, Names())

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def shards_of(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.firsts, rows, side="right") - 1

    def shard_of(self, row: int) -> int:
        return int(np.searchsorted(self.firsts, row, side="right")) - 1

    def name(self, row: int) -> str:
        shard = self.shard_of(row)
        return f"{self.files[shard]}/{self._keys_of(shard)[row - int(self.firsts[shard])]}"

    def names(self, shard: int, rows: np.ndarray) -> list[bytes]:
        """Of rows of one shard."""
        keys, folder = self._keys_of(shard), os.fsencode(self.files[shard]) + b"/"
        bounds, content = np.concatenate([[0], keys.ends]), keys.content
        within = rows - self.firsts[shard]
        places = zip(bounds[within].tolist(), bounds[within + 1].tolist(), strict=True)
        return [folder + content[start:end] for start, end in places]

    def _keys_of(self, shard: int) -> Names:
        """Those of the last shard that was asked for are kept."""
        known, keys = self._keys
        if known != shard:
            keys = self.parts[shard].keys
            self._keys = shard, keys
        return keys

    def shares(self, rows: np.ndarray) -> np.ndarray:
        """Numbers in [0, 1) by content."""
        found = np.empty(len(self))
        for part, first in zip(self.parts, self.firsts, strict=False):
            found[first : first + len(part)] = part.shares / 2.0**64
        picked: np.ndarray = found[rows]
        return picked

    def labels(self) -> tuple[list[Label], np.ndarray]:
        """Labels as written, each once, and the one of every image."""
        labels, codes = common_labels(self.parts)
        return labels, np.concatenate(codes)


class ShardNames(Names):
    """Where each sample is: its shard and its key."""

    def __init__(self, table: ShardTable, rows: np.ndarray | None = None) -> None:
        self.table, self.rows = table, rows  # None: all of the table

    def __len__(self) -> int:
        return len(self.table if self.rows is None else self.rows)

    def row(self, index: int) -> int:
        """The row of the table."""
        index = range(len(self))[index]
        return index if self.rows is None else int(self.rows[index])

    def __getitem__(self, index: int) -> str:
        return self.table.name(self.row(index))

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def many(self, indices: np.ndarray) -> list[bytes]:
        """The names of many, shard by shard."""
        rows = indices if self.rows is None else self.rows[indices]
        shards = self.table.shards_of(rows)
        starts = np.flatnonzero(np.diff(shards, prepend=-1))
        parts = zip(shards[starts].tolist(), np.split(rows, starts[1:]), strict=True)
        return [name for shard, some in parts for name in self.table.names(shard, some)]

    def take(self, rows: np.ndarray) -> ShardNames:
        return ShardNames(self.table, rows if self.rows is None else self.rows[rows])


def shard_table(files: Sequence[str], progress: Progress) -> ShardTable:
    folders = defaultdict[str, list[str]](list)
    for file in files:
        folders[os.path.dirname(plain(file))].append(file)
    found: dict[str, Part] = {}
    for folder, own in folders.items():
        found |= _Folder(folder, own, progress).parts()
    try:
        return ShardTable(files, [found[file] for file in files])
    except DataError as e:  # a column of an index is damaged
        progress.note(f"{e.args[0].split(';')[0]}: the headers of all shards are read instead")
        return ShardTable(files, [scan(file) for file in progress.track(files, "reading the headers of shards")])


class _Folder:
    """Shards of one folder, and their index."""

    def __init__(self, folder: str, files: Sequence[str], progress: Progress) -> None:
        self.folder, self.files, self.progress = folder, files, progress
        place = folder if is_url(folder) else os.path.abspath(folder)
        name = hashlib.blake2b(os.fsencode(place), digest_size=16).hexdigest()
        self.beside, self.cached = Path(folder, INDEX), cache_folder() / "shards" / f"{name}.index"

    def parts(self) -> dict[str, Part]:
        """Of every file: out of an index, or from its headers."""
        found: dict[str, Part] = {**self._fresh()}
        if len(found) < len(self.files) and (found or self._size(self.files) >= _WORTH):
            with suppress(WriteError, OSError):  # a disk that is full or read-only: it works without an index
                self._update()
                found = {**self._fresh()}
        missing = [file for file in self.files if file not in found]
        return found | {file: scan(file) for file in self.progress.track(missing, "reading the headers of shards")}

    @staticmethod
    def _size(files: Sequence[str]) -> int:
        return sum(map(file_size, files))

    def _fresh(self) -> dict[str, Stored]:
        """What an index says about files that are still what they were."""
        found: dict[str, Stored] = {}
        for path in (self.cached, self._found_beside()):
            index = open_index(path) if path is not None else None
            found |= {f: part for f in self.files if index and (part := _fresh_part(index, f)) is not None}
        return found

    def _found_beside(self) -> Path | None:
        if not is_url(self.folder):
            return self.beside
        with suppress(StorageError):
            return local(join(self.folder, INDEX))
        return None

    def _update(self) -> None:
        """Scan what the index does not know, and write it anew: one process does, others wait."""
        place = self.beside if os.access(self.folder or ".", os.W_OK) else self.cached
        with in_turn(place.with_name(f".{place.name}.lock"), f"the index of {self.folder}"):
            known = self._fresh()  # another process may just have made it
            if missing := [file for file in self.files if file not in known]:
                make_index(place, missing, self.progress)


def make_index(place: Path, files: Sequence[str], progress: Progress) -> None:
    """Add shards of one folder to its index. Those that it knows and that are still there stay in it."""
    pieces = place.with_name(f".{place.name}.parts")
    pieces.mkdir(parents=True, exist_ok=True)
    large = _Folder._size(files) >= _PARALLEL and not multiprocessing.current_process().daemon
    workers = min(len(files), os.cpu_count() or 1) if large else 0
    job = partial(_index_one, files, pieces)
    for error in in_order(job, len(files), workers if workers > 1 else 0, "indexing shards", progress):
        if error is not None:
            raise error
    indexes = [open_index(place), *(open_index(_piece(pieces, file)) for file in files)]
    folder, places = os.path.dirname(plain(files[0])), {_name(file): file for file in files}
    merged: dict[str, tuple[Stamp, Part]] = {}
    for index in filter(None, indexes):
        fresh = {name: _fresh_part(index, places.get(name, os.path.join(folder, name))) for name in index.shards}
        merged |= {name: (part.stamp, part) for name, part in fresh.items() if part is not None}
    write_index(place, dict(sorted(merged.items())))
    remove_folder(pieces, of=place)


def restamp(place: Path, url: str) -> None:
    """Bind an index to the copies of its shards at a URL."""
    index, there = ShardIndex(place), set(listing(url).paths(".tar"))
    copies = {name: join(url, name) for name in index.shards}
    write_index(place, {name: (Stamp.of(copy), index.shards[name]) for name, copy in copies.items() if copy in there})


def _index_one(files: Sequence[str], pieces: Path, number: int) -> DataError | None:
    """Errors travel as values, whole and without a traceback."""
    file = files[number]
    piece = _piece(pieces, file)
    index = open_index(piece)
    if index and _fresh_part(index, file):  # finished before a kill
        return None
    try:
        stamp = _settled(file)
        write_index(piece, {_name(file): (stamp, scan(file))})
    except DataError as e:
        return e
    return None


def _name(file: str) -> str:
    """As an index calls a shard."""
    return os.path.basename(plain(file))


def _piece(pieces: Path, file: str) -> Path:
    return pieces / f"{hashlib.blake2b(os.fsencode(_name(file)), digest_size=16).hexdigest()}.index"


def _settled(file: str) -> Stamp:
    """The stamp of a file that is old enough for the next write to change it."""
    stamp = Stamp.of(file)
    if not is_url(file) and time.time_ns() - max(stamp.written, stamp.changed) < _TICK:
        time.sleep(_TICK / 1e9)
        stamp = Stamp.of(file)
    return stamp


def _fresh_part(index: ShardIndex, file: str) -> Stored | None:
    part = index.shards.get(_name(file))
    with suppress(OSError, ValueError, Denied):
        return part if part is not None and part.stamp == Stamp.of(file) else None
    return None
