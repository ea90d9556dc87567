"""Tables of positions brought to another grid, as each family that trained one does it.

Shapes: D width, H heads, h x w grid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.model.config import Size
from vitkit.model.symbolic import MATRICES, OFFSET_MATRICES, is_symbolic, resize_in_graph

Ways = dict[str, Callable[[Tensor, Size], Tensor]]


def _dinov2(x: Tensor, size: Size) -> Tensor:
    """The scale, not the size, is given, with 0.1 added against rounding down."""
    scale = [(new + 0.1) / old for new, old in zip(size, x.shape[-2:], strict=True)]
    return F.interpolate(x, scale_factor=scale, mode="bicubic", align_corners=False)


def _zoomed(old: int, new: int) -> Tensor:
    """new old: scipy.ndimage.zoom(order=1) of one side, with what its rounding loses.

    It reads at (old - 1) / (new - 1) * i. Where that product rounds to more than old - 1 (16 -> 30, 28 -> 14,
    32 -> 16, ...) the last place counts as outside, and its row is zero.
    """
    at = torch.arange(new, dtype=torch.float64) * ((old - 1) / max(1, new - 1))
    low = at.floor().clamp(max=max(0, old - 2)).long()
    eye, share = torch.eye(old, dtype=torch.float64), (at - low)[:, None]
    return (eye[low] * (1 - share) + eye[(low + 1).clamp(max=old - 1)] * share) * (at <= old - 1)[:, None]


def _scipy(x: Tensor, size: Size) -> Tensor:
    rows, columns = (_zoomed(old, new).to(x) for old, new in zip(x.shape[2:], size, strict=True))
    return rows @ x @ columns.mT


# Resizing a grid of position vectors as each family that trained one does it, 1 D h w -> 1 D h' w'.
RESIZES: Ways = {
    # scipy.ndimage.zoom(order=1) of the JAX code: bilinear with the corners kept
    "official": partial(F.interpolate, mode="bilinear", align_corners=True),
    "official-exact": _scipy,  # bit by bit, with the rows and columns of zeros that it makes at some sizes
    "timm": partial(F.interpolate, mode="bicubic", align_corners=False, antialias=True),
    "timm-npz": partial(F.interpolate, mode="bilinear", align_corners=False),
    "huggingface": partial(F.interpolate, mode="bicubic", align_corners=False),
    "torchvision": partial(F.interpolate, mode="bicubic", align_corners=True),
    "dinov2": _dinov2,
    "siglip2": partial(F.interpolate, mode="bilinear", align_corners=False, antialias=True),
}


def resize_grid(table: Tensor, grid: Size, how: str = "official", ways: Ways = RESIZES) -> Tensor:
    """h w D -> h' w' D."""
    if is_symbolic(grid):
        return resize_in_graph(table, grid, (OFFSET_MATRICES if ways is OFFSET_RESIZES else MATRICES)[how])
    if tuple(table.shape[:2]) == tuple(grid):
        return table
    # Half precision would lose what the table holds, so fp32 at least; scipy computes in float64.
    wide = (
        torch.float64 if how.startswith("official") and table.device.type != "mps" else torch.float32
    )  # mps has no float64
    # Contiguous, because PyTorch's antialiased resize of a channels-last table to one column is wrong (2.13).
    x = table.to(torch.promote_types(table.dtype, wide)).permute(2, 0, 1)[None].contiguous()  # 1 D h w
    return ways[how](x, grid)[0].permute(1, 2, 0).to(table.dtype)


def _geometric(table: Tensor, size: Size) -> Tensor:
    """BEiT's, as timm does it: the farther an offset is from 0, the larger the step to the next one."""
    rows, columns = (_reach(old, new).to(table) for old, new in zip(table.shape[2:], size, strict=True))
    return rows @ table @ columns.transpose(0, 1)


def _reach(old: int, new: int) -> Tensor:
    """new old: how much of each old offset makes a new one, linear between the two nearest."""
    if old == 1:
        return torch.ones(new, 1, dtype=torch.float64)
    low, high = 1.01, 1.5  # the ratio of a step to the one before: the old offsets are to reach as far as the new ones
    while high - low > 1e-6:
        ratio = (low + high) / 2
        low, high = (low, ratio) if (ratio ** (old // 2) - 1) / (ratio - 1) > new // 2 else (ratio, high)
    out = (ratio ** torch.arange(old // 2, dtype=torch.float64)).cumsum(0)  # 1, 1 + ratio, ...
    places = torch.cat([-out.flip(0), out.new_zeros(1), out])
    offsets = torch.arange(new, dtype=torch.float64) - new // 2
    right = torch.searchsorted(places, offsets).clamp(1, old - 1)
    share = ((offsets - places[right - 1]) / (places[right] - places[right - 1])).clamp(0, 1)[:, None]
    eye = torch.eye(old, dtype=torch.float64)
    return eye[right - 1] * (1 - share) + eye[right] * share


# Who resizes scores by offset in another way than vectors by position, 1 H 2h-1 2w-1.
OFFSET_RESIZES = RESIZES | {
    "timm": _geometric,
    "huggingface": partial(F.interpolate, mode="bilinear", align_corners=False),
}


def resize_offsets(table: Tensor, grid: Size, how: str) -> Tensor:
    """Scores by head and offset, H 2h-1 2w-1 -> those of the offsets on `grid`, 2h'-1 2w'-1 H."""
    return resize_grid(table.permute(1, 2, 0), (2 * grid[0] - 1, 2 * grid[1] - 1), how, OFFSET_RESIZES)
