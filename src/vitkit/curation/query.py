"""The images of an index that are nearest to an image, to a part of it or to words: as rows, .csv, .json or a sheet."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vitkit.checkpoints.zeroshot import embed_texts
from vitkit.curation.search import nearest
from vitkit.data import Source
from vitkit.data.decode import BadImage, decode
from vitkit.data.preprocess import to_tensor
from vitkit.data.sheet import Row, Tile, draw
from vitkit.data.source import Names
from vitkit.errors import ConfigError, DataError
from vitkit.io import csv_cell, replacing, write_json, write_text
from vitkit.prediction import Opened, stream
from vitkit.prediction.opened import Loadable
from vitkit.prediction.tables import features_of
from vitkit.storage import is_url

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

    box    left, top, right, bottom in pixels: search by this part of the image, cut out
    model  where the checkpoint of the index is now, if it was moved
    """
    opened = index.embedder(model)
    whole = opened_image(image)
    part = whole.crop(_inside(box, whole.size)) if box is not None else whole
    return hits_of(index, embed_one(opened, part, image), top, engine)


def search_text(
    index: Index, text: str, top: int = 20, engine: str = "auto", model: Loadable | None = None
) -> list[Hit]:
    """The images nearest to words, by the text tower of the checkpoint that the index was made with."""
    source = index.model(model)
    if index.about["features"] != "pooled" or not isinstance(source, (str, Path)):
        made = f"the index {index.path} was made with {index.about['model']}, which has no text tower"
        raise DataError(f"{made}; index the set with --model and a folder of CLIP or SigLIP")
    index.embedder(model)  # checks that these are the same weights
    return hits_of(index, embed_texts(source, [text])[0].numpy(), top, engine)


def opened_image(image: str | Path | Image.Image) -> Image.Image:
    if isinstance(image, (str, Path)) and not is_url(image) and not Path(image).expanduser().exists():
        raise DataError(f"there is no file {image}; give the file of an image")
    try:
        return (image if isinstance(image, Image.Image) else decode(image)).convert("RGB")
    except BadImage as e:
        raise DataError(f"{image} {e}; give the file of an image") from e


def embed_one(opened: Opened, image: Image.Image, name: object) -> np.ndarray:
    """The features of one image, as `opened` gives them."""
    source = Source(
        "the query", labels=np.zeros(1, np.int64), names=Names(["the query"]), pixels=to_tensor(image)[None]
    )
    (row,) = stream(opened, source)
    vector = features_of(row)
    if vector is None:
        raise DataError(f"{name} cannot be searched for: {row['error']}")
    return vector


def hits_of(index: Index, vector: np.ndarray, top: int, engine: str = "auto") -> list[Hit]:
    query = vector / max(float(np.linalg.norm(vector)), 1e-12)
    rows, scores = nearest(index.features, query[None].astype(np.float32), top, engine)
    return [hit(index, r, s) for r, s in zip(rows[0].tolist(), scores[0].tolist(), strict=True)]


def hit(index: Index, row: int, score: float) -> Hit:
    return Hit(row, index.paths[row], index.label_name(row), index.splits[row], score)


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
