"""WebDataset shards: tar files of `key.jpg` + `key.cls` (or .json), read in place, never unpacked.

`shards/train-{0000..0099}.tar` names a series; a folder of train-*.tar, val-*.tar and test-*.tar works too.
The headers of each tar are read once to learn where every picture lies; after that a sample is one
read at a known place. The order of an epoch stays inside a few shards at a time, so that the disk or the
network file system sees nearly sequential reads and memory stays small, however large the set is.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.decode import SUFFIXES, BadPicture, sniff_channels
from vitkit.data.manifest import encode_labels
from vitkit.data.packed import Names
from vitkit.data.progress import Track, quiet
from vitkit.data.source import Source, choose_split, complete_splits, content_share
from vitkit.errors import DataError

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
_LABEL_KEYS = ("label", "class", "cls", "labels", "target")

Member = tuple[str, int, int, Any]  # key, where the picture begins, its length, the label as written


class ShardSource(Source):
    def __init__(self, files: list[str], places: np.ndarray, **fields: Any) -> None:
        super().__init__(blocks=places[:, 0], **fields)
        self._files, self._places = files, places  # (N, 3): shard, offset, size

    def encoded(self, index: int) -> bytes:
        shard, offset, size = (int(n) for n in self._places[index])
        try:
            with open(self._files[shard], "rb") as file:
                file.seek(offset)
                data = file.read(size)
        except OSError as e:
            raise BadPicture(f"the shard cannot be read: {e.strerror}") from e
        if len(data) < size:
            raise BadPicture(f"truncated: the shard ends {size - len(data)} bytes too early")
        return data


def is_shards(data: str) -> bool:
    path = Path(data)
    return data.endswith(".tar") or (path.is_dir() and next(path.glob("*.tar"), None) is not None)


def open_shards(data: str, split: str, track: Track = quiet) -> ShardSource:
    files = expand(data)
    scanned = [_scan(path) for path in track(files, "reading the headers of shards")]
    members = [(shard, *member) for shard, found in enumerate(scanned) for member in found]
    if not members:
        raise DataError(f"{data} holds no samples; a shard holds pairs such as 0001.jpg and 0001.cls")
    classes, labels = encode_labels([m[4] for m in members])
    places = np.array([(m[0], m[2], m[3]) for m in members], dtype=np.int64)
    parts = _parts(files, places)
    chosen = np.concatenate([parts[s] for s in choose_split(data, split, parts)])
    source = ShardSource(
        files=files,
        places=places[chosen],
        name=data,
        split=split,
        splits={s: len(r) for s, r in parts.items()},
        classes=_named_classes(files, classes),
        labels=labels[chosen],
        names=Names(f"{files[members[i][0]]}/{members[i][1]}" for i in chosen),
    )
    readable = (_or_none(source, i) for i in range(min(4, len(source))))
    source.channels = sniff_channels([data for data in readable if data])
    return source


def _or_none(source: ShardSource, index: int) -> bytes | None:
    try:
        return source.encoded(index)
    except BadPicture:
        return None


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
        raise DataError(
            f"{len(missing)} of {len(files)} shards do not exist, first {missing[0]}; check the range in {data}"
        )
    return files


def _scan(path: str) -> list[Member]:
    """Every picture of a shard with its label. A shard that is cut short gives what it still has."""
    pictures: dict[str, tuple[int, int]] = {}
    labels: dict[str, Any] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isfile():
                    key, suffix = os.path.splitext(member.name)
                    if suffix.lower() in SUFFIXES:
                        pictures.setdefault(key, (member.offset_data, member.size))
                    elif suffix in (".cls", ".txt", ".json"):
                        labels.setdefault(key, _label(tar, member, suffix))
    except (tarfile.ReadError, EOFError, OSError) as e:
        if not pictures:
            raise DataError(f"the shard {path} cannot be read: {e}; fetch it again or leave it out of the range") from e
    return [(key, *place, labels[key]) for key, place in pictures.items() if labels.get(key) is not None]


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, suffix: str) -> Any:
    opened = tar.extractfile(member)
    text = opened.read().decode("utf-8", errors="replace").strip() if opened else ""
    if suffix != ".json":
        return text or None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return value
    return next((value[k] for k in _LABEL_KEYS if k in value), None)


def _named_classes(files: list[str], classes: list[str]) -> list[str]:
    """Names from a classes.txt beside the shards, one line per class, when labels are numbers."""
    listed = Path(files[0]).parent / "classes.txt"
    if not listed.exists() or not all(c.isdecimal() for c in classes):
        return classes
    names = listed.read_text(encoding="utf-8").splitlines()
    if int(classes[-1]) >= len(names):
        raise DataError(f"{listed} names {len(names)} classes, but a label is {classes[-1]}; give one line per class")
    return [names[int(c)] for c in classes]


def _parts(files: list[str], places: np.ndarray) -> dict[str, np.ndarray]:
    """Rows per split by the first word of the shard's name; what is missing is carved out by content."""
    words = [_SPLIT_WORDS.get(re.split(r"[-_.\d]", Path(f).name.lower())[0], "all") for f in files]
    of_row = np.array(words)[places[:, 0]]
    parts = {s: np.flatnonzero(of_row == s) for s in ("train", "val", "test", "all") if (of_row == s).any()}
    return complete_splits(parts, lambda rows: _shares(files, places[rows]))


def _shares(files: list[str], places: np.ndarray) -> np.ndarray:
    """By the length and beginning of a picture, not all of it: a set larger than a disk is not read twice."""
    shares = np.empty(len(places))
    for shard in np.unique(places[:, 0]):
        with open(files[shard], "rb") as file:
            for row in np.flatnonzero(places[:, 0] == shard):
                file.seek(int(places[row, 1]))
                size = int(places[row, 2])
                shares[row] = content_share(size.to_bytes(8, "big") + file.read(min(size, 4096)))
    return shares
