"""Views of a thumbnail in which copies of an image are looked for: windows of it, turned a little, mirrored.

A crop of a photograph looks like a window of it. So each image asks with several views of its thumbnail, and each
answers with the whole of its own. A view is an affine map of the plane, its signature a linear function of the pixels:
all views of an image cost one matrix product.

Shapes: N images, S side of the pixels, T side of a signature, V views, D numbers of a signature.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.curation.looks import Looks
from vitkit.progress import SILENT, Progress

_SIDE, _CELLS, _FINE = 32, 8, 4  # pixels of a thumbnail, of a signature, and samples of one of its pixels along a side
_WIDTH = 120  # principal directions that are kept
_WHITENING = 0.25  # power of their variances; 0.5 would make all equal
_SAMPLE = 8192  # images from which they are found
_AT_ONCE = 1024
_CORNER, _TURN = 0.14, 5.0  # how far a window is off the middle; degrees


class View(NamedTuple):
    """A window: its centre and half its side in coordinates from -1 to 1, its turn, and whether it is mirrored."""

    x: float = 0.0
    y: float = 0.0
    half: float = 1.0
    turn: float = 0.0
    across: bool = False
    down: bool = False

    @property
    def place(self) -> list[list[float]]:
        """The affine map from the window to the thumbnail, 2 x 3."""
        angle = math.radians(self.turn)
        c, s = self.half * math.cos(angle), self.half * math.sin(angle)
        mx, my = (-1.0 if self.across else 1.0), (-1.0 if self.down else 1.0)
        return [[mx * c, -mx * s, mx * self.x], [my * s, my * c, my * self.y]]


_WINDOWS = [View(), View(half=0.88), View(half=0.95, turn=_TURN), View(half=0.95, turn=-_TURN)]
_WINDOWS += [View(x, y, 1 - _CORNER) for x in (-_CORNER, _CORNER) for y in (-_CORNER, _CORNER)]
VIEWS = (*_WINDOWS, *(view._replace(across=True) for view in _WINDOWS), View(down=True))
PLACES = np.array([view.place for view in VIEWS])  # V 2 3


class Signatures:
    """`whole` are those of all images, N D; `of(pixels, view)` those of a view of some."""

    def __init__(self, looks: Looks, count: int, progress: Progress = SILENT) -> None:
        self.looks = looks
        self.mean, self.basis = self._principal(count)
        parts = []
        for low in range(0, count, _AT_ONCE):
            parts.append(self.of(self.pixels(np.arange(low, min(count, low + _AT_ONCE))), 0))
            progress.update("describing images", low, count)
        self.whole = torch.cat(parts)

    def pixels(self, rows: np.ndarray) -> Tensor:
        x = torch.from_numpy(self.looks.thumbnails(rows)).permute(0, 3, 1, 2).float()
        return F.adaptive_avg_pool2d(x, _SIDE).flatten(2)  # M 3 S*S

    def of(self, pixels: Tensor, view: int) -> Tensor:
        return F.normalize((self._raw(pixels, view) - self.mean) @ self.basis, dim=1)  # M D

    def _raw(self, pixels: Tensor, view: int) -> Tensor:
        x = pixels @ self._samplers[view]  # M 3 T*T
        return F.normalize((x - x.mean(dim=2, keepdim=True)).flatten(1), dim=1)  # no brightness, no contrast

    def _principal(self, count: int) -> tuple[Tensor, Tensor]:
        """What images have in common goes, and directions in which all differ count less: whitened in part."""
        known = self._raw(self.pixels(np.linspace(0, count - 1, min(count, _SAMPLE)).astype(np.int64)), 0)
        mean = known.mean(dim=0)
        values, directions = torch.linalg.eigh((known - mean).mT @ (known - mean) / len(known))
        kept = values.flip(0)[:_WIDTH].clamp(min=1e-3 * float(values[-1]))  # of few images most are 0
        return mean, directions.flip(1)[:, :_WIDTH] / kept**_WHITENING

    @cached_property
    def _samplers(self) -> list[Tensor]:
        """Of each view S*S T*T: which pixels make up which pixel of the signature."""
        pixels = torch.eye(_SIDE * _SIDE).view(1, -1, _SIDE, _SIDE)
        found = []
        for place in PLACES:
            theta = torch.from_numpy(place).float()[None]
            grid = F.affine_grid(theta, [1, 1, _CELLS * _FINE, _CELLS * _FINE], align_corners=False)
            fine = F.grid_sample(pixels, grid, align_corners=False, padding_mode="border")[0]  # S*S . .
            found.append(F.avg_pool2d(fine, _FINE).flatten(1))
        return found
