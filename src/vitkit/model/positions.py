"""Where a patch was: position embeddings of six kinds, and resizing them to any grid.

`none`, `learned` (one row per token, the paper's default), `learned-2d` (half of the width for the
column, half for the row) and `sincos-2d` (fixed) are added to the tokens once; `relative` adds a
learned bias by offset to the attention scores of every block; `rope-2d` rotates queries and keys.

Shapes: D width, H heads, K = D / H, h x w grid of N patches, R prefix tokens that have a position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.config import PositionResize, Size, ViTConfig

ROPE_BASE = 100.0  # wavelengths from 2 pi to 100 * 2 pi patches: grids are short, sentences are not
SINCOS_BASE = 10_000.0


def resize_grid(table: Tensor, grid: Size, way: PositionResize = "official") -> Tensor:
    """h w D -> h' w' D, as the family that trained the table does it.

    "official" is `scipy.ndimage.zoom(order=1)` of the JAX code: bilinear with the corners kept.
    """
    h, w = table.shape[:2]
    if (h, w) == tuple(grid):
        return table
    # Half precision would lose what the table holds, so fp32 at least; scipy computes in float64.
    wide = torch.float64 if way == "official" and table.device.type != "mps" else torch.float32  # mps has no float64
    # Contiguous, because PyTorch's antialiased resize of a channels-last table to one column is wrong (2.13).
    x = table.to(torch.promote_types(table.dtype, wide)).permute(2, 0, 1)[None].contiguous()  # 1 D h w
    if way == "official":
        x = F.interpolate(x, grid, mode="bilinear", align_corners=True)
    elif way == "timm":
        x = F.interpolate(x, grid, mode="bicubic", align_corners=False, antialias=True)
    elif way == "timm-npz":
        x = F.interpolate(x, grid, mode="bilinear", align_corners=False)
    elif way == "huggingface":
        x = F.interpolate(x, grid, mode="bicubic", align_corners=False)
    elif way == "torchvision":
        x = F.interpolate(x, grid, mode="bicubic", align_corners=True)
    else:  # dinov2: the scale, not the size, is given, with 0.1 added against rounding down
        scale = ((grid[0] + 0.1) / h, (grid[1] + 0.1) / w)
        x = F.interpolate(x, scale_factor=scale, mode="bicubic", align_corners=False)
    return x[0].permute(1, 2, 0).to(table.dtype)


def sincos_2d(grid: Size, width: int) -> Tensor:
    """h w D: sin and cos of the column, then of the row, at width / 4 wavelengths (as in big_vision)."""
    omega = SINCOS_BASE ** -torch.linspace(0, 1, width // 4, dtype=torch.float64)
    y, x = (torch.arange(n, dtype=torch.float64)[:, None] * omega for n in grid)  # h D/4, w D/4
    columns = torch.cat([x.sin(), x.cos()], dim=-1).expand(grid[0], -1, -1)  # h w D/2
    rows = torch.cat([y.sin(), y.cos()], dim=-1)[:, None].expand(-1, grid[1], -1)  # h w D/2
    return torch.cat([columns, rows], dim=-1)


class Memo:
    """Remembers what was derived from parameters while those parameters stay as they are.

    Used only where no gradient flows and nothing is being traced; `clear` is called on every switch
    between training and evaluation, so that weights changed behind autograd's back are seen too.
    """

    def __init__(self) -> None:
        self._kept: dict[object, tuple[object, Tensor]] = {}

    def clear(self) -> None:
        self._kept.clear()

    def get(self, key: object, sources: Sequence[Tensor], build: Callable[[], Tensor]) -> Tensor:
        traced = torch.compiler.is_compiling() or any(s.is_meta or s.is_inference() for s in sources)
        if traced or (torch.is_grad_enabled() and any(s.requires_grad for s in sources)):
            return build()
        stamp = [(s.data_ptr(), s._version, s.dtype, s.device) for s in sources]
        if key not in self._kept or self._kept[key][0] != stamp:
            with torch.inference_mode(False):  # what is kept may be used in a graph later
                if len(self._kept) > 16:
                    self._kept.clear()
                self._kept[key] = (stamp, build().detach())
        return self._kept[key][1]


class AddedPositions(nn.Module):
    """The kinds that are added to the tokens: `table(grid)` has one row per positioned token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.kind, self.grid, self.way = config.positions, config.grid, config.position_resize
        self.width, self.prefix_rows = config.width, config.positioned_prefix_tokens
        self.memo = Memo()
        (h, w), width, rows = self.grid, self.width, self.prefix_rows
        if self.kind == "learned":
            self.learned = nn.Parameter(torch.empty(rows + h * w, width))  # prefix first, patches row by row
        elif self.kind == "learned-2d":
            self.prefix = nn.Parameter(torch.empty(rows, width))
            self.columns = nn.Parameter(torch.empty(w, width // 2))
            self.rows = nn.Parameter(torch.empty(h, width // 2))

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def train(self, mode: bool = True) -> AddedPositions:
        self.memo.clear()
        return super().train(mode)

    def forward(self, prefix: Tensor, patches: Tensor, grid: Size) -> Tensor:
        """prefix P D, patches B N D -> tokens B (P + N) D, with their positions added."""
        if self.kind != "none":
            key = (grid, patches.dtype, patches.device)
            table = self.memo.get(key, list(self.parameters()), lambda: self.patch_table(grid).to(patches))
            patches = patches + table
        if self.prefix_rows and self.kind in ("learned", "learned-2d"):
            rows = self.learned[: self.prefix_rows] if self.kind == "learned" else self.prefix
            prefix = torch.cat([prefix[: self.prefix_rows] + rows, prefix[self.prefix_rows :]])
        return torch.cat([prefix.expand(patches.shape[0], -1, -1), patches], dim=1)

    def patch_table(self, grid: Size) -> Tensor:
        """N D: the embedding of each patch position, row by row, at this grid."""
        if self.kind == "learned":
            table = self.learned[self.prefix_rows :].unflatten(0, self.grid)
            return resize_grid(table, grid, self.way).flatten(0, 1)
        if self.kind == "learned-2d":
            columns = resize_grid(self.columns[None], (1, grid[1]), self.way).expand(grid[0], -1, -1)
            rows = resize_grid(self.rows[:, None], (grid[0], 1), self.way).expand(-1, grid[1], -1)
            return torch.cat([columns, rows], dim=-1).flatten(0, 1)
        if self.kind == "sincos-2d":
            return sincos_2d(grid, self.width).flatten(0, 1)
        return torch.zeros(grid[0] * grid[1], self.width)


class RelativeBias(nn.Module):
    """A learned score by (row, column) offset and head; tokens before the patches have three of their own."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        h, w = config.grid
        self.way, self.prefix = config.position_resize, config.prefix_tokens
        self.by_offset = nn.Parameter(torch.empty(config.heads, 2 * h - 1, 2 * w - 1))
        # patch to prefix, prefix to patch, prefix to prefix
        self.with_prefix = nn.Parameter(torch.empty(config.heads, 3)) if self.prefix else None
        self.memo = Memo()

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def train(self, mode: bool = True) -> RelativeBias:
        self.memo.clear()
        return super().train(mode)

    def forward(self, grid: Size) -> Tensor:
        """H (P + N) (P + N), to be added to the attention scores."""
        return self.memo.get(grid, list(self.parameters()), lambda: self._build(grid))

    def _build(self, grid: Size) -> Tensor:
        h, w = grid
        table = resize_grid(self.by_offset.permute(1, 2, 0), (2 * h - 1, 2 * w - 1), self.way)  # 2h-1 2w-1 H
        device = table.device
        dy, dx = (torch.arange(n, device=device)[:, None] - torch.arange(n, device=device) + n - 1 for n in grid)
        index = (dy[:, None, :, None] * (2 * w - 1) + dx[None, :, None, :]).reshape(h * w, h * w)
        bias = table.flatten(0, 1)[index].permute(2, 0, 1)  # H N N
        if self.with_prefix is None:
            return bias
        n, p = h * w, self.prefix
        to_prefix, from_prefix, within = self.with_prefix[:, :, None, None].unbind(1)  # each H 1 1
        top = torch.cat([within.expand(-1, p, p), from_prefix.expand(-1, p, n)], dim=2)
        return torch.cat([top, torch.cat([to_prefix.expand(-1, n, p), bias], dim=2)], dim=1)


class Rotary(nn.Module):
    """2-D rotary positions: the first half of each head turns with the row, the second with the column.

    On another grid than the trained one the angles are scaled, so that corners keep their angles.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid, self.prefix, self.pairs = config.grid, config.prefix_tokens, config.width // config.heads // 4

    def forward(self, grid: Size, like: Tensor) -> Callable[[Tensor], Tensor]:
        """The rotation to apply to queries and keys (B H N K) of this grid."""
        cos, sin = (t.to(like) for t in self.angles(grid))

        def rotate(x: Tensor) -> Tensor:
            a, b = x.unflatten(-1, (-1, 2)).unbind(-1)  # B H N K/2: each pair is one plane
            return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)

        return rotate

    def angles(self, grid: Size) -> tuple[Tensor, Tensor]:
        """cos and sin, each (P + N) K/2; the prefix tokens are not turned."""
        omega = ROPE_BASE ** -(torch.arange(self.pairs, dtype=torch.float64) / self.pairs)
        y, x = (
            torch.arange(n, dtype=torch.float64)[:, None] * (trained / n) * omega
            for n, trained in zip(grid, self.grid, strict=True)
        )
        angle = torch.cat([y[:, None].expand(-1, grid[1], -1), x[None].expand(grid[0], -1, -1)], dim=-1)
        angle = F.pad(angle.flatten(0, 1), (0, 0, self.prefix, 0))  # (P + N) K/2
        return angle.cos(), angle.sin()
