"""The headers of one tar shard -> its images, their labels, and what is left out.

A sample is `key.jpg` beside `key.cls`, `key.txt` or `key.json`. Nothing is unpacked and no link is followed. A shard
that is cut short gives what it still has, and says so.
"""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from vitkit.data.decode import SUFFIXES
from vitkit.data.source import Names, content_number
from vitkit.errors import DataError, as_text
from vitkit.io import parse_json
from vitkit.storage import open_regular

Label = str | list[str] | dict[str, float]  # as written: a class, several, or values by name
NO_LABEL = -1
_LONGEST_LABEL = 1 << 20  # bytes
_LABEL_KEYS = ("label", "class", "cls", "labels", "target")
_ZEROS = bytes(tarfile.BLOCKSIZE)
_BEGINNING = 4096  # bytes of an image that decide about its split, with its length


def open_shard(path: str) -> BinaryIO:
    """The one place where a shard is opened."""
    return open(open_regular(path), "rb")


def read_range(path: str, start: int, size: int) -> bytes:
    """Bytes of a shard; fewer where it ends before: what a header claims may be anything."""
    with open_shard(path) as file:
        size = min(size, os.fstat(file.fileno()).st_size - start)
        if size <= 0:
            return b""
        file.seek(start)
        return file.read(size)


@dataclass(frozen=True)
class LeftOut:
    """What a shard holds and cannot give."""

    damage: str = ""
    bare: int = 0  # images without a label
    orphans: int = 0  # labels without an image
    repeated: int = 0
    links: int = 0

    def lines(self, path: str, images: int, labelled: bool) -> list[str]:
        counts = {
            f"images of {path} have no label and are left out": self.bare * labelled,
            f"labels of {path} have no image": self.orphans if self.bare and labelled else 0,
            f"images of {path} repeat the name of an earlier one and are left out": self.repeated,
            f"images of {path} are links, not files, and are left out": self.links,
        }
        broken = f"the shard {path} is {self.damage}; its first {images} images are used"
        return [*([broken] if self.damage else []), *(f"{count} {what}" for what, count in counts.items() if count)]


@dataclass(frozen=True)
class Scanned:
    """Every image of a shard, with a label or without."""

    offsets: np.ndarray  # (n,) uint64: where each begins
    sizes: np.ndarray  # (n,) uint64: as the headers claim
    codes: np.ndarray  # (n,) int32: its row of `labels`, or NO_LABEL
    shares: np.ndarray  # (n,) uint64: by content, for splits that have to be made
    keys: Names
    labels: list[Label]
    left_out: LeftOut

    def __len__(self) -> int:
        return len(self.offsets)


def scan(path: str) -> Scanned:
    shard = _Scan(path)
    damage = shard.read()
    return shard.scanned(damage)


