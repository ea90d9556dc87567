"""Preprocessing as part of an exported graph: raw pixels of any size in, logits out.

Pillow resizes by two passes, columns first, and rounds to whole levels after each. A pass is a matrix product
with a table of weights, which is made inside the graph from the picture's size; so the graph gives Pillow's
pixels, and therefore vitkit's own preprocessing, on every runtime. The centre is cut out by making only its rows.

Shapes: B pictures, H x W pixels, C channels; h x w the model's size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitkit.model.config import Interpolation, Preprocessing

_SUPPORT: dict[Interpolation, float] = {"box": 0.5, "bilinear": 1.0, "hamming": 1.0, "bicubic": 2.0, "lanczos": 3.0}


def sinc(x: Tensor) -> Tensor:
    near = x.abs() < 1e-12
    safe = torch.where(near, torch.ones_like(x), x) * math.pi
    return torch.where(near, torch.ones_like(x), safe.sin() / safe)


def filter_of(kind: Interpolation, x: Tensor) -> Tensor:
    """Pillow's filters, without their limits: those are in `weights`."""
    a = x.abs()
    if kind == "box":
        return torch.where((x > -0.5) & (x <= 0.5), torch.ones_like(x), torch.zeros_like(x))
    if kind == "bilinear":
        return (1 - a).clamp(min=0)
    if kind == "hamming":
        return torch.where(a < 1, sinc(x) * (0.54 + 0.46 * (x * math.pi).cos()), torch.zeros_like(x))
    if kind == "bicubic":
        inner = (1.5 * a - 2.5) * a * a + 1
        outer = ((-0.5 * a + 2.5) * a - 4) * a + 2
        return torch.where(a < 1, inner, torch.where(a < 2, outer, torch.zeros_like(x)))
    return torch.where(a < 3, sinc(x) * sinc(x / 3), torch.zeros_like(x))


def weights(kind: Interpolation, have: Tensor, wanted: Tensor, first: Tensor, count: int, at: Tensor) -> Tensor:
    """count x have: row i makes pixel `first + i` of a side resized from `have` to `wanted` pixels.

    `at` are the numbers 0 .. have - 1; everything is float64, as in Pillow.
    """
    scale = have / wanted
    centre = (torch.arange(count, dtype=torch.float64, device=at.device) + first + 0.5)[:, None] * scale
    if kind == "nearest":
        return (at == centre.floor()).to(torch.float64)
    stretch = scale.clamp(min=1.0)
    support = _SUPPORT[kind] * stretch
    low = (centre - support + 0.5).floor().clamp(min=0.0)
    high = torch.minimum((centre + support + 0.5).floor(), have)
    inside = (at >= low) & (at < high)
    table = filter_of(kind, (at + 0.5 - centre) / stretch) * inside.to(torch.float64)
    return table / table.sum(dim=1, keepdim=True)


class FromRaw(nn.Module):
    """uint8 B H W C -> whatever the model makes of the prepared pictures."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, pre: Preprocessing) -> None:
        super().__init__()
        self.model, self.pre, self.config = model, pre, model.config
        self.register_buffer("mean", torch.tensor(pre.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(pre.std).view(-1, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model((self.prepare(pixels) / 255 - self.mean) / self.std)

    def prepare(self, pixels: Tensor) -> Tensor:
        """Float B C h w with the whole levels that Pillow gives."""
        rows = torch.ones_like(pixels[0, :, 0, 0], dtype=torch.float64).cumsum(0) - 1  # 0 .. H - 1
        columns = torch.ones_like(pixels[0, 0, :, 0], dtype=torch.float64).cumsum(0) - 1
        height, width = rows[-1] + 1, columns[-1] + 1
        resized = self.resized_to(height, width)
        x = pixels.permute(0, 3, 1, 2).float()  # B C H W
        for have, wanted, size, at, across in (
            (width, resized[1], self.pre.size[1], columns, True),
            (height, resized[0], self.pre.size[0], rows, False),
        ):
            first = ((wanted - size) / 2).round()  # halves to even, as Python rounds
            table = weights(self.pre.interpolation, have, wanted, first, size, at).float()
            x = x @ table.transpose(0, 1) if across else table @ x
            x = (x + 0.5).floor().clamp(0, 255)
        return x

    def resized_to(self, height: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        """As `vitkit.data.preprocess.resized_to`, in the graph."""
        goal = [math.floor(n / self.pre.crop) for n in self.pre.size]
        if self.pre.fit == "squash":
            return torch.full_like(height, goal[0]), torch.full_like(width, goal[1])
        if goal[0] == goal[1]:
            short, long = torch.minimum(height, width), torch.maximum(height, width)
            longer, side = (goal[0] * long / short).floor(), torch.full_like(height, goal[0])
            lying = height <= width
            return torch.where(lying, side, longer), torch.where(lying, longer, side)
        ratio = torch.minimum(height / goal[0], width / goal[1])
        return (height / ratio).round().clamp(min=goal[0]), (width / ratio).round().clamp(min=goal[1])
