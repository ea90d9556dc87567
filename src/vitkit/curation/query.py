"""The images of an index that are nearest to another image, or to a part of it: as rows, .csv, .json or a sheet."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vitkit.curation.search import nearest
from vitkit.data import Source
from vitkit.data.decode import decode
from vitkit.data.preprocess import to_tensor
from vitkit.data.sheet import Row, Tile, draw
from vitkit.data.source import Names
from vitkit.errors import ConfigError, DataError
from vitkit.io import csv_cell, replacing, write_json, write_text
from vitkit.prediction import stream
from vitkit.prediction.opened import Loadable
from vitkit.prediction.tables import features_of

if TYPE_CHECKING:
    from vitkit.curation.index import Index

_COLUMNS = 8  # of a sheet
SUFFIXES = (".png", ".json", ".csv")


@dataclass(frozen=True)
class Hit:
    row: int
    path: str
    label: str
    split: str
    score: float  # cosine of the features


def search(
    index: Index,
    image: str | Path | Image.Image,
    top: int = 20,
    box: tuple[int, int, int, int] | None = None,
    engine: str = "auto",
    model: Loadable | None = None,
) -> list[Hit]:
    """The nearest first.

    box    left, top, right, bottom in pixels: search by this part of the image
    model  where the checkpoint of the index is now, if it was moved
    """
    opened = index.embedder(model)
    whole = image if isinstance(image, Image.Image) else decode(image)
    part = whole.convert("RGB").crop(_inside(box, whole.size)) if box is not None else whole.convert("RGB")
    source = Source("the query", labels=np.zeros(1, np.int64), names=Names(["the query"]), pixels=to_tensor(part)[None])
    (row,) = stream(opened, source)
    vector = features_of(row)
    if vector is None:
        raise DataError(f"{image} cannot be searched for: {row['error']}")
    query = vector / max(float(np.linalg.norm(vector)), 1e-12)
    rows, scores = nearest(index.features, query[None].astype(np.float32), top, engine)
    return [
        Hit(r, index.paths[r], index.label_name(r), index.splits[r], s)
        for r, s in zip(rows[0].tolist(), scores[0].tolist(), strict=True)
    ]


def _inside(box: tuple[int, int, int, int], size: tuple[int, int]) -> tuple[int, int, int, int]:
    left, top, right, bottom = box
    if not (0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]):
        inside = f"within the image of {size[0]}x{size[1]} (width x height)"
        raise ConfigError(f"--box {','.join(map(str, box))} must be LEFT,TOP,RIGHT,BOTTOM {inside}")
    return box


def write_hits(index: Index, hits: list[Hit], out: Path, title: str) -> None:
    suffix = out.suffix.lower()
    if suffix == ".json":
        return write_json(out, [asdict(hit) for hit in hits])
    if suffix == ".csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["path", "label", "split", "score"])
        writer.writerows([csv_cell(h.path), csv_cell(h.label), h.split, f"{h.score:.6f}"] for h in hits)
        return write_text(out, text.getvalue())
    if suffix != ".png":
        raise ConfigError(f"--out {out} must end with {', '.join(SUFFIXES)}")
    source = index.catalogue().source
    tiles = [Tile(source.image(h.row, 3), f"{h.score:.3f} {h.label}") for h in hits]
    lines = [Row("" if n else "nearest first", "", tiles[n : n + _COLUMNS]) for n in range(0, len(tiles), _COLUMNS)]
    with replacing(out) as file:
        draw(lines, title, f"features by {index.about['model']}", _COLUMNS).save(file, "PNG")
    return None