@dataclass
class _Scan:
    path: str
    images: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # key -> where it begins, length, share
    labels: dict[str, Label | None] = field(default_factory=dict)
    links: int = 0
    repeated: int = 0

    def read(self) -> str:
        """Read the shard; returns what is wrong with it."""
        try:
            with open_shard(self.path) as file:
                if (end := self._read_plain(file)) is not None:
                    return _ending(file, end)
                self.images, self.labels = {}, {}
                self.repeated = 0
                file.seek(0)
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    for member in tar:
                        self._meet(member.name, member.isfile() and not member.issparse(), _place(member), file)
                        tar.members = []  # type: ignore[attr-defined]  # or it would remember them all
                    return _ending(file, tar.offset)
        except (tarfile.TarError, EOFError, OSError, ValueError, RecursionError) as e:
            if not self.images:
                again = "fetch it again or leave it out of the range"
                raise DataError(f"the shard {self.path} cannot be read: {e}; {again}") from e
            return f"cut short or damaged ({e})"

    def _read_plain(self, file: BinaryIO) -> int | None:
        """Headers of plain files, faster than tarfile; where they end, or None where one is anything else."""
        at, length = 0, os.fstat(file.fileno()).st_size
        while True:
            file.seek(at)
            header = file.read(tarfile.BLOCKSIZE)
            if header == _ZEROS and at:
                return at
            plain = _plain(header)
            start = at + tarfile.BLOCKSIZE
            if plain is None or start + plain[1] > length:
                return None
            self._meet(plain[0], True, (start, plain[1]), file)
            at = start + -(-plain[1] // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE

    def _meet(self, name: str, is_file: bool, place: tuple[int, int], file: BinaryIO) -> None:
        key, suffix = os.path.splitext(name)
        if suffix.lower() in SUFFIXES:
            if not is_file:  # a link may lead anywhere: none is followed
                self.links += 1
            elif key in self.images:
                self.repeated += 1
            else:
                file.seek(place[0])
                self.images[key] = (*place, share_number(place[1], file.read(min(place[1], _BEGINNING))))
        elif suffix in (".cls", ".txt", ".json") and is_file and self.labels.get(key) is None:
            file.seek(place[0])
            self.labels[key] = _label(file.read(min(place[1], _LONGEST_LABEL)), suffix)  # the first that says something

    def scanned(self, damage: str) -> Scanned:
        table, codes = LabelTable(), np.full(len(self.images), NO_LABEL, np.int32)
        for row, key in enumerate(self.images):
            if (label := self.labels.get(key)) is not None:
                codes[row] = table.code(label)
        places = np.array([*self.images.values()], dtype=np.uint64).reshape(-1, 3)
        # 0001.seg.png belongs to the sample 0001 and needs no label of its own
        bare = sum(not self._has_label(key) and not self._has_label(_sample_of(key)) for key in self.images)
        orphans = sum(key not in self.images and not key.startswith("__") for key in self.labels)
        left_out = LeftOut(damage, bare, orphans, self.repeated, self.links)
        offsets, sizes, shares = places.T.copy()
        return Scanned(offsets, sizes, codes, shares, Names(self.images), table.labels, left_out)

    def _has_label(self, key: str) -> bool:
        return self.labels.get(key) is not None


def _plain(header: bytes) -> tuple[str, int] | None:
    """Name and size of a file with nothing special about it; None for all else, which tarfile understands."""
    name, _, _ = header[:100].partition(b"\0")
    size, total = header[124:136].strip(b" \0"), header[148:156].strip(b" \0")
    ordinary = header[156:157] == b"0" and header[257:262] == b"ustar" and header[345:346] == b"\0"
    if not ordinary or not name or name.endswith(b"/") or not size.isdigit() or not total.isdigit():
        return None
    try:
        right = sum(header) - sum(header[148:156]) + 8 * ord(" ") == int(total, 8)
        return (name.decode("utf-8", "surrogateescape"), int(size, 8)) if right else None
    except ValueError:
        return None


class LabelTable:
    """Labels as written, each once, and the number of each."""

    def __init__(self) -> None:
        self.labels: list[Label] = []
        self._codes: dict[object, int] = {}

    def code(self, label: Label) -> int:
        plain = isinstance(label, str)
        key = label if plain else (type(label), *(label.items() if isinstance(label, dict) else label))
        code = self._codes.setdefault(key, len(self.labels))
        if code == len(self.labels):
            self.labels.append(label)
        return code


def share_number(size: int, beginning: bytes) -> int:
    """By the length and beginning of an image, not all of it: a set larger than a disk is not read twice."""
    return content_number(size.to_bytes(8, "big") + beginning[:_BEGINNING])


def _sample_of(key: str) -> str:
    """ "folder/0001.seg" -> "folder/0001", as WebDataset reads names."""
    folder, name = os.path.split(key)
    return os.path.join(folder, name.split(".")[0])


def _ending(file: BinaryIO, offset: int) -> str:
    """What is wrong with the place where the headers end: Python takes any odd block for the end of a shard."""
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        return f"cut short: it lacks its closing blocks at byte {offset}"
    if block.strip(b"\0"):
        return f"damaged at byte {offset}: what should be a header is none"
    while rest := file.read(1 << 20):
        if rest.strip(b"\0"):
            return f"followed by more data after its end at byte {offset} (two shards joined with cat?)"
    return ""


def _place(member: tarfile.TarInfo) -> tuple[int, int]:
    return member.offset_data, member.size


def _label(content: bytes, suffix: str) -> Label | None:
    text = content.decode("utf-8", errors="replace").strip()
    if suffix != ".json":
        return as_label(text)
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return None
    return as_label(next((value[k] for k in _LABEL_KEYS if k in value), None) if isinstance(value, dict) else value)


def as_label(value: object) -> Label | None:
    """What a file says about an image; None where it says nothing."""
    if isinstance(value, dict) and value and all(_finite(v) for v in value.values()):
        return {as_text(name): float(number) for name, number in value.items()}
    if isinstance(value, list):
        return [as_text(v) for v in value]
    return as_text(value).strip() or None if value is not None else None


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
