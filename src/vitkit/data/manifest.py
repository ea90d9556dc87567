"""A list of pictures: `.csv`, `.tsv`, `.jsonl` or `.parquet` with a column of paths and one of labels.

Columns are found by name: path (or file, filename, image), label (or class, labels, target) and, if
present, split. Paths are relative to the manifest. A picture may have several labels: a JSON list, or
names joined with "|" in a column called `labels`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.decode import sniff_channels
from vitkit.data.packed import Names
from vitkit.data.progress import Track, quiet
from vitkit.data.source import SPLITS, FileSource, choose_split, complete_splits, file_share
from vitkit.errors import DataError

PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path")
LABEL_COLUMNS = ("label", "labels", "class", "classes", "target", "category")
_SPLIT_NAMES = {"training": "train", "valid": "val", "validation": "val", "dev": "val", "testing": "test"}

Rows = list[dict[str, Any]]


def open_manifest(path: Path, split: str, track: Track = quiet) -> FileSource:
    rows = read_rows(path)
    if not rows:
        raise DataError(f"{path} lists no pictures; give it a header such as path,label and one line per picture")
    columns = list(rows[0])
    path_column = find_column(path, columns, PATH_COLUMNS, "paths")
    label_column = find_column(path, columns, LABEL_COLUMNS, "labels")
    files = [_resolve(path, row, path_column, line) for line, row in enumerate(rows, start=2)]
    classes, labels = encode_labels([row[label_column] for row in rows], several=label_column == "labels")
    parts = split_rows(path, [row.get("split") for row in rows])
    parts = complete_splits(parts, lambda chosen: _shares(files, chosen, track))
    chosen = np.concatenate([parts[s] for s in choose_split(str(path), split, parts)])
    return FileSource(
        name=str(path),
        split=split,
        splits={s: len(part) for s, part in parts.items()},
        classes=classes,
        labels=labels[chosen],
        names=Names(files[i] for i in chosen),
        channels=sniff_channels([files[i] for i in chosen]),
    )


def read_rows(path: Path) -> Rows:
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            return require_pyarrow().parquet.read_table(path).to_pylist()
        if suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").splitlines()
            return [json.loads(line) for line in lines if line.strip()]
        with open(path, newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file, delimiter="\t" if suffix == ".tsv" else ","))
    except (ValueError, OSError, csv.Error) as e:  # pyarrow's errors are ValueErrors or OSErrors
        raise DataError(
            f"the manifest {path} cannot be read: {e}; write it as UTF-8 {suffix} with path and label"
        ) from e


def require_pyarrow() -> Any:
    from vitkit.errors import MissingPackage

    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise MissingPackage("pyarrow", "reading Parquet", "data") from e
    return pyarrow


def find_column(path: Path, columns: Sequence[str], known: Sequence[str], what: str) -> str:
    """The first known column, ignoring case."""
    by_name = {c.strip().lower(): c for c in columns if c is not None}
    for name in known:
        if name in by_name:
            return by_name[name]
    raise DataError(f"{path} has no column of {what}: it has {', '.join(map(str, columns))}; name one {known[0]!r}")


def _resolve(manifest: Path, row: dict[str, Any], column: str, line: int) -> str:
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{manifest}, row {line}: the column {column!r} must hold the path of a picture, not {value!r}")
    return str(manifest.parent / value)


def encode_labels(values: Sequence[Any], several: bool = False) -> tuple[list[str], np.ndarray]:
    """Labels as written -> (class names in order, class numbers (N,) or zeros and ones (N, classes)).

    `several` says that text may hold names joined with "|"; lists always mean several labels.
    """
    several = several or any(isinstance(v, (list, tuple)) for v in values)
    sets = [_label_set(v, several) for v in values]
    for row, names in enumerate(sets):
        if not several and not names[0]:
            raise DataError(f"row {row + 2} has no label; give every picture a class, or use a `labels` column")
    classes = _sorted_classes({name for names in sets for name in names})
    number = {name: i for i, name in enumerate(classes)}
    if not several:
        return classes, np.array([number[names[0]] for names in sets], dtype=np.int64)
    matrix = np.zeros((len(sets), len(classes)), dtype=np.uint8)
    for row, names in enumerate(sets):
        matrix[row, [number[n] for n in names]] = 1
    return classes, matrix


def _label_set(value: Any, several: bool) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [str(v) for v in value]
    text = "" if value is None else str(value).strip()
    if not several:
        return [text]
    if text.startswith("["):
        return [str(v) for v in json.loads(text)]
    return [part.strip() for part in text.split("|") if part.strip()]


def _sorted_classes(names: set[str]) -> list[str]:
    """Numbers in the order of numbers, otherwise by name: class 10 comes after class 9."""
    return sorted(names, key=int) if all(n.lstrip("-").isdecimal() for n in names) else sorted(names)


def split_rows(path: Path, written: Sequence[Any]) -> dict[str, np.ndarray]:
    """Rows per split as the manifest says; {"all": rows} when it does not say."""
    if all(w in (None, "") for w in written):
        return {"all": np.arange(len(written))}
    names = [_SPLIT_NAMES.get(str(w).strip().lower(), str(w).strip().lower()) for w in written]
    for row, name in enumerate(names):
        if name not in SPLITS:
            raise DataError(f"{path}, row {row + 2}: split {written[row]!r} is not one of {', '.join(SPLITS)}")
    return {s: np.flatnonzero(np.array(names) == s) for s in SPLITS if s in names}


def _shares(files: list[str], rows: np.ndarray, track: Track) -> np.ndarray:
    return np.array([file_share(files[i]) for i in track(rows.tolist(), "splitting by content")])
