"""The same rows as .csv, .jsonl or .parquet, and features as .npz: one piece at a time, whatever their number.

A row is a picture. What has no value is an empty field in .csv and null elsewhere.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from vitkit.errors import ConfigError, DataError, MissingPackage

if TYPE_CHECKING:
    from vitkit.predict.job import Part, Row

Columns = dict[str, type]
Pieces = Callable[[], Iterator["Part"]]


def check_format(out: Path, features: bool) -> None:
    """Before the work, not after it."""
    known = (".csv", ".jsonl", ".parquet", *([".npz"] if features else []))
    if out.suffix.lower() not in known:
        raise ConfigError(f"--out {out} must end with {', '.join(known[:-1])} or {known[-1]}")
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it, such as {out / f'result{known[0]}'}")
    if out.suffix.lower() == ".parquet":
        _pyarrow()


def write_table(file: BinaryIO, suffix: str, pieces: Pieces, columns: Columns) -> None:
    """`pieces` starts from the beginning at every call."""
    features = next((p.features for p in pieces() if p.features is not None), None)
    shape = () if features is None else features.shape[1:]
    writers = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet, ".npz": _npz}
    writers[suffix](file, pieces, columns, shape)


def _with_features(part: Part) -> Iterator[Row]:
    """Rows with their features as lists; a picture that could not be read has none."""
    values = iter(part.features if part.features is not None else ())
    for row in part.rows:
        yield row if row["error"] is not None or part.features is None else {**row, "features": next(values).tolist()}


def _csv(file: BinaryIO, pieces: Pieces, columns: Columns, shape: tuple[int, ...]) -> None:
    if len(shape) > 1:
        raise DataError("patch tokens are a table per picture, which .csv cannot hold; write .npz, .parquet or .jsonl")
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    names = [f"feature_{i}" for i in range(*shape)] if shape else []
    writer.writerow([n for c in columns for n in (names if c == "features" else [c])])
    for part in pieces():
        for row in _with_features(part):
            values = row.get("features") or [None] * len(names)
            writer.writerow([v for c in columns for v in (values if c == "features" else [row[c]])])
    text.detach()


def _jsonl(file: BinaryIO, pieces: Pieces, columns: Columns, shape: tuple[int, ...]) -> None:
    for part in pieces():
        for row in _with_features(part):
            ordered = {c: row.get(c) for c in columns}
            file.write(json.dumps(ordered, ensure_ascii=False).encode() + b"\n")


def _pyarrow() -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingPackage("pyarrow", "writing .parquet", "data") from None
    return pa, pq


def _parquet(file: BinaryIO, pieces: Pieces, columns: Columns, shape: tuple[int, ...]) -> None:
    pa, pq = _pyarrow()
    features = pa.list_(pa.float32())
    for _ in shape[1:]:
        features = pa.list_(features)
    kinds = {str: pa.string(), float: pa.float64(), list: features}
    schema = pa.schema([(c, kinds[kind]) for c, kind in columns.items()])
    with pq.ParquetWriter(file, schema) as writer:
        for part in pieces():
            rows = list(_with_features(part))
            writer.write_table(pa.table({c: [r.get(c) for r in rows] for c in columns}, schema=schema))


def _npz(file: BinaryIO, pieces: Pieces, columns: Columns, shape: tuple[int, ...]) -> None:
    """`paths` and `features` of what could be read, row by row, and `bad_paths` and `bad_reasons` of the rest."""
    rows = [(r["path"], r["error"]) for part in pieces() for r in part.rows]
    good = [path for path, error in rows if error is None]
    words = {
        "paths": good,
        "bad_paths": [path for path, error in rows if error is not None],
        "bad_reasons": [error for _, error in rows if error is not None],
    }
    with zipfile.ZipFile(file, "w") as archive:
        for name, values in words.items():
            with archive.open(_entry(name), "w") as entry:
                np.save(entry, np.array(values, dtype=str))
        with archive.open(_entry("features"), "w", force_zip64=True) as entry:
            header = {"descr": "<f4", "fortran_order": False, "shape": (len(good), *shape)}
            np.lib.format.write_array_header_1_0(entry, header)
            for part in pieces():
                if part.features is not None:
                    entry.write(np.ascontiguousarray(part.features, dtype="<f4").tobytes())


def _entry(name: str) -> zipfile.ZipInfo:
    """Without the time of day, so that equal results are equal files."""
    return zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
