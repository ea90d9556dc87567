"""Do two thumbnails show the same photograph? Register one onto the other, then compare what is left, cell by cell.

Gauss-Newton steps of an affine map, coarse to fine, of images without their low frequencies and with the same contrast
everywhere: brightness does not count, smooth skies are not alike just because they are smooth, and a frame does not
hide what is inside. Plain things of the same outline, such as trousers on a floor, agree too:
`verification` goes on from there.

Shapes: B pairs, S side of a thumbnail.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_STEPS = ((16, 8), (32, 8), (64, 6))  # side, iterations
_NOISE = 4.0  # grey levels: what varies less is hardly made stronger
_CELLS = 8  # along a side, compared one by one
_TEXTURE = 0.33  # deviation, which is 1 at most: a cell with less, about 2 grey levels, says nothing
_ALIKE = 0.7  # correlation of a cell that shows the same
_EARLY = 0.25  # correlation without which the next finer size is not tried


def agreement(images: np.ndarray, others: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 B S S 3 twice, B 2 3 -> B: the share of cells of `others` that are found again in `images`, 0 to 1.

    start  the affine map from `others` to `images`, in coordinates from -1 to 1, to begin with; the one that fits best
           is returned beside the share, B 2 3
    """
    a, b = (grey(torch.from_numpy(x)) for x in (images, others))  # B 1 S S
    theta, score = torch.from_numpy(start).float(), torch.ones(len(a))
    alive = torch.arange(len(a))
    for side, iterations in _STEPS:
        if not len(alive):
            return score.numpy(), theta.numpy()
        image, template = (detail(F.adaptive_avg_pool2d(x[alive], side)) for x in (a, b))
        theta[alive] = register(image, template, theta[alive], iterations)
        read, inside = sampled(image, theta[alive])
        overlap = read[:, 0], template[:, 0], inside  # B s s each
        keep = weighted_correlation(*overlap) > _EARLY
        score[alive[~keep]] = 0
        alive = alive[keep]
    if len(alive):
        score[alive] = _cells(*(x[keep] for x in overlap)) * _plausible(theta[alive])
    return score.numpy(), theta.numpy()


def correlation(images: np.ndarray, others: np.ndarray) -> np.ndarray:
    """uint8 B S S 3 twice -> B: of the grey levels as they are, without registering."""
    a, b = (grey(torch.from_numpy(x))[:, 0] for x in (images, others))
    return np.asarray(weighted_correlation(a, b, torch.ones_like(a)).numpy())


def grey(images: Tensor) -> Tensor:
    return (images.float() @ torch.tensor([0.299, 0.587, 0.114]))[:, None]  # B 1 S S


def detail(x: Tensor) -> Tensor:
    """Less a wide average, more or less blurred, of deviation 1 around every pixel where there is more than noise."""
    y = blurred(x, 3) - blurred(x, 9)
    return y / (blurred(y**2, 9).sqrt() + _NOISE)


