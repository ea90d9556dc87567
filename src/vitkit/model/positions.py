"""Where a patch was: a table of position encodings. A new one is a class, a row here and its rule in `words.py`.

Each owns its parameters, how it acts (on the tokens, on the scores), its resizing to another grid, and whether
tokens may be merged or dropped with it. Rotary positions (`rotary.py`) come on top of any of them.

Shapes: B images, D width, H heads, h x w grid of N patches, P prefix tokens, T = P + N tokens.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from vitkit.model.config import Size, ViTConfig
from vitkit.model.place import Place as Place
from vitkit.model.place import PositionPart as PositionPart
from vitkit.model.place import Positions as Positions
from vitkit.model.place import Rotate as Rotate
from vitkit.model.relative import Relative, RelativeMlp, RelativeMlpShared, RelativeShared
from vitkit.model.resizing import RESIZES as RESIZES
from vitkit.model.resizing import resize_grid as resize_grid

SINCOS_BASE = 10_000.0


def side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """Two halves of vectors on a grid, each h w C or 1 where they do not change -> N 2C, row by row."""
    h, w = max(first.shape[0], second.shape[0]), max(first.shape[1], second.shape[1])
    return torch.cat([half.expand(h, w, -1) for half in (first, second)], dim=-1).flatten(0, 1)


class Added(Positions):
    """`vectors(grid)` is added to the patches, `prefix_rows()` to the first tokens before them."""

    def forward(self, prefix: Tensor, patches: Tensor, grid: Size) -> Tensor:
        key = (grid, patches.dtype, patches.device)
        patches = patches + self.derived(key, lambda: self.vectors(grid).to(patches))
        rows = self.prefix_rows()
        if rows is not None and len(rows):
            prefix = torch.cat([prefix[: len(rows)] + rows, prefix[len(rows) :]])
        return super().forward(prefix, patches, grid)

    @abstractmethod
    def vectors(self, grid: Size) -> Tensor: ...

    def prefix_rows(self) -> Tensor | None:
        """One row of D for each prefix token that has a position."""
        return None


class Learned(Added):
    """One row for every token, the paper's default."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.grid, self.how, self.prefix = config.grid, config.position_resize, config.positioned_prefix_tokens
        rows = self.prefix + config.grid[0] * config.grid[1]
        self.learned = nn.Parameter(torch.empty(rows, config.width))  # prefix first, patches row by row

    def vectors(self, grid: Size) -> Tensor:
        return resize_grid(self.learned[self.prefix :].view(*self.grid, -1), grid, self.how).flatten(0, 1)

    def prefix_rows(self) -> Tensor:
        return self.learned[: self.prefix]

    @classmethod
    def resize(cls, tensors: dict[str, Tensor], old: ViTConfig, new: ViTConfig) -> bool:
        table, rows = tensors["positions.learned"], old.positioned_prefix_tokens
        patches = resize_grid(table[rows:].reshape(*old.grid, -1), new.grid, new.position_resize)
        tensors["positions.learned"] = torch.cat([table[:rows], patches.flatten(0, 1)])
        return True


class Learned2D(Added):
    """Half of the width for the column, half for the row."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        (h, w), width, self.how = config.grid, config.width, config.position_resize
        self.prefix = nn.Parameter(torch.empty(config.positioned_prefix_tokens, width))
        self.columns = nn.Parameter(torch.empty(w, width // 2))
        self.rows = nn.Parameter(torch.empty(h, width // 2))

    def vectors(self, grid: Size) -> Tensor:
        columns = resize_grid(self.columns[None], (1, grid[1]), self.how)  # 1 w D/2
        return side_by_side(columns, resize_grid(self.rows[:, None], (grid[0], 1), self.how))

    def prefix_rows(self) -> Tensor:
        return self.prefix

    @classmethod
    def resize(cls, tensors: dict[str, Tensor], old: ViTConfig, new: ViTConfig) -> bool:
        for name, count in zip(("positions.rows", "positions.columns"), new.grid, strict=True):
            tensors[name] = resize_grid(tensors[name][None], (1, count), new.position_resize)[0]
        return True


class SinCos2D(Added):
    """Fixed, as in big_vision: sin and cos of the column, then of the row, at width / 4 wavelengths."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.width = config.width

    def vectors(self, grid: Size) -> Tensor:
        omega = SINCOS_BASE ** -torch.linspace(0, 1, self.width // 4, dtype=torch.float64)
        y, x = (torch.arange(n, dtype=torch.float64)[:, None] * omega for n in grid)  # h D/4, w D/4
        columns, rows = (torch.cat([angle.sin(), angle.cos()], dim=-1) for angle in (x, y))
        return side_by_side(columns[None], rows[:, None])


class LearnedRelative(Relative, Learned):
    """Both, as BEiT can be configured."""


class LearnedRelativeShared(RelativeShared, Learned):
    """Both, with one bias for all blocks."""


POSITIONS: dict[str, type[Positions]] = {
    "none": Positions,
    "learned": Learned,
    "learned-2d": Learned2D,
    "relative": Relative,
    "relative-shared": RelativeShared,
    "relative-mlp": RelativeMlp,
    "relative-mlp-shared": RelativeMlpShared,
    "learned+relative": LearnedRelative,
    "learned+relative-shared": LearnedRelativeShared,
    "sincos-2d": SinCos2D,
    "rope-2d": Positions,  # nothing is added: `rotary.py` does it all
}
