"""One look at every image: its digest, size and mode, how sharp it is, and a thumbnail. Kept in the index, in pieces.

A piece is a file of `INDEX/looks`, put there whole: what was looked at before a kill is not looked at again.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from vitkit.curation.stored import read_array, read_rows
from vitkit.data import Source
from vitkit.data.decode import BadImage, decode, header, read_bytes, to_channels
from vitkit.data.loader import in_order
from vitkit.data.source import pillow
from vitkit.errors import DataError
from vitkit.io import replacing, sha256
from vitkit.progress import SILENT, Progress

SIDE = 64  # of a thumbnail
_MEDIUM = 256  # the longer side at which sharpness is measured
_PIECE = 1024
KIND = np.dtype(
    [
        ("digest", "S64"),
        ("width", "<i4"),
        ("height", "<i4"),
        ("mode", "S16"),
        ("contrast", "<f4"),  # standard deviation of the grey levels
        ("sharpness", "<f4"),  # standard deviation of their Laplacian
        ("extremes", "<f4"),  # share of pixels that are nearly black or nearly white
        ("thumbnail", "u1", (SIDE, SIDE, 3)),
    ]
)


class Looks:
    """Records of all images, read when they are asked for: `looks["sharpness"]`, `looks.thumbnails(rows)`."""

    def __init__(self, pieces: list[tuple[Path, int]], source: Source) -> None:
        self.pieces = pieces  # files and how many records they hold
        self.source = source  # of the images themselves

    def __getitem__(self, name: str) -> np.ndarray:
        return np.concatenate([self._read(piece)[name] for piece in range(len(self.pieces))])

    def thumbnails(self, rows: np.ndarray) -> np.ndarray:
        """uint8 M SIDE SIDE 3; of each piece only the rows that are asked for are read."""
        found = np.empty((len(rows), SIDE, SIDE, 3), dtype=np.uint8)
        for piece in np.unique(rows // _PIECE).tolist():
            mine = rows // _PIECE == piece
            found[mine] = self._read(piece, rows[mine] % _PIECE)["thumbnail"]
        return found

    def images(self, rows: np.ndarray, side: int) -> np.ndarray:
        """uint8 M side side 3: the images read again, larger than their thumbnails; black where one has vanished."""
        found = np.zeros((len(rows), side, side, 3), dtype=np.uint8)
        for place, row in enumerate(rows.tolist()):
            with suppress(BadImage):
                image = self.source.image(row, 3, lambda w, h: (min(w, side), min(h, side)))
                found[place] = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))
        return found

    def _read(self, piece: int, rows: np.ndarray | None = None) -> np.ndarray:
        path, count = self.pieces[piece]
        try:
            return read_array(path, KIND, (count,)) if rows is None else read_rows(path, KIND, count, rows)
        except (OSError, ValueError) as e:
            raise DataError(f"{path} changed while it was read ({e}); run the command again") from e


def look_at(source: Source, folder: Path, workers: int = 0, progress: Progress = SILENT) -> Looks:
    """Look at every image of a source, but for those in pieces that are there already."""
    pieces = []
    for low in range(0, len(source), _PIECE):
        count, path = min(_PIECE, len(source) - low), folder / f"{low // _PIECE:06d}.npy"
        if not _is_whole(path, count):
            what = f"looking at images {low:,} to {low + count:,}"
            records = list(in_order(partial(_look, source, low), count, workers, what, progress))
            with replacing(path) as file:
                np.save(file, np.array(records, dtype=KIND))
        progress.update("looking at every image", low + count, len(source))
        pieces.append((path, count))
    return Looks(pieces, source)


def _is_whole(path: Path, count: int) -> bool:
    try:
        read_array(path, KIND, (count,))
    except (OSError, ValueError):
        return False
    return True


def _look(source: Source, start: int, number: int) -> tuple[object, ...]:
    index = start + number
    if source.pixels is not None:
        pixels = source.pixels[index]
        raw, mode = pixels.numpy().tobytes(), f"{pixels.shape[0]} channels"
        image = to_channels(pillow(pixels), 3)
        width, height = image.size
    else:
        try:
            encoded = source.encoded(index)
            raw = encoded if isinstance(encoded, bytes) else read_bytes(encoded)
            image = decode(raw, 3, lambda w, h: (min(w, _MEDIUM), min(h, _MEDIUM)))
            width, height, _, mode = header(raw)
        except (BadImage, OSError):  # it has changed since it was indexed; the next index leaves it out
            return ("", 0, 0, "", 0.0, 0.0, 0.0, np.zeros((SIDE, SIDE, 3), np.uint8))
    grey = _medium(image)
    laplacian = 4 * grey[1:-1, 1:-1] - grey[:-2, 1:-1] - grey[2:, 1:-1] - grey[1:-1, :-2] - grey[1:-1, 2:]
    sharpness = float(laplacian.std()) if laplacian.size else 0.0
    extremes = float(((grey < 8) | (grey > 247)).mean())
    thumbnail = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX, reducing_gap=None))
    return (sha256(raw), width, height, mode, float(grey.std()), sharpness, extremes, thumbnail)


def _medium(image: Image.Image) -> np.ndarray:
    """Grey levels of the image at a size at which sharpness can be compared; small images as they are."""
    scale = min(1.0, _MEDIUM / max(image.size))
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return np.asarray(image.convert("L").resize(size, Image.Resampling.BILINEAR), dtype=np.float32)
