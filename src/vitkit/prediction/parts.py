"""A folder of Parquet files, as the readers of large tables want them: parts of whole pieces, and a manifest.

Which rows a part holds follows from the job alone, and so does its name: a job that is done again gives the same files.
The manifest, written last, lists the parts with their rows and digests; the folder then appears in one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

from vitkit.io import replacing, replacing_folder, sha256, write_json
from vitkit.prediction.tables import MANIFEST, Columns, Pieces, Row, shape_of, write_table

_ROWS = 1 << 16  # of a part, at most, but for a piece that is longer
_BYTES = 256 << 20  # of the features in it


def write_folder(out: Path, pieces: Pieces, columns: Columns, digest: str) -> None:
    shape = shape_of(pieces)
    most = max(1, min(_ROWS, _BYTES // (4 * prod(shape)))) if shape else _ROWS
    parts: list[dict[str, object]] = []
    with replacing_folder(out) as folder:
        for number, some in enumerate(_grouped(pieces(), most)):
            name = f"part-{number:05d}-{digest}.parquet"
            with replacing(folder / name) as file:
                write_table(file, ".parquet", lambda some=some: iter(some), columns, shape)  # type: ignore[misc]
            parts.append({"name": name, "rows": sum(map(len, some)), "sha256": sha256(folder / name)})
        write_json(folder / MANIFEST, {"format": 1, "job": digest, "columns": list(columns), "parts": parts})


def _grouped(pieces: Iterator[list[Row]], most: int) -> Iterator[list[list[Row]]]:
    """Pieces one after the other, as many at once as hold at most so many rows."""
    group: list[list[Row]] = []
    for rows in pieces:
        if group and sum(map(len, group)) + len(rows) > most:
            yield group
            group = []
        group.append(rows)
    if group:
        yield group
