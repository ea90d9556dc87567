"""A data set that is served: its `View`, its images by their number, and what makes features of a new image.

A client names images by number only, so that nothing outside the set is read. Files are decoded by the processes that
decode uploads, within their limits: whoever made the set may not be whoever serves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitkit.curation.map import to_jpeg
from vitkit.curation.view import View, open_view
from vitkit.data import Source
from vitkit.data.decode import BadImage, header, read_bytes
from vitkit.data.preprocess import normalise
from vitkit.data.source import pillow
from vitkit.model.config import Preprocessing
from vitkit.prediction import Opened
from vitkit.progress import SILENT, Progress
from vitkit.web.answers import Problem
from vitkit.web.body import Upload


class Wanted(NamedTuple):
    """What an image is decoded to."""

    channels: int
    preprocessing: Preprocessing


@dataclass(frozen=True, eq=False)
class Explored:
    view: View
    source: Source
    embedder: Opened

    @cached_property
    def points(self) -> bytes:
        return self.view.points_file()

    def check(self, row: int) -> int:
        if row >= len(self.view.index):
            raise Problem(404, "no_image", f"row={row} does not exist; the set has {len(self.view.index):,} images")
        return row

    def sheet(self, number: int) -> bytes:
        if number >= self.view.map.sheets:
            raise Problem(404, "no_sheet", f"number={number} does not exist; there are {self.view.map.sheets} sheets")
        try:
            return self.view.map.sheet(number).read_bytes()
        except OSError:
            raise Problem(404, "no_sheet", "the thumbnails were removed; start the server again") from None

    def in_memory(self, row: int) -> bytes | None:
        """The image as a JPEG where the set holds pixels, else None."""
        return None if self.source.pixels is None else to_jpeg(pillow(self.source.pixels[row]).convert("RGB"))

    def encoded(self, row: int, longest: int) -> tuple[Upload, Wanted]:
        """The bytes of an image, and what they are to be decoded to: as it is, with its longer side so long at most."""
        try:
            held = self.source.encoded(row)
            data = held if isinstance(held, bytes) else read_bytes(held)
            about = header(data)
        except (BadImage, OSError, ValueError):
            raise Problem(404, "no_image", "the image cannot be read any more; index the set again") from None
        scale = min(1.0, longest / max(about.width, about.height))
        size = (max(1, round(about.height * scale)), max(1, round(about.width * scale)))
        return Upload(None, data), Wanted(3, Preprocessing(size=size, interpolation="bicubic"))

    def embed(self, images: Sequence[Tensor]) -> Sequence[Tensor]:
        """uint8 images as the embedder wants them -> a row of features each."""
        inputs = torch.stack(list(images)).to(self.embedder.runtime.device)
        return self.embedder.runtime.run(normalise(inputs, self.embedder.config.preprocessing)).unbind()

    def search(self, features: Tensor, top: int) -> list[dict[str, object]]:
        return [found._asdict() for found in self.view.search(features.numpy().reshape(1, -1).astype(np.float32), top)]

    def neighbours(self, row: int, top: int) -> list[dict[str, object]]:
        return [found._asdict() for found in self.view.nearest_to(row, top)]


def from_pixels(pixels: Tensor) -> bytes:
    """uint8 C H W -> JPEG."""
    return to_jpeg(Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()))


def open_explored(
    index: Path, data: str | None = None, issues: Path | None = None, progress: Progress = SILENT
) -> Explored:
    """What cannot work fails here: a set that changed, a checkpoint that is not there."""
    view, source = open_view(index, data, issues, progress)
    return Explored(view, source, view.index.embedder(progress=progress))
