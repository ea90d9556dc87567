"""Rotary positions: queries and keys are turned by angles that follow the row and the column of their patch.

So scores depend on the offset of two patches. Pairs of channels are planes; each plane turns at its own frequency, the
first half of them with one axis and the second half with the other ("mixed": all with both). Tokens before the patches
are not turned. On another grid than the trained one "grid" counts on, or is scaled to its `reference`; "box" always
spans the image.

Shapes: B images, L blocks, H heads, K channels per head, h x w grid of N patches, P prefix tokens, T = P + N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.config import RotaryConfig, Size, ViTConfig
from vitkit.model.place import Place, PositionPart, Rotate
from vitkit.model.symbolic import spaced

ROPE_BASE = 100.0  # wavelengths from 2 pi to 100 * 2 pi patches: grids are short, sentences are not


def numbered(config: RotaryConfig, grid: Size) -> list[Tensor]:
    """Rows and columns by number (or evenly from -1 to 1), scaled to the grid that they were trained on."""
    axes = [spaced(n) if config.pixels else torch.arange(n).double() + config.offset for n in grid]
    return [axis * (trained / n) for axis, n, trained in zip(axes, grid, config.reference or grid, strict=True)]


def centred(config: RotaryConfig, grid: Size) -> list[Tensor]:
    """Centres of the patches, where the image spans -1 .. 1 (DINOv3)."""
    return [2 * (torch.arange(n).double() + 0.5 + config.offset) / n - 1 for n in grid]


COORDINATES: dict[str, Callable[[RotaryConfig, Size], list[Tensor]]] = {
    "grid": numbered,
    "box": centred,
    "mixed": numbered,
}


def swap_pairs(x: Tensor) -> Tensor:
    """... K -> ... K: 0 1 2 3 becomes 1 0 3 2."""
    return torch.unflatten(x, -1, (-1, 2)).flip(-1).flatten(-2)


def swap_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([second, first], dim=-1)


class Rotary(PositionPart):
    def __init__(self, rotary: RotaryConfig, config: ViTConfig) -> None:
        super().__init__()
        self.rotary, self.prefix = rotary, config.prefix_tokens
        self.width = config.attention_width // config.heads
        self.swap = swap_halves if rotary.half else swap_pairs
        shape = (2, config.depth, config.heads, self.width // 2)
        self.frequencies = nn.Parameter(torch.empty(shape)) if rotary.kind == "mixed" else None

    @classmethod
    def of(cls, config: ViTConfig) -> Rotary | None:
        rotary = cls.rope_2d(config) if config.positions == "rope-2d" else config.rotary
        return cls(rotary, config) if rotary else None

    @staticmethod
    def rope_2d(config: ViTConfig) -> RotaryConfig:
        """What positions="rope-2d" stands for: at any size the corners keep the angles of the trained grid."""
        return RotaryConfig(base=ROPE_BASE, reference=config.grid)

    def turn(self, place: Place, tokens: Tensor) -> Place:
        """What the blocks are told about tokens B T D at this place."""
        tables = self(place.grid, tokens)
        if self.frequencies is None:
            return place._replace(rotate=self._turn(tables))
        return place._replace(rotates=[self._turn(tables[:, i]) for i in range(tables.shape[1])])

    def _turn(self, tables: Tensor) -> Rotate:
        (cos, sin), swap = tables, self.swap
        return lambda x: torch.addcmul(x * cos, swap(x), sin)

    def forward(self, grid: Size, tokens: Tensor) -> Tensor:
        """2 T K, of "mixed" 2 L H T K: the factors of each channel, and of the other one of its plane."""
        if self.training and self.varied:
            return self._tables(self.angles(grid, tokens.device), tokens)
        key = (grid, tokens.dtype, tokens.device)
        return self.derived(key, lambda: self._tables(self.angles(grid), tokens))

    def _tables(self, angles: Tensor, tokens: Tensor) -> Tensor:
        angles = F.pad(angles, (0, 0, self.prefix, 0))  # ... T K/2
        cos, sin = angles.cos(), angles.sin()
        if self.rotary.half:
            planes = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        else:
            planes = torch.stack([cos, cos], dim=-1).flatten(-2), torch.stack([-sin, sin], dim=-1).flatten(-2)
        return torch.stack(planes).to(tokens)  # 2 ... T K

    def angles(self, grid: Size, vary_on: torch.device | None = None) -> Tensor:
        """N K/2, or L H N K/2; with `vary_on` as in training, drawn on that device."""
        axes = COORDINATES[self.rotary.kind](self.rotary, grid)
        if vary_on is not None:
            axes = self._vary(axes, vary_on)
        rows, columns = (axis.flatten()[:, None] for axis in torch.meshgrid(*axes, indexing="ij"))  # N 1
        first, second = (columns, rows) if self.rotary.axes == "xy" else (rows, columns)
        if self.frequencies is None:
            omega = self.bands().to(rows)
            return torch.cat([first * omega, second * omega], dim=-1)
        by_first, by_second = self.frequencies[:, :, :, None].float().unbind(0)  # L H 1 K/2
        return first.to(by_first) * by_first + second.to(by_first) * by_second

    def bands(self) -> Tensor:
        """K/4 frequencies, in radians per step of the coordinates."""
        count, config = self.width // 4, self.rotary
        if config.pixels:
            return math.pi * 2 ** torch.linspace(0, math.log2(config.max_res) - 1, count, dtype=torch.float64)
        omega = config.base ** -(torch.arange(count, dtype=torch.float64) / count)
        return 2 * math.pi * omega if config.kind == "box" else omega

    @property
    def varied(self) -> bool:
        return any((self.rotary.shift, self.rotary.jitter, self.rotary.rescale))

    def _vary(self, axes: list[Tensor], device: torch.device) -> list[Tensor]:
        """DINOv3's augmentation of coordinates: one draw for the batch, drawn as its authors do."""
        both = torch.zeros(2, device=device)
        shift = both.clone().uniform_(-self.rotary.shift, self.rotary.shift) if self.rotary.shift else both
        scale = torch.ones(2, device=device)
        for most, like in ((self.rotary.jitter, both), (self.rotary.rescale, both[:1])):  # each axis its own, then both
            if most:
                scale = scale * torch.empty_like(like).uniform_(-math.log(most), math.log(most)).exp()
        return [(axis.to(device, torch.float32) + a) * b for axis, a, b in zip(axes, shift, scale, strict=True)]

    def vectors(self, grid: Size) -> Tensor:
        """N D: the phases of every patch, of all blocks and heads."""
        angles = self.angles(grid).movedim(-2, 0).flatten(1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def init_weights(self) -> None:
        """The fixed frequencies of two axes at a right angle, turned by chance in every head (Heo et al. 2024)."""
        if self.frequencies is None:
            return
        angle = nn.init.uniform_(torch.empty(*self.frequencies.shape[1:3], 1), 0, 2 * math.pi)  # L H 1
        both = torch.cat([angle, angle + math.pi / 2], dim=-1).repeat_interleave(self.width // 4, dim=-1)  # L H K/2
        self.frequencies.copy_(torch.stack([both.cos(), both.sin()]) * self.bands().float().repeat(2))
