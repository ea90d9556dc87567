"""Do two thumbnails show the same photograph? Register one onto the other, then compare what is left, cell by cell.

Gauss-Newton on an affine map, coarse to fine, of images without their low frequencies: brightness and
contrast do not count, and smooth skies are not alike just because they are smooth.

Shapes: B pairs, S side of a thumbnail.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_STEPS = ((16, 8), (32, 8), (64, 6))  # side, iterations
_CELLS = 4  # along a side, compared one by one
_TEXTURE = 0.15  # of the mean deviation: a cell with less says nothing
_ALIKE = 0.7  # correlation of a cell that shows the same
_EARLY = 0.25  # correlation without which the next finer size is not tried


def agreement(images: np.ndarray, others: np.ndarray, start: np.ndarray) -> np.ndarray:
    """uint8 B S S 3 twice, B 2 3 -> B: the share of cells of `others` that are found again in `images`, 0 to 1.

    start  the affine map from `others` to `images`, in coordinates from -1 to 1, to begin with
    """
    a, b = (_grey(torch.from_numpy(x)) for x in (images, others))  # B 1 S S
    theta, score = torch.from_numpy(start).float(), torch.ones(len(a))
    alive = torch.arange(len(a))
    for side, iterations in _STEPS:
        image, template = (_detail(F.adaptive_avg_pool2d(x[alive], side)) for x in (a, b))
        theta[alive] = _register(image, template, theta[alive], iterations)
        correlation = _correlation(*_overlap(image, template, theta[alive]))
        keep = correlation > _EARLY
        score[alive[~keep]] = 0
        alive = alive[keep]
    if len(alive):
        image, template = (_detail(x[alive]) for x in (a, b))
        score[alive] = _cells(*_overlap(image, template, theta[alive])) * _plausible(theta[alive])
    return score.numpy()


def _grey(images: Tensor) -> Tensor:
    return (images.float() @ torch.tensor([0.299, 0.587, 0.114]))[:, None]  # B 1 S S


def _detail(x: Tensor) -> Tensor:
    """Less a wide average, more or less blurred, of deviation 1."""
    narrow = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
    wide = F.avg_pool2d(x, 9, 1, 4, count_include_pad=False)
    y = narrow - wide
    return y / (y.flatten(1).std(dim=1).view(-1, 1, 1, 1) + 1e-3)


def _register(image: Tensor, template: Tensor, theta: Tensor, iterations: int) -> Tensor:
    """B 1 s s twice, B 2 3 -> the map under which the image, read at mapped places, is most like the template."""
    side = image.shape[-1]
    down, across = torch.gradient(image, dim=(2, 3))
    stack = torch.cat([image, across * (side / 2), down * (side / 2)], dim=1)  # B 3 s s, derivatives by coordinate
    ticks = (torch.arange(side) + 0.5) * 2 / side - 1
    x, y = ticks.repeat(side), ticks.repeat_interleave(side)  # s*s
    for _ in range(iterations):
        read, inside = _read(stack, theta)
        value, dx, dy = read.flatten(2).unbind(dim=1)  # B s*s
        weight = inside.flatten(1)
        difference = (template.flatten(1) - value) * weight
        difference = difference.clamp(-2, 2)  # what is in one image only does not pull
        columns = [d * w for d in (dx, dy) for w in (x, y, torch.ones_like(x))]
        jacobian = torch.stack(columns, dim=2) * weight[..., None]  # B s*s 6
        normal = jacobian.mT @ jacobian + torch.eye(6) * (0.01 * side**2)
        change = torch.linalg.solve(normal, (jacobian.mT @ difference[..., None]))[..., 0]
        theta = theta + change.clamp(-0.1, 0.1).view(-1, 2, 3)
    return theta


def _read(stack: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    grid = F.affine_grid(theta, [len(theta), 1, *stack.shape[2:]], align_corners=False)  # B s s 2
    inside = (grid.abs() <= 1).all(dim=-1).float()
    return F.grid_sample(stack, grid, align_corners=False, padding_mode="border"), inside


def _overlap(image: Tensor, template: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    read, inside = _read(image, theta)
    return read[:, 0], template[:, 0], inside  # B s s each


def _correlation(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """B ... -> B, over the last two axes where `weight` is 1; 0 where there is nothing to compare."""
    total = weight.sum(dim=(-2, -1), keepdim=True).clamp(min=1)
    a, b = ((x - (x * weight).sum(dim=(-2, -1), keepdim=True) / total) * weight for x in (a, b))
    both = (a**2).sum(dim=(-2, -1)) * (b**2).sum(dim=(-2, -1))
    return (a * b).sum(dim=(-2, -1)) / (both.sqrt() + 1e-6)


def _cells(a: Tensor, b: Tensor, inside: Tensor) -> Tensor:
    """The share of cells with texture, in either image, that are alike; 0 where few can be compared."""
    side = a.shape[-1] // _CELLS
    a, b, weight = (x.unfold(1, side, side).unfold(2, side, side).flatten(1, 2) for x in (a, b, inside))  # B cells s s
    spread = torch.maximum(*((x * weight).std(dim=(-2, -1)) for x in (a, b)))
    counted = (weight.mean(dim=(-2, -1)) > 0.5) & (spread > _TEXTURE)
    alike = (_correlation(a, b, weight) > _ALIKE) & counted
    share = alike.sum(dim=1) / counted.sum(dim=1).clamp(min=1)
    return torch.where(counted.sum(dim=1) >= _CELLS, share, torch.zeros_like(share))


def _plausible(theta: Tensor) -> Tensor:
    """Scales from a half to two, at most some shear: 1, else 0."""
    sizes = torch.linalg.svdvals(theta[:, :, :2])  # B 2
    fine = (sizes[:, 0] < 2) & (sizes[:, 1] > 0.5) & (sizes[:, 0] < 1.6 * sizes[:, 1])
    return fine.float()
