"""Resizing tables of positions inside an exported graph, where the grid is a symbol and not yet a number.

Every resize of `resizing.py` is linear and separable: rows @ table @ columns, with a matrix for each side. Here these
matrices are made of operations that every exported format has, so that a graph resizes as the model does, whatever a
runtime's own resize would do.

Shapes: D width, h x w grid, h' x w' the new one; n old places of a side, m new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vitkit.model.parts import Size

Weights = Callable[[int, Tensor, Tensor], Tensor]  # n, the numbers 0 .. m - 1 (m 1), and m (1): m n in float64


def is_symbolic(grid: Size) -> bool:
    return any(isinstance(side, torch.SymInt) for side in grid)


def spaced(n: int) -> Tensor:
    """n numbers from -1 to 1, at equal distances."""
    if not isinstance(n, torch.SymInt):
        return torch.linspace(-1, 1, n, dtype=torch.float64)
    at = torch.arange(n, dtype=torch.float64)[:, None]
    return (2 * at / at[-1].clamp(min=1.0) - 1)[:, 0]


def _corners(n: int, at: Tensor, m: Tensor) -> Tensor:
    """m 1: where the first and the last place stay where they are."""
    return at * _ratio(n - 1, (m - 1).clamp(min=1.0))


def _ratio(number: float, tensor: Tensor) -> Tensor:
    """Rounded once: PyTorch takes `number / tensor` for number * (1 / tensor)."""
    return torch.full_like(tensor, number) / tensor


def _centres(n: int, at: Tensor, m: Tensor, extra: float = 0.0) -> Tensor:
    """m 1: where places are the centres of cells."""
    return (at + 0.5) * _ratio(n, m + extra) - 0.5


def _equal(places: Tensor, n: int) -> Tensor:
    """m n: a one where a row's place is the column's."""
    return (places == torch.arange(n, dtype=torch.float64, device=places.device)).to(torch.float64)


def _linear(source: Callable[[int, Tensor, Tensor], Tensor], n: int, at: Tensor, m: Tensor) -> Tensor:
    place = source(n, at, m).clamp(0.0, n - 1.0)
    return (1 - (place - torch.arange(n, dtype=torch.float64, device=at.device)).abs()).clamp(min=0.0)


def _cubic(source: Callable[[int, Tensor, Tensor], Tensor], n: int, at: Tensor, m: Tensor) -> Tensor:
    """Four places around; those outside count for the last one inside."""
    place = source(n, at, m)
    low = place.floor()
    found = torch.zeros_like(at) * torch.zeros(n, dtype=torch.float64, device=at.device)
    for tap in (-1.0, 0.0, 1.0, 2.0):
        found = found + _cubic_filter((place - low - tap).abs(), -0.75) * _equal((low + tap).clamp(0.0, n - 1.0), n)
    return found


def _cubic_filter(x: Tensor, a: float) -> Tensor:
    inner, outer = ((a + 2) * x - (a + 3)) * x * x + 1, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x < 1, inner, torch.where(x < 2, outer, torch.zeros_like(x)))


def _antialiased(cubic: bool, n: int, at: Tensor, m: Tensor) -> Tensor:
    """Filters widen as a side shrinks."""
    stretch = _ratio(n, m).clamp(min=1.0)
    x = ((torch.arange(n, dtype=torch.float64, device=at.device) - _centres(n, at, m)) / stretch).abs()
    table = _cubic_filter(x, -0.5) if cubic else (1 - x).clamp(min=0.0)
    return table / table.sum(dim=1, keepdim=True)


def _zoomed(n: int, at: Tensor, m: Tensor) -> Tensor:
    """As `resizing._zoomed`: a last place that rounding puts outside is zero."""
    place = _corners(n, at, m)
    return _linear(_corners, n, at, m) * (place <= n - 1).to(torch.float64)


def _geometric(n: int, at: Tensor, m: Tensor) -> Tensor:
    """As `resizing._reach`, whose 18 halvings are three searches among 64 ratios here."""
    if n == 1:
        return torch.ones_like(at)
    half, low, width = (m / 2).floor(), torch.full_like(m, 1.01), 1.5 - 1.01
    for _ in range(3):
        width /= 64
        ratios = low + width * torch.arange(1, 64, dtype=torch.float64, device=at.device)
        near = (ratios ** (n // 2) - 1) / (ratios - 1) <= half
        low = low + width * near.to(torch.float64).sum()
    ratio = low + width / 2
    steps = ratio ** torch.arange(n // 2, dtype=torch.float64, device=at.device)
    out = torch.tril(torch.ones(n // 2, n // 2, dtype=torch.float64, device=at.device)) @ steps  # 1, 1 + ratio, ...
    places = torch.cat([-out.flip(0), torch.zeros_like(out[:1]), out])  # n
    offset = (at - half).clamp(places[:1], places[-1:])
    before, after = places[:-1], places[1:]
    between = ((offset > before) & (offset <= after)).to(torch.float64) / (after - before)  # m n-1
    up, down = (offset - before) * between, (after - offset) * between
    first = (offset <= places[:1]).to(torch.float64)  # the very first place is after none
    none = torch.zeros_like(first)
    return torch.cat([none, up], dim=1) + torch.cat([down, none], dim=1) + first * _equal(torch.zeros_like(at), n)


MATRICES: dict[str, Weights] = {  # of every way of `resizing.RESIZES`
    "official": partial(_linear, _corners),
    "official-exact": _zoomed,
    "timm": partial(_antialiased, True),
    "timm-npz": partial(_linear, _centres),
    "huggingface": partial(_cubic, _centres),
    "torchvision": partial(_cubic, _corners),
    "dinov2": partial(_cubic, partial(_centres, extra=0.1)),
    "siglip2": partial(_antialiased, False),
}
OFFSET_MATRICES = MATRICES | {"timm": _geometric, "huggingface": partial(_linear, _centres)}


def resize_in_graph(table: Tensor, grid: Size, weights: Weights) -> Tensor:
    """h w D -> h' w' D. On the grid of the table it stays as it is, as in `resize_grid`."""
    ats = [torch.arange(side, dtype=torch.float64, device=table.device)[:, None] for side in grid]
    counts = [at[-1] + 1 for at in ats]  # one element each: exporters take none for a float32 number
    same = torch.stack([count == n for count, n in zip(counts, table.shape[:2], strict=True)]).all()
    rows, columns = (
        torch.where(same, _equal(at, n), weights(n, at, count))
        for at, count, n in zip(ats, counts, table.shape[:2], strict=True)
    )
    width, depth = table.shape[1:]
    # Products of two matrices each: OpenVINO fails where one side has a batch of them and the other has not.
    x = (rows @ table.to(torch.float64).reshape(len(table), width * depth)).reshape(-1, width, depth)  # h' w D
    x = columns @ x.transpose(0, 1).reshape(width, -1)  # w' h'D
    return x.reshape(columns.shape[0], -1, depth).transpose(0, 1).to(table.dtype)
