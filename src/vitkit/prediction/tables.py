"""The same rows as .csv, .jsonl or .parquet, and features as .npz: one piece at a time, whatever their number.

A row is an image. What has no value is an empty field in .csv and null elsewhere.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from vitkit.errors import ConfigError, DataError, MissingPackage
from vitkit.io import csv_cell, dumps
from vitkit.runtime.table import one_of

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, str | float | np.ndarray | None]  # features are an array, and only readable images have them
Columns = dict[str, type]  # name -> str, float, or list for features
Pieces = Callable[[], Iterator[list[Row]]]  # starts from the beginning at every call
MANIFEST = "_manifest.json"  # of a folder; Arrow, Spark and DuckDB pass over names that begin so
_SAME_TIME = (1980, 1, 1, 0, 0, 0)  # so that equal results are equal files


def check_format(out: Path, features: str | None) -> None:
    """Before the work, not after it."""
    suffix, known = out.suffix.lower(), (".csv", ".jsonl", ".parquet", *([".npz"] if features else []))
    if is_folder(out):
        check_folder(out, one_of(known))
    elif suffix not in known:
        raise ConfigError(
            f"--out {out} must end with {one_of(known)}; without an ending it is a folder of Parquet files"
        )
    elif out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it, such as {out / f'result{known[0]}'}")
    if suffix in ("", ".parquet") and importlib.util.find_spec("pyarrow") is None:
        raise MissingPackage("pyarrow", "writing .parquet", "data")
    if suffix == ".csv" and features == "tokens":
        raise DataError("patch tokens are a table per image, which .csv cannot hold; write .npz, .parquet or .jsonl")


def is_folder(out: Path) -> bool:
    """Whether OUT, by its name, is a folder of Parquet files."""
    return not out.suffix


def check_folder(out: Path, known: str) -> None:
    """A folder that is there is replaced only where it is a result like this one: never images of somebody."""
    if out.exists() and not (out / MANIFEST).is_file():
        what = f"--out {out} exists and is no folder of results, which would be replaced"
        raise ConfigError(f"{what}; a file must end with {known}, and a folder be a new one")


def features_of(row: Row) -> np.ndarray | None:
    found = row.get("features")
    return found if isinstance(found, np.ndarray) else None


def shape_of(pieces: Pieces) -> tuple[int, ...]:
    """Of the features of an image: () where there are none."""
    arrays = (features_of(row) for rows in pieces() for row in rows)
    return next((array.shape for array in arrays if array is not None), ())


def write_table(
    file: BinaryIO, suffix: str, pieces: Pieces, columns: Columns, shape: tuple[int, ...] | None = None
) -> None:
    """`shape`: that of the features of an image, where it is known."""
    shape = shape_of(pieces) if shape is None else shape
    writers = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet, ".npz": _npz}
    writers[suffix](file, pieces, columns, shape)


def _csv(file: BinaryIO, pieces: Pieces, columns: Columns, shape: tuple[int, ...]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    names = [f"feature_{i}" for i in range(sum(shape))]  # one for each number of a vector
    writer.writerow([n for c in columns for n in (names if c == "features" else [csv_cell(c)])])
    for rows in pieces():
        for row in rows:
            vector = features_of(row)
            values = [None] * len(names) if vector is None else vector.tolist()
            writer.writerow([v for c in columns for v in (values if c == "features" else [csv_cell(row[c])])])
    text.detach()


def _jsonl(file: BinaryIO, pieces: Pieces, columns: Columns, shape: tuple[int, ...]) -> None:
    for rows in pieces():
        for row in rows:
            ordered = {c: row.get(c) for c in columns}
            file.write(dumps(ordered, default=np.ndarray.tolist).encode() + b"\n")


def _parquet(file: BinaryIO, pieces: Pieces, columns: Columns, shape: tuple[int, ...]) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(file, arrow_table([], columns, len(shape)).schema) as writer:
        for rows in pieces():
            writer.write_table(arrow_table(rows, columns, len(shape)))


def arrow_table(rows: list[Row], columns: Columns, dimensions: int) -> pa.Table:
    """Rows as Arrow has them; `dimensions` of the features of an image: 1 for a vector, 2 for its tokens."""
    import pyarrow as pa

    features = pa.list_(pa.float32())
    for _ in range(1, dimensions):
        features = pa.list_(features)
    kinds = {str: pa.string(), float: pa.float64(), list: features}
    schema = pa.schema([(c, kinds[kind]) for c, kind in columns.items()])
    values = {c: [row.get(c) for row in rows] for c in columns}
    lists = {c: [v.tolist() if isinstance(v, np.ndarray) else v for v in vs] for c, vs in values.items()}
    return pa.table(lists, schema=schema)


def _npz(file: BinaryIO, pieces: Pieces, columns: Columns, shape: tuple[int, ...]) -> None:
    """`paths` and `features` of what could be read, row by row, and `bad_paths` and `bad_reasons` of the rest.

    Of a labelled set also `labels` and `splits`.
    """
    more = {name: f"{name}s" for name in ("label", "split") if name in columns}
    every = [{c: r.get(c) for c in ("path", "error", *more)} for rows in pieces() for r in rows]
    good, bad = ([row for row in every if (row["error"] is None) is wanted] for wanted in (True, False))
    words = {"paths": [r["path"] for r in good], "bad_paths": [r["path"] for r in bad]}
    words |= {"bad_reasons": [r["error"] for r in bad], **{many: [r[one] for r in good] for one, many in more.items()}}
    entries = {name: zipfile.ZipInfo(f"{name}.npy", _SAME_TIME) for name in (*words, "features")}
    with zipfile.ZipFile(file, "w") as archive:
        for name, values in words.items():
            with archive.open(entries[name], "w") as entry:
                np.save(entry, np.array(values, dtype=str))
        with archive.open(entries["features"], "w", force_zip64=True) as entry:
            header = {"descr": "<f4", "fortran_order": False, "shape": (len(good), *shape)}
            np.lib.format.write_array_header_1_0(entry, header)
            for array in (features_of(row) for rows in pieces() for row in rows):
                if array is not None:
                    entry.write(array.astype("<f4", order="C").tobytes())
