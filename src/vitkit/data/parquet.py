"""Parquet with the encoded pictures inside: the layout of Hugging Face `datasets`.

One file, or a folder of files called train-*.parquet, validation-*.parquet, test-*.parquet. The picture
column is a struct {bytes, path} or plain bytes; names of classes come from the `huggingface` entry of
the schema. Rows are read a row group at a time, and the order of an epoch keeps row groups together.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.decode import BadPicture, sniff_channels
from vitkit.data.manifest import LABEL_COLUMNS, encode_labels, find_column, require_pyarrow
from vitkit.data.packed import Names
from vitkit.data.source import Source, choose_split, complete_splits, content_share
from vitkit.errors import DataError

_PICTURE_COLUMNS = ("image", "img", "picture", "jpg", "png", "bytes")
_KEPT_GROUPS = 6  # row groups held by each process; the order of an epoch mixes fewer than that
_SPLIT_OF_FILE = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test"}


class ParquetSource(Source):
    def __init__(self, files: list[str], groups: np.ndarray, rows: np.ndarray, column: str, **fields: Any) -> None:
        super().__init__(blocks=groups[:, 0] * 1_000_000 + groups[:, 1], **fields)
        self._files, self._groups, self._rows, self._column = files, groups, rows, column
        self._kept: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def encoded(self, index: int) -> bytes:
        file, group = (int(n) for n in self._groups[index])
        if (file, group) not in self._kept:
            pyarrow = require_pyarrow()
            try:
                table = pyarrow.parquet.ParquetFile(self._files[file]).read_row_group(group, columns=[self._column])
            except (OSError, ValueError) as e:
                raise BadPicture(f"row group {group} cannot be read: {e}") from e
            self._kept[file, group] = table.column(0)
            while len(self._kept) > _KEPT_GROUPS:
                self._kept.popitem(last=False)
        self._kept.move_to_end((file, group))
        return picture_bytes(self._kept[file, group][int(self._rows[index])].as_py())

    def __getstate__(self) -> dict[str, Any]:  # what one process holds is of no use to another
        return {**self.__dict__, "_kept": OrderedDict()}


def holds_pictures(path: Path) -> bool:
    """True when a Parquet file has the pictures inside, False when it only names them."""
    try:
        schema = require_pyarrow().parquet.read_schema(path)
    except (OSError, ValueError) as e:
        raise DataError(f"{path} cannot be read as Parquet: {e}; check that the file is whole") from e
    return _picture_column(schema) is not None


def open_parquet(path: Path, split: str) -> ParquetSource:
    pyarrow = require_pyarrow()
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    schema = pyarrow.parquet.read_schema(files[0])
    column = _picture_column(schema)
    if column is None:
        raise DataError(f"{files[0]} has no column of pictures: it has {', '.join(schema.names)}; name one 'image'")
    label_column = find_column(files[0], schema.names, LABEL_COLUMNS, "labels")
    places, written, of_split = _read_places(files, label_column)
    classes, labels = _labels(schema, label_column, written)
    parts = _parts(files, places, of_split, column)
    chosen = np.concatenate([parts[s] for s in choose_split(str(path), split, parts)])
    source = ParquetSource(
        files=[str(f) for f in files],
        groups=places[chosen, :2],
        rows=places[chosen, 2],
        column=column,
        name=str(path),
        split=split,
        splits={s: len(r) for s, r in parts.items()},
        classes=classes,
        labels=labels[chosen],
        names=Names(f"{files[f]}:row {g}.{r}" for f, g, r in places[chosen]),
    )
    source.channels = sniff_channels([source.encoded(i) for i in range(min(4, len(source)))])
    return source


def _picture_column(schema: Any) -> str | None:
    for name in _PICTURE_COLUMNS:
        if name in schema.names:
            kind = str(schema.field(name).type)
            if "bytes" in kind or "binary" in kind:
                return name
    return None


def _read_places(files: list[Path], label_column: str) -> tuple[np.ndarray, list[Any], list[str]]:
    """(file, row group, row) of every sample, its label as written, and the split its file's name says."""
    places, labels, splits = [], [], []
    for f, path in enumerate(files):
        file = require_pyarrow().parquet.ParquetFile(path)
        word = re.split(r"[-_.]", path.name.lower())[0]
        for group in range(file.num_row_groups):
            column = file.read_row_group(group, columns=[label_column]).column(0).to_pylist()
            places += [(f, group, row) for row in range(len(column))]
            labels += column
            splits += [_SPLIT_OF_FILE.get(word, "all")] * len(column)
    if not places:
        raise DataError(f"{files[0]} has no rows; it must have one per picture")
    return np.array(places, dtype=np.int64), labels, splits


def _labels(schema: Any, column: str, written: list[Any]) -> tuple[list[str], np.ndarray]:
    """Class names from the schema's `huggingface` entry, or from the labels themselves."""
    metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    feature = metadata.get("info", {}).get("features", {}).get(column, {})
    names = feature.get("names") or (feature.get("feature") or {}).get("names")
    if not names:
        return encode_labels(written)
    if isinstance(written[0], list):
        matrix = np.zeros((len(written), len(names)), dtype=np.uint8)
        for row, several in enumerate(written):
            matrix[row, several] = 1
        return names, matrix
    labels = np.array([-1 if w is None else w for w in written], dtype=np.int64)
    if labels.min() < 0 or labels.max() >= len(names):
        raise DataError(f"labels go from {labels.min()} to {labels.max()} for {len(names)} class names; repair the set")
    return list(names), labels


def _parts(files: list[Path], places: np.ndarray, of_split: list[str], column: str) -> dict[str, np.ndarray]:
    written = np.array(of_split)
    parts = {s: np.flatnonzero(written == s) for s in ("train", "val", "test", "all") if (written == s).any()}

    def shares_of(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([_shares(files[f], g, column) for f, g in np.unique(places[rows, :2], axis=0)])

    return complete_splits(parts, shares_of)


def _shares(path: Path, group: int, column: str) -> np.ndarray:
    table = require_pyarrow().parquet.ParquetFile(path).read_row_group(int(group), columns=[column])
    return np.array([content_share(picture_bytes(v)) for v in table.column(0).to_pylist()])


def picture_bytes(value: Any) -> bytes:
    """What a cell holds -> the encoded picture; an empty one for a missing picture."""
    if isinstance(value, dict):
        value = value.get("bytes")
    return value or b""
