"""Parquet with the encoded images inside: the layout of Hugging Face `datasets`.

One file, or a folder of files called train-*.parquet, validation-*.parquet, test-*.parquet. The image
column is a struct {bytes, path} or plain bytes; names of classes come from the `huggingface` entry of
the schema. Rows are read a row group at a time, and the order of an epoch keeps row groups together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitkit.data.dataset import Dataset, Options, splits_of_files
from vitkit.data.decode import BadImage
from vitkit.data.labels import UNLABELLED, encode_labels, read_labels, zeros_and_ones
from vitkit.data.source import Names, PackedSource
from vitkit.data.sources.lists import require_pyarrow
from vitkit.errors import DataError, StorageError, as_text, in_words
from vitkit.io import parse_json
from vitkit.progress import Progress
from vitkit.storage import is_url, local, suffix

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, Schema

_IMAGE_COLUMNS = ("image", "img", "picture", "jpg", "png", "bytes")


@dataclass(eq=False, repr=False)
class ParquetSource(PackedSource):
    """`places` are file, row group and row."""

    column: str = "image"

    def encoded(self, index: int) -> bytes:
        file, group, row = (int(n) for n in self.places[index])
        try:
            path = str(local(self.files[file]))
            cell = _read_column(path, os.stat(path).st_mtime_ns, group, self.column)[row].as_py()
        except StorageError:
            raise
        except Exception as e:  # pyarrow raises almost anything on damaged input
            raise BadImage(f"row group {group} cannot be read: {e}") from e
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        return content if isinstance(content, bytes) else b""  # a missing image is an empty one


@lru_cache(maxsize=6)  # row groups held by each process; the order of an epoch mixes fewer than that
def _read_column(path: str, changed: int, group: int, column: str) -> ChunkedArray:
    return require_pyarrow().parquet.ParquetFile(path).read_row_group(group, columns=[column]).column(0)


def matches(data: str) -> bool:
    """A folder with Parquet in it; or a file that has the images inside, and does not only name them."""
    path = Path(data)
    if path.is_dir():
        return next(path.rglob("*.parquet"), None) is not None
    if suffix(data) != ".parquet" or not (is_url(data) or path.is_file()):
        return False
    return _image_column(_schema(local(data))) is not None


def open(data: str, options: Options, progress: Progress) -> Dataset:
    options.allow(data, "target")
    path = Path(data)
    named = sorted(str(file) for file in path.rglob("*.parquet")) if path.is_dir() else [data]
    named = options.remote.paths(".parquet") if options.remote is not None else named
    files = [local(name) for name in progress.track(named, "opening Parquet")]
    schema = _schema(files[0])
    column = _image_column(schema)
    if column is None:
        raise DataError(f"{files[0]} has no column of images: it has {', '.join(schema.names)}; name one 'image'")
    places, notes = _places(files, progress), list[str]()
    classes, targets, labels = read_labels(
        files[0],
        schema.names,
        lambda name: [cell for file in files for cell in _cells(file, name)],
        options.target,
        lambda name, cells: _numbered(schema, name, cells),
        None if options.labelled else notes,
    )
    if not options.labelled and labels.ndim == 1 and (labels < 0).any():
        classes, labels = [*UNLABELLED], np.zeros(len(labels), np.int64)
    known = labels >= 0 if labels.ndim == 1 else np.ones(len(labels), dtype=bool)
    lost = [] if known.all() else [f"{int((~known).sum())} rows have no label and are left out"]
    places = places[known]
    samples = ParquetSource(
        data,
        classes=tuple(classes),
        labels=labels[known],
        names=Names(f"{named[f]}:row {g}.{r}" for f, g, r in places),
        blocks=places[:, 0] * 1_000_000 + places[:, 1],
        targets=targets,
        files=tuple(named),
        places=places,
        column=column,
    )
    splits = np.array(splits_of_files([Path(name) for name in named], path))[places[:, 0]]
    return Dataset(samples, splits, progress, notes, lost=lost)


def _reading(path: Path) -> AbstractContextManager[None]:
    return in_words(f"{path} cannot be read as Parquet", "check that the file is whole")


def _schema(path: Path) -> Schema:
    with _reading(path):
        return require_pyarrow().parquet.read_schema(path)


def _cells(path: Path, column: str) -> list[object]:
    with _reading(path):
        return list(require_pyarrow().parquet.read_table(path, columns=[column]).column(0).to_pylist())


def _image_column(schema: Schema) -> str | None:
    kinds = {name: str(schema.field(name).type) for name in _IMAGE_COLUMNS if name in schema.names}
    return next((name for name, kind in kinds.items() if "bytes" in kind or "binary" in kind), None)


def _places(files: list[Path], progress: Progress) -> np.ndarray:
    """(file, row group, row) of every sample."""
    places: list[tuple[int, int, int]] = []
    for f, path in enumerate(progress.track(files, "reading the headers of Parquet")):
        with _reading(path):
            metadata = require_pyarrow().parquet.ParquetFile(path).metadata
            for group in range(metadata.num_row_groups):
                places += [(f, group, row) for row in range(metadata.row_group(group).num_rows)]
    if not places:
        raise DataError(f"{files[0]} has no rows; it must have one per image")
    return np.array(places, dtype=np.int64)


def _numbered(schema: Schema, column: str, cells: Sequence[object]) -> tuple[list[str], np.ndarray]:
    """Class numbers, -1 where none is written; or zeros and ones where cells are lists. Hugging Face names classes."""
    names = _class_names(schema, column)
    if any(isinstance(cell, list) for cell in cells):
        several = [cell if isinstance(cell, list) else [] for cell in cells]
        if names and not all(isinstance(n, int) and 0 <= n < len(names) for cell in several for n in cell):
            raise DataError(f"the column {column!r} holds a label beyond its {len(names)} class names; repair the set")
        return (names, zeros_and_ones(several, len(names))) if names else encode_labels(several)
    labels = np.full(len(cells), -1, dtype=np.int64)
    written = np.array([cell is not None for cell in cells], dtype=bool)
    known = [cell for cell in cells if cell is not None]
    if names and not all(isinstance(cell, int) for cell in known):
        raise DataError(
            f"the column {column!r} has {len(names)} class names and must hold whole numbers; repair the set"
        )
    names, labels[written] = (names, np.array(known, dtype=np.int64)) if names else encode_labels(known)
    if labels.min() < -1 or labels.max() >= len(names):
        raise DataError(f"labels go from {labels.min()} to {labels.max()} for {len(names)} class names; repair the set")
    return names, labels


def _class_names(schema: Schema, column: str) -> list[str]:
    """As Hugging Face writes them into the schema; none where that is not what the schema says."""
    found: object = None
    with suppress(ValueError, RecursionError):
        found = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"))
    for key in ("info", "features", column):
        found = found.get(key) if isinstance(found, dict) else None
    inner = found.get("feature") if isinstance(found, dict) else None
    several = [d.get("names") for d in (found, inner) if isinstance(d, dict)]
    return next(([as_text(name) for name in names] for names in several if isinstance(names, list)), [])
