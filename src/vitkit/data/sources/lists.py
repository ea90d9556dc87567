"""Lists of images: tables with a column of paths and one of labels, or lines of "path label".

`.csv`, `.tsv`, `.jsonl`, `.parquet`: columns are found by name: path (or file, filename, image), label (or class,
labels, target) and, if present, split. Paths are relative to the list. An image may have several labels: a JSON
list, or names joined with "|" in a column called `labels`. Columns of numbers (`target`) are values to be predicted.

`.txt`, or a folder of train.txt, val.txt, test.txt: path and label are separated by spaces, a tab or a comma. A label
is the name of a class, or its number; names for the numbers come from a classes.txt (or synsets.txt ...) beside it.
"""

from __future__ import annotations

import csv
import os
import re
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np

from vitkit.data.dataset import Dataset, Options, first_word, is_split, split_name, splits_of_files
from vitkit.data.decode import SUFFIXES
from vitkit.data.labels import UNLABELLED, encode_labels, find_column, named_classes, read_labels
from vitkit.data.source import Names, Source
from vitkit.errors import DataError, MissingPackage, StorageError, in_words
from vitkit.io import parse_json
from vitkit.progress import Progress
from vitkit.storage import above, is_url, is_web, listing, local, named_in, suffix

_PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path")
_SUFFIX = "|".join(re.escape(suffix) for suffix in sorted(SUFFIXES))
_LINE = re.compile(rf"""["']?(?P<path>.+?(?:{_SUFFIX}))["']?(?:\s*[,\t]\s*|\s+)(?P<label>\S.*)""", re.IGNORECASE)
_PLAIN = re.compile(r"(?P<path>.*\S)(?:\s*[,\t]\s*|\s+)(?P<label>[^\s,]+)")  # a path without a known suffix

Row = dict[str, object]


def matches(data: str) -> bool:
    if is_url(data):
        return suffix(data) in (".csv", ".tsv", ".jsonl", ".parquet", ".txt")
    path = Path(data)
    is_table = path.suffix.lower() in (".csv", ".tsv", ".jsonl", ".parquet") and path.is_file()
    return is_table or bool(_texts(path))


def open(data: str, options: Options, progress: Progress) -> Dataset:
    path = local(data)
    texts = _texts(path)
    if texts:
        options.allow(data)
        return _open_texts(data, texts, progress, options.labelled)
    options.allow(data, "target")
    rows = _read_rows(path)
    if not rows:
        raise DataError(f"{path} lists no images; give it a header such as path,label and one line per image")
    path_column, notes = find_column(path, list(rows[0]), _PATH_COLUMNS, "paths"), list[str]()
    classes, targets, labels = read_labels(
        path,
        list(rows[0]),
        lambda name: [row.get(name) for row in rows],
        options.target,
        lambda name, cells: encode_labels(cells, several=name == "labels"),
        None if options.labelled else notes,
    )
    for line, row in enumerate(rows, start=2):
        if not is_path(cell := row.get(path_column)):
            raise DataError(f"{path}, row {line}: the column {path_column!r} must hold a path, not {str(cell)[:80]!r}")
    splits = [split_name(row.get("split")) for row in rows]
    if any(splits) and not all(splits):
        raise DataError(f"{path}, row {splits.index('') + 2} has no split, other rows have; write train, val or test")
    files = Names(_located(data, [str(row[path_column]) for row in rows], path.parent))
    samples = Source(name=data, labels=labels, names=files, classes=tuple(classes), targets=targets)
    return Dataset(samples, splits, progress, notes)


def _located(data: str, rows: list[str], base: Path) -> list[str]:
    """Where the images are that the rows of a list name: URLs, or paths from the folder of the list."""
    if not is_url(data):  # the user's own list: its rows may lead anywhere
        return [row if is_url(row) else str(base / row) for row in rows]
    found = [named_in(data, row) for row in rows]
    if not is_web(data) and any(not is_url(row) for row in rows):
        with suppress(StorageError):  # one listing tells sizes and versions of all; without it each is asked for
            listing(above(data))
    return found


