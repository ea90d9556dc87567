"""The index beside tar shards: one file that says where every image is and which label it has.

    magic, length and checksum of the head | head: JSON | offsets | sizes | codes | shares | ends of keys | keys

The head names each shard with its size and times, its number of samples and a checksum of its part of every column;
the labels as written follow, each once. Nothing of it is believed unread: lengths are compared with the file's before
memory is taken, what is used is compared with its checksum, and a shard that is not what it was is not looked up.

Columns that training needs (offsets, sizes, codes) are read into memory, the others when somebody asks: a memory
map would end the process when somebody makes the file shorter.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from vitkit.data.source import Names
from vitkit.data.sources.tarscan import NO_LABEL, Label, LabelTable, LeftOut, Scanned
from vitkit.errors import DataError
from vitkit.io import open_regular, parse_json, read_into, replacing
from vitkit.storage import is_url, known_stat

_MAGIC = b"vitkit shards 1\n"
_START = struct.Struct("<16sQII")  # magic, length of the head, its checksum, nothing
_COLUMNS = {"offsets": "<u8", "sizes": "<u8", "codes": "<i4", "shares": "<u8", "ends": "<u8"}
_MOST = 1 << 40  # samples; more are nobody's


@dataclass(frozen=True)
class Stamp:
    """Tells a shard from another one under its name."""

    size: int
    written: int  # nanoseconds; behind a URL what the server calls its version
    changed: int  # of its name or owner, too: whoever sets the time of writing back is noticed

    @classmethod
    def of(cls, path: str) -> Stamp:
        if is_url(path):
            found = known_stat(path)
            version = hashlib.blake2b(found.version.encode(), digest_size=7).digest()
            return cls(max(0, found.size), int.from_bytes(version, "big"), 0)
        status = os.stat(path)
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class Stored:
    """A shard of an index: as `Scanned`, read when it is asked for."""

    index: ShardIndex
    stamp: Stamp
    first: int  # its place in the columns
    count: int
    key_start: int
    key_bytes: int
    sums: tuple[int, ...]  # of its part of each column, and of its keys
    left_out: LeftOut

    def __len__(self) -> int:
        return self.count

    @property
    def labels(self) -> list[Label]:
        return self.index.labels

    @property
    def offsets(self) -> np.ndarray:
        return self._column("offsets")

    @property
    def sizes(self) -> np.ndarray:
        return self._column("sizes")

    @property
    def codes(self) -> np.ndarray:
        codes = self._column("codes")
        if len(codes) and not NO_LABEL <= codes.min() <= codes.max() < len(self.index.labels):
            raise DataError(self.index.damaged("a label that is none of the list"))
        return codes

    @property
    def shares(self) -> np.ndarray:
        return self._column("shares")

    @property
    def keys(self) -> Names:
        ends = self._column("ends").astype(np.int64)
        if self.count and (ends[-1] != self.key_bytes or ends[0] < 0 or (np.diff(ends) < 0).any()):
            raise DataError(self.index.damaged("keys that overlap"))
        return Names.joined(self.index.read(self.key_start, self.key_bytes, self.sums[-1]), ends)

    def _column(self, name: str) -> np.ndarray:
        number, kind = list(_COLUMNS).index(name), np.dtype(_COLUMNS[name])
        start = self.index.column_starts[number] + self.first * kind.itemsize
        return np.frombuffer(self.index.read(start, self.count * kind.itemsize, self.sums[number]), kind)


Part = Scanned | Stored


class ShardIndex:
    """An opened index: `shards` by the name of their files. ValueError or OSError where there is none."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, -1
        self._file, self.head_sum, head, start = _open(path)
        self.labels = [_checked_label(label) for label in head["labels"]]
        rows = [_Row.checked(row) for row in head["shards"]]
        count = sum(row.count for row in rows)
        self.column_starts = [start]
        for kind in _COLUMNS.values():
            self.column_starts.append(self.column_starts[-1] + count * np.dtype(kind).itemsize)
        if os.fstat(self._file).st_size != self.column_starts[-1] + sum(row.key_bytes for row in rows):
            raise ValueError("its length is another")
        self.shards = dict(self._stored(rows))

    def _stored(self, rows: list[_Row]) -> Iterator[tuple[str, Stored]]:
        first, key_start = 0, self.column_starts[-1]
        for row in rows:
            place = (first, row.count, key_start, row.key_bytes, tuple(row.sums))
            yield row.name, Stored(self, Stamp(*row.stamp), *place, LeftOut(row.damage, *row.left_out))
            first, key_start = first + row.count, key_start + row.key_bytes

    def read(self, start: int, size: int, crc: int) -> bytearray:
        content = bytearray(size)
        try:
            read_into(self._descriptor(), start, memoryview(content))
        except (OSError, ValueError) as e:
            raise DataError(self.damaged(str(e))) from e
        if zlib.crc32(content) != crc:
            raise DataError(self.damaged("a checksum differs"))
        return content

    def damaged(self, why: str) -> str:
        return f"the index {self.path} is damaged ({why}); remove this file, and it is made again"

    def _descriptor(self) -> int:
        """Its file stays open, whoever replaces it; a process that gets the index by pickle opens it again."""
        if self._file < 0:
            file, head_sum, _, _ = _open(self.path)
            if head_sum != self.head_sum:
                os.close(file)
                raise ValueError("another one has taken its place while it was in use")
            self._file = file
        return self._file

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_file": -1}

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def open_index(path: Path) -> ShardIndex | None:
    """None where there is none, or one that is damaged or of another version: it is made again."""
    try:
        return ShardIndex(path)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _open(path: Path) -> tuple[int, int, dict[str, list[object]], int]:
    """The descriptor, the checksum of the head, the head, and where the columns start."""
    file = open_regular(path)
    try:
        start = bytearray(_START.size)
        read_into(file, 0, memoryview(start))
        magic, length, crc, _ = _START.unpack(start)
        if magic != _MAGIC or length > os.fstat(file).st_size - _START.size:
            raise ValueError("it is no index")
        head = bytearray(length)
        read_into(file, _START.size, memoryview(head))
        if zlib.crc32(head) != crc:
            raise ValueError("a checksum differs")
        parsed = parse_json(bytes(head))
        if not isinstance(parsed, dict):
            raise ValueError("its head is no table")
        return file, crc, parsed, _START.size + length
    except BaseException:
        os.close(file)
        raise