def blurred(x: Tensor, width: int) -> Tensor:
    """The mean of a square around each pixel: two products with a band of ones, much cheaper than pooling."""
    side = torch.arange(x.shape[-1])
    band = ((side[:, None] - side).abs() <= width // 2).float()
    band = band / band.sum(dim=1, keepdim=True)
    return band @ x @ band.mT


def _coordinates(side: int) -> Tensor:
    """3 s*s: x, y and 1 of every pixel; x and y from -1 to 1."""
    ticks = (torch.arange(side) + 0.5) * 2 / side - 1
    return torch.stack([ticks.repeat(side), ticks.repeat_interleave(side), torch.ones(side * side)])


def register(image: Tensor, template: Tensor, theta: Tensor, iterations: int) -> Tensor:
    """B 1 s s twice, B 2 3 -> the map under which the image, read at mapped places, is most like the template.

    Inverse compositional (Baker & Matthews 2004): the derivatives are those of the template, computed once.
    """
    side = image.shape[-1]
    down, across = (slope.flatten(2) * (side / 2) for slope in torch.gradient(template, dim=(2, 3)))  # by coordinate
    jacobian = torch.cat([slope * _coordinates(side) for slope in (across, down)], dim=1)  # B 6 s*s
    normal = jacobian @ jacobian.mT + torch.eye(6) * (0.01 * side**2)
    solver = torch.linalg.inv(normal) @ jacobian
    last = torch.tensor([[[0.0, 0.0, 1.0]]]).expand(len(theta), 1, 3)
    for _ in range(iterations):
        read, inside = sampled(image, theta)
        difference = ((read - template)[:, 0] * inside).clamp(-2, 2)  # what is in one image only does not pull
        change = (solver @ difference.flatten(1)[..., None]).clamp(-0.1, 0.1).view(-1, 2, 3)
        theta = theta @ torch.linalg.inv(torch.cat([change + torch.eye(2, 3), last], dim=1))
    return theta


def sampled(image: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """The image at mapped places, B 1 s s, and where those are inside it, B s s."""
    side = image.shape[-1]
    grid = (theta @ _coordinates(side)).mT.unflatten(1, (side, side))  # B s s 2
    inside = (grid.abs() <= 1).all(dim=-1).float()
    return F.grid_sample(image, grid, align_corners=False, padding_mode="border"), inside


def weighted_correlation(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """B ... -> B, over the last two axes where `weight` is 1; 0 where there is nothing to compare."""
    total = weight.sum(dim=(-2, -1), keepdim=True).clamp(min=1)
    a, b = ((x - (x * weight).sum(dim=(-2, -1), keepdim=True) / total) * weight for x in (a, b))
    both = (a**2).sum(dim=(-2, -1)) * (b**2).sum(dim=(-2, -1))
    return (a * b).sum(dim=(-2, -1)) / (both.sqrt() + 1e-6)


def _cells(a: Tensor, b: Tensor, inside: Tensor) -> Tensor:
    """The share of cells with texture, in either image, that are alike: of all or of the inner ones, whichever is less.

    0 where few can be compared, or most of the middle differs. The same frame around different photographs agrees in
    many cells, all of them outer.
    """
    a, b, weight = (in_cells(x) for x in (a, b, inside))  # B cells cells s s
    spread = torch.maximum(*((x * weight).std(dim=(-2, -1), correction=0) for x in (a, b)))
    counted = (weight.mean(dim=(-2, -1)) > 0.5) & (spread > _TEXTURE)
    alike = (weighted_correlation(a, b, weight) > _ALIKE) & counted
    everywhere, inner, middle = (_share(alike, counted, ring) for ring in (0, _CELLS // 4, _CELLS // 2 - 1))
    sure = (counted.sum(dim=(1, 2)) >= _CELLS) & (middle >= 0.5)
    return torch.where(sure, torch.minimum(everywhere, inner), torch.zeros_like(inner))


def in_cells(x: Tensor, side: int | None = None) -> Tensor:
    """B s s -> B cells cells . .: 8 x 8 parts of an image, or parts of so many pixels along a side."""
    side = side or x.shape[-1] // _CELLS
    return x.unfold(1, side, side).unfold(2, side, side)


def _share(alike: Tensor, counted: Tensor, ring: int) -> Tensor:
    """B cells cells twice -> B: of the cells that count, without some rings of outer ones; 1 where at most one does."""
    inner = slice(ring, _CELLS - ring)
    some = counted[:, inner, inner].sum(dim=(1, 2))
    share = alike[:, inner, inner].sum(dim=(1, 2)) / some.clamp(min=1)
    return torch.where(some > 1, share, torch.ones_like(share))


def _plausible(theta: Tensor) -> Tensor:
    """Scales from a half to two, at most some shear: 1, else 0."""
    sizes = torch.linalg.svdvals(theta[:, :, :2])  # B 2
    fine = (sizes[:, 0] < 2) & (sizes[:, 1] > 0.5) & (sizes[:, 0] < 1.6 * sizes[:, 1])
    return fine.float()
