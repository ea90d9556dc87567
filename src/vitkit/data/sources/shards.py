"""WebDataset shards: tar files of `key.jpg` + `key.cls` (or .json), read in place, never unpacked.

`shards/train-{0000..0099}.tar` names a series; a folder of train-*.tar, val-*.tar and test-*.tar works too.
The headers of each tar are read once; after that a sample is one read at a known place. The order of an epoch stays
inside a few shards at a time: nearly sequential reads and little memory, however large the set is.
"""

from __future__ import annotations

import builtins
import itertools
import os
import re
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vitkit.data.dataset import Dataset, Options, splits_of_files
from vitkit.data.decode import SUFFIXES, BadImage
from vitkit.data.labels import UNLABELLED, encode_labels, named_classes
from vitkit.data.source import Names, PackedSource, content_share
from vitkit.errors import DataError
from vitkit.io import open_regular, parse_json
from vitkit.progress import Progress

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_LONGEST_LABEL = 1 << 20  # bytes
_LABEL_KEYS = ("label", "class", "cls", "labels", "target")


class ShardSource(PackedSource):
    """`places` are shard, offset and size."""

    def encoded(self, index: int) -> bytes:
        size = int(self.places[index, 2])
        data = self._read(index, size)
        if len(data) < size:
            raise BadImage(f"truncated: the shard ends {size - len(data)} bytes too early")
        return data

    def length(self, index: int) -> int:
        return int(self.places[index, 2])

    def share(self, index: int) -> float:
        """By the length and beginning of an image, not all of it: a set larger than a disk is not read twice."""
        size = int(self.places[index, 2])
        return content_share(size.to_bytes(8, "big") + self._read(index, min(size, 4096)))

    def _read(self, index: int, size: int) -> bytes:
        shard, offset, _ = (int(n) for n in self.places[index])
        try:
            with builtins.open(open_regular(self.files[shard]), "rb") as file:
                size = min(size, max(0, os.fstat(file.fileno()).st_size - offset))  # the header may claim anything
                file.seek(offset)
                return file.read(size)
        except OSError as e:
            raise BadImage(f"the shard cannot be read: {e.strerror}") from e


def matches(data: str) -> bool:
    return data.endswith(".tar") or (os.path.isdir(data) and next(Path(data).glob("*.tar"), None) is not None)


def open(data: str, options: Options, progress: Progress) -> Dataset:
    options.allow(data)
    files = expand(data)
    lost: list[str] = []
    scanned = [_scan(path, lost, options.labelled) for path in progress.track(files, "reading the headers of shards")]
    members = [(shard, *member) for shard, found in enumerate(scanned) for member in found]
    if not members:
        raise DataError(f"{data} holds no samples; a shard holds pairs such as 0001.jpg and 0001.cls")
    if not options.labelled and None in (label for *_, label in members):
        classes, labels = [*UNLABELLED], np.zeros(len(members), np.int64)
    else:
        classes, labels = encode_labels([label for *_, label in members])
    places = np.array([(shard, start, size) for shard, _, start, size, _ in members], dtype=np.int64)
    samples = ShardSource(
        files=tuple(files),
        places=places,
        blocks=places[:, 0],
        name=data,
        classes=tuple(named_classes(Path(files[0]).parent, classes)),
        labels=labels,
        names=Names(f"{files[shard]}/{key}" for shard, key, *_ in members),
    )
    splits = np.array(splits_of_files([Path(f) for f in files], Path(data)))[places[:, 0]]
    return Dataset(samples, splits, progress, lost=lost)


def expand(data: str) -> list[str]:
    """A folder, a file or a series with {0000..0099} -> the shards, which must all exist."""
    if os.path.isdir(data):
        return sorted(str(p) for p in Path(data).glob("*.tar"))
    ranges = _RANGE.findall(data)
    pieces = [[f"{n:0{len(a)}d}" for n in range(int(a), int(b) + 1)] for a, b in ranges]
    template = _RANGE.sub("{}", data.replace("{}", "{{}}"))
    files = [template.format(*numbers) for numbers in itertools.product(*pieces)] if ranges else [data]
    missing = [f for f in files if not os.path.exists(f)]
    if missing:
        raise DataError(f"{len(missing)} of {len(files)} shards do not exist, first {missing[0]}; check {data}")
    return files


Member = tuple[str, int, int, object]  # key, where the image begins, its length, the label as written


@dataclass
class _Scan:
    """What the headers of a shard say; what is left out is counted."""

    path: str
    images: dict[str, tuple[int, int]] = field(default_factory=dict)  # key -> where it begins, its length
    labels: dict[str, object] = field(default_factory=dict)
    links: int = 0
    repeated: int = 0

    def read(self) -> list[str]:
        """Read the shard; returns what is wrong with it. One that is cut short gives what it still has."""
        try:
            with builtins.open(open_regular(self.path), "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    self._meet(tar, member)
                damage = _ending(file, tar.offset)
        except (tarfile.TarError, EOFError, OSError, ValueError, RecursionError) as e:
            damage = f"cut short or damaged ({e})"
            if not self.images:
                again = "fetch it again or leave it out of the range"
                raise DataError(f"the shard {self.path} cannot be read: {e}; {again}") from e
        return [f"the shard {self.path} is {damage}; its first {len(self.images)} images are used"] if damage else []

    def _meet(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        key, suffix = os.path.splitext(member.name)
        if suffix.lower() in SUFFIXES:
            if not member.isfile() or member.issparse():  # a link may lead anywhere: none is followed
                self.links += 1
            elif key in self.images:
                self.repeated += 1
            else:
                self.images[key] = (member.offset_data, member.size)
        elif suffix in (".cls", ".txt", ".json") and member.isfile():
            self.labels.setdefault(key, _label(tar, member, suffix))

    def samples(self, labelled: bool) -> tuple[list[Member], list[str]]:
        """The samples, and how many of the images are none."""
        wanted = [key for key in self.images if self._has_label(key) or not labelled]
        found = [(key, *self.images[key], self.labels.get(key)) for key in wanted]
        # 0001.seg.png belongs to the sample 0001 and needs no label of its own
        bare = sum(
            labelled and not self._has_label(key) and not self._has_label(_sample_of(key)) for key in self.images
        )
        no_image = sum(key not in self.images and not key.startswith("__") for key in self.labels) if bare else 0
        counts = {
            f"images of {self.path} have no label and are left out": bare,
            f"labels of {self.path} have no image": no_image,
            f"images of {self.path} repeat the name of an earlier one and are left out": self.repeated,
            f"images of {self.path} are links, not files, and are left out": self.links,
        }
        return found, [f"{count} {what}" for what, count in counts.items() if count]

    def _has_label(self, key: str) -> bool:
        return self.labels.get(key) is not None


def _scan(path: str, lost: list[str], labelled: bool) -> list[Member]:
    """Every image of a shard with its label, if it must have one; what is wrong with the shard goes into `lost`."""
    shard = _Scan(path)
    lost += shard.read()
    found, left_out = shard.samples(labelled)
    lost += left_out
    return found


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


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, suffix: str) -> object:
    opened = tar.extractfile(member)
    text = opened.read(_LONGEST_LABEL).decode("utf-8", errors="replace").strip() if opened else ""
    if suffix != ".json":
        return text or None
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return None
    return next((value[k] for k in _LABEL_KEYS if k in value), None) if isinstance(value, dict) else value