@dataclass(frozen=True)
class _Row:
    """A shard in the head."""

    name: str
    stamp: list[int]
    count: int
    key_bytes: int
    sums: list[int]
    damage: str
    left_out: list[int]

    @classmethod
    def checked(cls, value: object) -> _Row:
        if not isinstance(value, dict) or set(value) != {f.name for f in fields(cls)}:
            raise ValueError("a shard is none")
        row = cls(**value)
        lists = (row.stamp, 3), (row.sums, len(_COLUMNS) + 1), (row.left_out, 4)
        if not all(isinstance(found, list) and len(found) == length for found, length in lists):
            raise ValueError("a shard is incomplete")
        numbers = [*row.stamp, *row.sums, *row.left_out, row.count, row.key_bytes]
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers) or max(row.count, row.key_bytes) > _MOST:
            raise ValueError("a shard has a number that is none")
        if not isinstance(row.name, str) or not isinstance(row.damage, str):
            raise ValueError("a shard has no name")
        return row


def _checked_label(value: object) -> Label:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return value
    if isinstance(value, dict) and value and all(isinstance(v, float) and math.isfinite(v) for v in value.values()):
        return value
    raise ValueError("a label is none")


def write_index(path: Path, shards: Mapping[str, tuple[Stamp, Part]]) -> None:
    """All or nothing; column by column, shard by shard."""
    parts = [part for _, part in shards.values()]
    labels, numbers = common_labels(parts)
    rows = []
    for (name, (stamp, part)), codes in zip(shards.items(), numbers, strict=True):
        sums, left = [zlib.crc32(_bytes(part, codes, column)) for column in (*_COLUMNS, "keys")], part.left_out
        key_bytes = len(_bytes(part, codes, "keys"))
        counts = [left.bare, left.orphans, left.repeated, left.links]
        rows.append(asdict(_Row(name, [*asdict(stamp).values()], len(part), key_bytes, sums, left.damage, counts)))
    head = json.dumps({"shards": rows, "labels": labels}).encode()
    with replacing(path) as file:
        file.write(_START.pack(_MAGIC, len(head), zlib.crc32(head), 0) + head)
        for column in (*_COLUMNS, "keys"):
            for part, codes in zip(parts, numbers, strict=True):
                file.write(_bytes(part, codes, column))


def common_labels(parts: Sequence[Part]) -> tuple[list[Label], list[np.ndarray]]:
    """One list of the labels of all, and the codes of each part as rows of it."""
    table, known = LabelTable(), dict[int, np.ndarray]()  # by list of labels, which the shards of an index share
    found = []
    for part in parts:
        labels, codes = part.labels, part.codes
        new = known.setdefault(id(labels), np.full(len(labels) + 1, NO_LABEL, np.int32))
        for code in np.unique(codes[codes != NO_LABEL]).tolist():
            if new[code] == NO_LABEL:
                new[code] = table.code(labels[code])
        found.append(new[codes])  # the last is what NO_LABEL stands for
    return table.labels, found


def _bytes(part: Part, codes: np.ndarray, column: str) -> bytes:
    if column == "keys":
        return part.keys.content
    values = codes if column == "codes" else part.keys.ends if column == "ends" else getattr(part, column)
    return np.asarray(values).astype(_COLUMNS[column]).tobytes()
