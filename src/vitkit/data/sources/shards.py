"""WebDataset shards: tar files of `key.jpg` + `key.cls` (or .json), read in place, never unpacked.

`shards/train-{0000..0099}.tar` names a series; a folder of train-*.tar, val-*.tar and test-*.tar works too.
An index beside them says where every image is; after that a sample is one read at a known place.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from vitkit.data.dataset import Dataset, Options, splits_of_files
from vitkit.data.decode import BadImage
from vitkit.data.labels import UNLABELLED, encode_labels, named_classes
from vitkit.data.source import PackedSource, Runs, Source
from vitkit.data.sources.shardtable import ShardNames, shard_table
from vitkit.data.sources.tarscan import NO_LABEL, Label, read_range
from vitkit.errors import ConfigError, DataError, did_you_mean
from vitkit.progress import Progress
from vitkit.storage import RemoteFolder, above, absent, is_url, plain, prefetch, suffix

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclass(eq=False, repr=False)
class ShardSource(PackedSource):
    """`names` know the table of all shards, and which rows of it are here."""

    per_sample = Source.per_sample

    @property
    def shard_names(self) -> ShardNames:
        assert isinstance(self.names, ShardNames)
        return self.names

    def file_of(self, index: int) -> str:
        table = self.shard_names.table
        return table.files[table.shard_of(self.shard_names.row(index))]

    @property
    def spread_out(self) -> bool:
        return False

    @cached_property
    def runs(self) -> Runs:
        return Runs.of(self.shards())

    def shards(self) -> np.ndarray:
        """The number of every sample's shard."""
        names = self.shard_names
        return names.table.shards_of(np.arange(len(names.table)) if names.rows is None else names.rows)

    def encoded(self, index: int) -> bytes:
        row, table = self.shard_names.row(index), self.shard_names.table
        size = int(table.sizes[row])
        try:
            data = read_range(table.files[table.shard_of(row)], int(table.offsets[row]), size)
        except OSError as e:
            raise BadImage(f"the shard cannot be read: {e.strerror}") from e
        if len(data) < size:
            raise BadImage(f"truncated: the shard ends {size - len(data)} bytes too early")
        return data

    def paths(self, rows: np.ndarray) -> list[bytes]:
        return self.shard_names.many(rows)

    def soon(self, rows: np.ndarray) -> None:
        if not is_url(self.files[0]):
            return
        table, names = self.shard_names.table, self.shard_names
        shards = table.shards_of(rows if names.rows is None else names.rows[rows])
        prefetch(table.files[shard] for shard in dict.fromkeys(shards.tolist()))

    def length(self, index: int) -> int:
        return int(self.shard_names.table.sizes[self.shard_names.row(index)])

    def shares(self, rows: np.ndarray, progress: Progress) -> np.ndarray:
        names = self.shard_names
        return names.table.shares(rows if names.rows is None else names.rows[rows])


def matches(data: str) -> bool:
    return suffix(data) == ".tar" or (os.path.isdir(data) and next(Path(data).glob("*.tar"), None) is not None)


def open(data: str, options: Options, progress: Progress) -> Dataset:
    options.allow(data, "target")
    files = expand(data) if options.remote is None else options.remote.paths(".tar")
    table = shard_table(files, progress)
    labels, codes = table.labels()
    kept = None if not options.labelled or (codes != NO_LABEL).all() else np.flatnonzero(codes != NO_LABEL)
    names = ShardNames(table, kept)
    if not len(names):
        raise DataError(f"{data} holds no samples; a shard holds pairs such as 0001.jpg and 0001.cls")
    classes, targets, numbers = _encoded(data, labels, codes if kept is None else codes[kept], options)
    near: RemoteFolder | Path | str = options.remote or (above(files[0]) if is_url(data) else Path(files[0]).parent)
    samples = ShardSource(
        files=table.files,
        name=data,
        classes=tuple(named_classes(near, classes)),
        targets=targets,
        labels=numbers,
        names=names,
    )
    parts = zip(files, table.parts, strict=True)
    lost = [line for file, part in parts for line in part.left_out.lines(file, len(part), options.labelled)]
    splits = splits_of_files([Path(plain(f)) for f in files], Path(data))
    return Dataset(samples, splits, progress, lost=lost, files=samples.shards())


def _encoded(
    data: str, labels: list[Label], codes: np.ndarray, options: Options
) -> tuple[list[str], tuple[str, ...], np.ndarray]:
    """Names of classes, names of values, and the label of every sample."""
    if not options.labelled and (codes == NO_LABEL).any():
        return [*UNLABELLED], (), np.zeros(len(codes), np.int64)
    if any(isinstance(label, dict) for label in labels):
        names, values = _values(data, labels, options.target)
        return [], names, values[codes]
    if options.target:
        Options(target=options.target).allow(data)
    classes, numbers = encode_labels(labels)
    return classes, (), numbers[codes]


def _values(data: str, labels: list[Label], wanted: tuple[str, ...]) -> tuple[tuple[str, ...], np.ndarray]:
    rows = [label for label in labels if isinstance(label, dict)]
    names = wanted or tuple(rows[0])
    for name in names:
        if name not in rows[0]:
            raise ConfigError(f"{data} has no value {name!r}.{did_you_mean(name, rows[0])} It has {', '.join(rows[0])}")
    if len(rows) < len(labels) or not all(name in row for row in rows for name in names):
        raise DataError(f"some images of {data} have the values {', '.join(names)}, others not; give them to all")
    return names, np.array([[row[name] for name in names] for row in rows], dtype=np.float32)


def expand(data: str) -> list[str]:
    """A folder, a file or a series with {0000..0099} -> the shards, which must all exist."""
    if os.path.isdir(data):
        return sorted(str(p) for p in Path(data).glob("*.tar"))
    texts, *bounds = (_RANGE.split(data)[n::3] for n in range(3))
    numbers = [[f"{n:0{len(a)}d}" for n in range(int(a), int(b) + 1)] for a, b in zip(*bounds, strict=True)]
    parts = [[text] for text in texts]
    series = [part for pair in zip(parts, [*numbers, [""]], strict=True) for part in pair]
    files = ["".join(chosen) for chosen in itertools.product(*series)]
    missing = absent(files) if is_url(data) else [f for f in files if not os.path.exists(f)]
    if missing:
        raise DataError(f"{len(missing)} of {len(files)} shards do not exist, first {missing[0]}; check {data}")
    return files
