"""Preprocessing as part of an exported graph: raw pixels of any size in, logits (or finished values) out.

Pillow resizes by two passes, across and down, and rounds to whole levels after each. A pass is a matrix product
with a table of weights, which is made inside the graph from the image's size; so the graph gives Pillow's
pixels, and therefore vitkit's own preprocessing, on every runtime. The centre is cut out by making only its rows.

Shapes: B images, H x W pixels, C channels; h x w the model's size.
"""

from __future__ import annotations

import math

import PIL
import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.model.base import Outputs
from vitkit.model.config import Interpolation, Preprocessing

_BITS, _HALF = 22, 11  # of Pillow's weights, and of half of one
_SUPPORT: dict[Interpolation, float] = {"box": 0.5, "bilinear": 1.0, "hamming": 1.0, "bicubic": 2.0, "lanczos": 3.0}
_SUPPORT["bilinear-plain"] = 1.0

# Pillow 13 begins with the rows when that side shrinks by more than twice as many pixels; older ones never do.
_ROWS_MAY_COME_FIRST = int(PIL.__version__.split(".")[0]) >= 13


def sinc(x: Tensor) -> Tensor:
    near = x.abs() < 1e-12
    safe = torch.where(near, torch.ones_like(x), x) * math.pi
    return torch.where(near, torch.ones_like(x), safe.sin() / safe)


def filter_of(kind: Interpolation, x: Tensor) -> Tensor:
    """Pillow's filters, without their limits: those are in `weights`."""
    a, none = x.abs(), torch.zeros_like(x)
    if kind == "box":
        return torch.where((x > -0.5) & (x <= 0.5), torch.ones_like(x), none)
    if kind.startswith("bilinear"):
        return (1 - a).clamp(min=0)
    if kind == "hamming":
        return torch.where(a < 1, sinc(x) * (0.54 + 0.46 * (x * math.pi).cos()), none)
    if kind == "bicubic":
        inner, outer = (1.5 * a - 2.5) * a * a + 1, ((-0.5 * a + 2.5) * a - 4) * a + 2
        return torch.where(a < 1, inner, torch.where(a < 2, outer, none))
    return torch.where(a < 3, sinc(x) * sinc(x / 3), none)


def weights(kind: Interpolation, have: Tensor, wanted: Tensor, first: Tensor, count: int, at: Tensor) -> Tensor:
    """count x have: row i makes pixel `first + i` of a side resized from `have` to `wanted` pixels.

    `at` are the numbers 0 .. have - 1; everything is float64, as in Pillow.
    """
    scale = have / wanted
    number = (torch.arange(count, dtype=torch.float64, device=at.device) + first)[:, None]
    centre = (number + 0.5) * scale
    # Between the centres of pixels, from whole numbers: accurate also where a runtime has no float64.
    distance = ((2 * at + 1) * wanted - (2 * number + 1) * have) / (2 * wanted)
    if kind == "box":  # its edge is sharp: Pillow's own rounding decides who is inside
        distance = at + 0.5 - centre
    stretch = torch.ones_like(scale) if kind == "bilinear-plain" else scale.clamp(min=1.0)
    support = _SUPPORT[kind] * stretch
    low = (centre - support + 0.5).floor().clamp(min=0.0)
    high = torch.minimum((centre + support + 0.5).floor(), have)
    inside = (at >= low) & (at < high)
    table = filter_of(kind, distance / stretch) * inside.to(torch.float64)
    return table / table.sum(dim=1, keepdim=True)


def whole_pass(x: Tensor, table: Tensor, across: bool) -> Tensor:
    """One pass over whole levels, giving whole levels, exactly as Pillow rounds.

    Pillow's weights are whole numbers of 22 bits. Here each is split in two of 11 bits, whose products with
    levels, and their sums, are exact in float32.
    """
    whole = torch.where(table < 0, (table * 2.0**_BITS - 0.5).ceil(), (table * 2.0**_BITS + 0.5).floor())
    high = (whole / 2.0**_HALF).floor()
    low = whole - high * 2.0**_HALF
    sums = [x @ t.float().transpose(0, 1) if across else t.float() @ x for t in (high, low)]
    carry = ((sums[1] + 2.0 ** (_BITS - 1)) / 2.0**_HALF).floor()
    return ((sums[0] + carry) / 2.0**_HALF).floor().clamp(0, 255)


class FromRaw(nn.Module):
    """uint8 B H W C -> what the model makes of the prepared images; values in the units of their targets."""

    def __init__(self, model: nn.Module, pre: Preprocessing, outputs: Outputs = Outputs()) -> None:  # noqa: B008
        super().__init__()
        if pre.interpolation not in _SUPPORT:
            raise ConfigError(f"--raw cannot resize by interpolation={pre.interpolation!r}; leave --raw out")
        self.model, self.pre, self.config = model, pre, model.config
        self.pixel_mean, self.pixel_std = (torch.tensor(values).view(-1, 1, 1) for values in (pre.mean, pre.std))
        self.finished = outputs.kind == "values" and bool(outputs.mean)
        self.value_mean, self.value_std = torch.tensor(outputs.mean), torch.tensor(outputs.std)

    def forward(self, pixels: Tensor) -> Tensor:
        found = self.model((self.prepare(pixels) / 255 - self.pixel_mean) / self.pixel_std)
        return found * self.value_std + self.value_mean if self.finished else found

    def prepare(self, pixels: Tensor) -> Tensor:
        """Float B C h w with the whole levels that Pillow gives."""
        rows, columns = (torch.arange(n, dtype=torch.float64, device=pixels.device) for n in pixels.shape[1:3])
        height, width = rows[-1:] + 1, columns[-1:] + 1  # one element: exporters take none for a float32 number
        resized = self.resized_to(height, width)
        x = pixels.permute(0, 3, 1, 2).float()  # B C H W
        across = self.table(width, resized[1], self.pre.size[1], columns)
        down = self.table(height, resized[0], self.pre.size[0], rows)
        if self.pre.interpolation == "bilinear-plain":  # rounded once, at the end
            return (down.float() @ (x @ across.float().transpose(0, 1))).round()
        usual = whole_pass(whole_pass(x, across, True), down, False)
        if not _ROWS_MAY_COME_FIRST:
            return usual
        other = whole_pass(whole_pass(x, down, False), across, True)
        rows_first = (height > resized[0]) & (height - resized[0] > 2 * (width - resized[1]))
        return torch.where(rows_first, other, usual)

    def table(self, have: Tensor, wanted: Tensor, size: int, at: Tensor) -> Tensor:
        first = ((wanted - size) / 2).round()  # halves to even, as Python rounds
        return weights(self.pre.interpolation, have, wanted, first, size, at)

    def resized_to(self, height: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        """As `vitkit.data.preprocess.resized_to`, in the graph."""
        goal = [math.floor(n / self.pre.crop) for n in self.pre.size]
        if self.pre.fit == "squash":
            return torch.full_like(height, goal[0]), torch.full_like(width, goal[1])
        if goal[0] == goal[1]:
            short, long = torch.minimum(height, width), torch.maximum(height, width)
            # The half keeps whole quotients whole where a runtime divides by multiplying with 1 / short.
            longer, side = ((goal[0] * long + 0.5) / short).floor(), torch.full_like(height, goal[0])
            lying = height <= width
            return torch.where(lying, side, longer), torch.where(lying, longer, side)
        ratio = torch.minimum(height / goal[0], width / goal[1])
        return (height / ratio).round().clamp(min=goal[0]), (width / ratio).round().clamp(min=goal[1])
