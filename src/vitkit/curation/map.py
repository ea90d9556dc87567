"""An index -> its map: where every image lies, who its neighbours are, and thumbnails in sheets. Made once.

    INDEX.map/about.json       which index (its digest), method and seed the rest belongs to
    INDEX.map/neighbours.npy   N x K int32, the nearest first
    INDEX.map/layout.npy       N x 2 float32 in 0..1
    INDEX.map/sheet-0003.jpg   400 thumbnails, by slot

What is there already is not made again: a kill costs the file that was being made. Of another index, all of it is.

A slot is the place of an image in the sheets. The first sheets hold images from everywhere on the map, for a view of
the whole; in the others neighbours on the map are neighbours in the sheet, so that a view of a part needs few of them.

Shapes: N images, K neighbours.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from vitkit.curation.index import Index
from vitkit.curation.layout import NEIGHBOURS, chosen_method, layout
from vitkit.curation.search import nearest_others
from vitkit.curation.stored import read_array
from vitkit.data import Source
from vitkit.data.decode import BadImage
from vitkit.data.loader import in_order
from vitkit.data.preprocess import prepare
from vitkit.errors import DataError
from vitkit.io import read_json, replacing, replacing_folder, write_bytes, write_json
from vitkit.locks import only_one
from vitkit.model.config import Preprocessing
from vitkit.progress import SILENT, Progress

FORMAT, VERSION = "vitkit map", 1
TILE, COLUMNS = 48, 20  # pixels of a thumbnail: a multiple of 16, so that JPEG mixes none with its neighbour
SHEET = COLUMNS * COLUMNS
OVERVIEW = 3 * SHEET  # images from everywhere
_QUALITY = 82
_MISSING = (128, 120, 130)


@dataclass(frozen=True, eq=False)
class Map:
    folder: Path
    places: np.ndarray  # N 2
    neighbours: np.ndarray  # N K
    method: str

    @cached_property
    def order(self) -> np.ndarray:
        """The image of every slot."""
        return _slots(self.places)

    @cached_property
    def slots(self) -> np.ndarray:
        """The slot of every image."""
        return np.argsort(self.order)

    @property
    def sheets(self) -> int:
        return -(-len(self.places) // SHEET)

    def sheet(self, number: int) -> Path:
        return self.folder / f"sheet-{number:04d}.jpg"


def build_map(
    index: Index, source: Source, progress: Progress = SILENT, *, method: str = "auto", seed: int = 0, workers: int = 0
) -> Map:
    """The map of an index, made or finished where it is not there yet. `source` has its images, row by row."""
    if len(source) != len(index):
        raise DataError(f"the index has {len(index):,} images and the set {len(source):,}; index the set again")
    folder = index.path.with_name(f"{index.path.name}.map")
    about = {"format": FORMAT, "version": VERSION, "digest": index.about["digest"]}
    about |= {"method": chosen_method(method), "seed": seed}
    with only_one(folder.with_name(f".{folder.name}.lock"), f"the map {folder}", "wait until it is made"):
        if _read_about(folder) != about:
            with replacing_folder(folder) as new:
                write_json(new / "about.json", about)
        features = np.asarray(index.features)
        each = min(NEIGHBOURS, len(index) - 1)
        neighbours = _kept(
            folder / "neighbours.npy",
            (len(index), each),
            np.dtype(np.int32),
            lambda: nearest_others(features, each, progress)[0],
        )
        places = _kept(
            folder / "layout.npy",
            (len(index), 2),
            np.dtype(np.float32),
            lambda: layout(features, neighbours, method, seed, progress),
        )
        made = Map(folder, places, neighbours, str(about["method"]))
        _make_sheets(made, source, workers, progress)
    return made


def _read_about(folder: Path) -> object:
    try:
        return read_json(folder / "about.json")
    except (OSError, ValueError):
        return None


def _kept(path: Path, shape: tuple[int, int], kind: np.dtype, make: Callable[[], np.ndarray]) -> np.ndarray:
    """What the file holds if it is what it should be, else what `make` gives, which is written there."""
    try:
        found = read_array(path, kind, shape)
        if np.isfinite(found).all() and found.min() >= 0 and found.max() < max(shape[0], 2):
            return found
    except (OSError, ValueError):
        pass
    made = make().astype(kind, copy=False)
    with replacing(path) as file:
        np.save(file, made, allow_pickle=False)
    return made


def _slots(places: np.ndarray) -> np.ndarray:
    """Images in the order of the sheets: some from every part, coarse to fine, then the others along a Z-curve."""
    chosen = np.zeros(0, dtype=np.int64)
    for level in range(1, 11):
        cells = _cells(places, 1 << level)
        free = np.flatnonzero(~np.isin(cells, cells[chosen]))
        chosen = np.concatenate([chosen, free[np.sort(np.unique(cells[free], return_index=True)[1])]])
        if len(chosen) >= OVERVIEW:
            break
    first = chosen[:OVERVIEW]
    across, down = np.minimum((places * 1024).astype(np.int64), 1023).T
    curve = sum(((across >> b & 1) << (2 * b)) | ((down >> b & 1) << (2 * b + 1)) for b in range(10))
    rest = np.argsort(curve, kind="stable")
    return np.concatenate([first, rest[~np.isin(rest, first)]])


def _cells(places: np.ndarray, side: int) -> np.ndarray:
    across, down = np.minimum((places * side).astype(np.int64), side - 1).T
    return np.asarray(across * side + down)


# --- thumbnails ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thumbnails:
    """thumbnails(n): the n-th of the wanted sheets as a JPEG. May be called in other processes."""

    source: Source
    order: np.ndarray
    wanted: tuple[int, ...]

    def __call__(self, n: int) -> bytes:
        start = self.wanted[n] * SHEET
        canvas = Image.new("RGB", (COLUMNS * TILE, COLUMNS * TILE))
        for at, row in enumerate(self.order[start : start + SHEET].tolist()):
            canvas.paste(thumbnail(self.source, row, TILE), (at % COLUMNS * TILE, at // COLUMNS * TILE))
        return to_jpeg(canvas)


def _make_sheets(made: Map, source: Source, workers: int, progress: Progress) -> None:
    wanted = tuple(n for n in range(made.sheets) if not made.sheet(n).is_file())
    job = Thumbnails(source, made.order, wanted)
    for n, sheet in zip(wanted, in_order(job, len(wanted), workers, "making thumbnails", progress), strict=True):
        write_bytes(made.sheet(n), sheet)


def thumbnail(source: Source, row: int, side: int) -> Image.Image:
    """The middle square of an image; grey where the image cannot be read any more."""
    try:
        image = source.image(row, None, lambda w, h: _at_least(w, h, 2 * side))
    except BadImage:
        return Image.new("RGB", (side, side), _MISSING)
    pre = Preprocessing(size=(side, side), fit="crop", interpolation="bicubic")
    return prepare(image.convert("RGB"), pre)


def whole_image(source: Source, row: int, longest: int) -> Image.Image:
    """The image with its longer side at `longest` at most; small ones stay as they are. Raises `BadImage`."""
    image = source.image(row, None, lambda w, h: _at_least(w, h, longest)).convert("RGB")
    image.thumbnail((longest, longest), Image.Resampling.BICUBIC)
    return image


def _at_least(width: int, height: int, side: int) -> tuple[int, int]:
    scale = min(1.0, side / min(width, height))
    return round(width * scale), round(height * scale)


def to_jpeg(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=_QUALITY)
    return out.getvalue()