def _read_rows(path: Path) -> list[Row]:
    suffix = path.suffix.lower()
    with in_words(f"the list {path} cannot be read", f"write it as UTF-8 {suffix} with path and label"):
        if suffix == ".parquet":
            return list(require_pyarrow().parquet.read_table(path).to_pylist())
        if suffix == ".jsonl":
            return _json_rows(path)
        with path.open(newline="", encoding="utf-8-sig") as file:
            return [dict(row) for row in csv.DictReader(file, delimiter="\t" if suffix == ".tsv" else ",")]


def _json_rows(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            row = parse_json(line)
            if not isinstance(row, dict):
                raise DataError(
                    f'{path}, line {number}: {line[:80]!r} is no object; write {{"path": ..., "label": ...}}'
                )
            rows.append(row)
    return rows


def is_path(cell: object) -> bool:
    """Whether a cell can be the name of a file at all: not empty, no NUL, nothing that no file system can hold."""
    if not isinstance(cell, str) or not cell.strip() or "\0" in cell:
        return False
    try:
        return bool(os.fsencode(cell))
    except UnicodeEncodeError:
        return False


def require_pyarrow() -> ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise MissingPackage("pyarrow", "reading Parquet", "data") from e
    return cast(ModuleType, pyarrow)


def _open_texts(data: str, lists: list[Path], progress: Progress, labelled: bool) -> Dataset:
    rows: list[tuple[str, str, str]] = []  # path, label and split of every image
    for path, split in zip(lists, splits_of_files(lists, lists[0].parent), strict=True):
        pairs = _read_pairs(path, labelled)
        if is_url(data):
            located = _located(data, [file for file, _ in pairs], path.parent)
            rows += [(file, label, split) for file, (_, label) in zip(located, pairs, strict=True)]
            continue
        own = path.parent  # paths are relative to the folder of the list, or to one beside it
        near = (own, own / path.stem, own / "images", own.parent)
        base = next((folder for folder in near if (folder / pairs[0][0]).exists()), own)
        rows += [(file if is_url(file) else str(base / file), label, split) for file, label in pairs]
    if all(label for _, label, _ in rows):
        classes, labels = encode_labels([label for _, label, _ in rows])
        classes = named_classes(above(data) if is_url(data) else lists[0].parent, classes)
    else:
        classes, labels = [*UNLABELLED], np.zeros(len(rows), np.int64)
    samples = Source(name=data, labels=labels, names=Names(file for file, _, _ in rows), classes=tuple(classes))
    note = f"read as lists of images and labels: {', '.join(path.name for path in lists)}"
    return Dataset(samples, [split for _, _, split in rows], progress, [note])


def _texts(path: Path) -> list[Path]:
    """The list, or those of a folder that are called after splits."""
    if path.is_file():
        return [path] if path.suffix.lower() == ".txt" else []
    found = []
    for listed in (p for p in sorted(path.glob("*.txt")) if is_split(first_word(p))):
        with listed.open(encoding="utf-8-sig", errors="replace") as file:
            first = next((line.strip() for line in file if line.strip()), "")
        found += [listed] if _LINE.fullmatch(first) else []
    return found


def _read_pairs(path: Path, labelled: bool) -> list[tuple[str, str]]:
    """(path, label) of every line; without labels a line may be a path alone."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as e:
        raise DataError(f"the list {path} cannot be read: {e}; write it as UTF-8 text") from e
    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if not labelled and Path(line.strip()).suffix.lower() in SUFFIXES and is_path(line):
            pairs.append((line.strip(), ""))
            continue
        found = _LINE.fullmatch(line.strip()) or _PLAIN.fullmatch(line.strip())
        if found is None or not is_path(found["path"]):
            raise DataError(f"{path}, line {number}: {line[:80]!r} is not a path and a label; write 'cat/1.jpg cat'")
        pairs.append((found["path"], found["label"].strip()))
    if not pairs:
        raise DataError(f"{path} lists no images; write a path and a label on each line")
    return pairs
