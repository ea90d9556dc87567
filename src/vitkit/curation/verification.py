"""Is one image a copy of another? What is left of their difference, once one is registered onto the other.

`alignment` says which pairs agree in outline. Different shirts on one floor do, too, and so do two shots of one scene.
Here both images are read again, with more pixels, and two things must hold, which hold of copies however they were
encoded, resized, cropped, turned or brightened:

colours  a change of brightness, contrast and saturation takes one to the other, and leaves little unexplained.
detail   the finest detail there is correlates, in most of the cells that have any.

Where a copy is too bright to be stored, its pixels are white: they must be where the change leads beyond white.

Shapes: B pairs, S side of the images, P side of the fields in which colours are compared.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.curation.alignment import blurred, detail, grey, in_cells, register, sampled, weighted_correlation

SIDE = 128  # of an image that is read again
_STEPS = ((64, 2), (SIDE, 6))  # side, iterations
_FIELDS = 32  # along a side, in which colours are compared
_WHITE = 250  # a channel that is as bright may have been brighter
_UNEXPLAINED = 0.2  # deviation that the map of colours leaves, as a share of the deviation of the image
_TEXTURE = 3.0  # grey levels: a cell whose detail deviates less says nothing
_COLOUR = 12.0  # grey levels, over three channels: a cell whose mean differs more is of another colour
_ALIKE = 0.5  # correlation of the detail of a cell that shows the same
_FEWEST = 8  # cells with detail, of 64: with fewer nobody can tell
_LUMA = torch.tensor([0.299, 0.587, 0.114])
COPY = 0.6  # share of cells that are alike in a copy


def verified(images: np.ndarray, others: np.ndarray, start: np.ndarray) -> np.ndarray:
    """uint8 B S S 3 twice, B 2 3 -> B: the share of cells whose detail is the same, 0 where colours say otherwise.

    start  the affine map from `others` to `images` that `alignment` found
    """
    a, b = (torch.from_numpy(x) for x in (images, others))
    theta = torch.from_numpy(start).float()
    for side, iterations in _STEPS:
        image, other = (detail(F.adaptive_avg_pool2d(grey(x), side)) for x in (a, b))
        theta = register(image, other, theta, iterations)
    a, b = (x.permute(0, 3, 1, 2).float() for x in (a, b))  # B 3 S S
    a, inside = sampled(a, theta)
    clipped = [(x >= _WHITE).any(dim=1) for x in (a, b)]  # B S S
    there, back = _residual(a, b, inside, *clipped), _residual(b, a, inside, *reversed(clipped))
    shorter = there[0] < back[0]  # a grey copy can be made of a coloured image, not the other way round
    unexplained, left = (
        torch.where(shorter.view(-1, *[1] * (x.ndim - 1)), x, y) for x, y in zip(there, back, strict=True)
    )
    same = _cells(a, b, left, inside, clipped[0] == clipped[1])
    return np.asarray((same * (unexplained <= _UNEXPLAINED)).numpy())


def _residual(a: Tensor, b: Tensor, inside: Tensor, clipped: Tensor, clipped_other: Tensor) -> tuple[Tensor, Tensor]:
    """B 3 S S twice, B S S three times -> B, B 3 S S: what no change of colours explains, its share and itself."""
    known = inside * torch.where(clipped | clipped_other, 0.1 * (clipped & clipped_other), torch.ones(()))
    x, y, weight = _fields(a, b, known)  # B 3 P*P, the same, B 1 P*P
    terms, y, weight = _terms(x).double(), y.double(), weight.double()  # B 3 3 P*P
    for _ in range(2):  # once more without what does not fit at all
        some = (terms * weight[:, None]).flatten(2)
        normal = some @ terms.flatten(2).mT + 1e-3 * torch.eye(3)
        change = torch.linalg.solve(normal, some @ y.flatten(1)[..., None])  # B 3 1
        rest = (y - (change[..., None] * terms).sum(dim=1)).norm(dim=1, keepdim=True)
        spread = ((rest**2 * weight).sum(dim=2, keepdim=True) / weight.sum(dim=2, keepdim=True).clamp(min=1e-6)).sqrt()
        weight = weight / (1 + (rest / (2 * spread + 1)) ** 2)
    left = b - (change[..., None].float() * _terms(a.flatten(2))).sum(dim=1).view_as(b)
    left = torch.where(clipped[:, None], left.clamp(max=0), left)  # was brighter than white: so may the other be
    left = torch.where(clipped_other[:, None], left.clamp(min=0), left)
    coarse, y, weight = _fields(left, b, inside)
    y = y - (y * weight).sum(dim=2, keepdim=True) / weight.sum(dim=2, keepdim=True).clamp(min=1e-6)
    unexplained, whole = (((z**2) * weight).sum(dim=(1, 2)) for z in (coarse, y))
    return (unexplained / whole.clamp(min=1e-6)).sqrt(), left


def _terms(x: Tensor) -> Tensor:
    """B 3 . -> B 3 3 .: colours, their grey, and a constant; a brighter, paler or grey copy is a sum of these."""
    light = (x * _LUMA.view(3, 1)).sum(dim=1, keepdim=True).expand_as(x)
    return torch.stack([x, light, torch.ones_like(x)], dim=1)


def _fields(a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """B 3 S S twice, B S S -> means by weight, B 3 P*P twice, and weights, B 1 P*P."""
    side = a.shape[-1] // _FIELDS
    share = F.avg_pool2d(weight[:, None], side)
    a, b = (F.avg_pool2d(x * weight[:, None], side) / share.clamp(min=1e-3) for x in (a, b))
    return a.flatten(2), b.flatten(2), (share * (share > 0.05)).flatten(2)


def _cells(a: Tensor, b: Tensor, left: Tensor, inside: Tensor, usable: Tensor) -> Tensor:
    """B 3 S S three times, B S S twice -> B: of cells with detail or of another colour, the share that are alike."""
    a, b = (grey(x.permute(0, 2, 3, 1)) for x in (a, b))
    a, b, weight, covered = (
        in_cells(x) for x in (*((x - blurred(x, 5))[:, 0] for x in (a, b)), inside * usable, inside)
    )  # B 8 8 . .
    spread = torch.maximum(*((x * weight).std(dim=(-2, -1), correction=0) for x in (a, b)))
    enough = covered.mean(dim=(-2, -1))
    coloured = torch.stack([(in_cells(x) * covered).mean(dim=(-2, -1)) for x in left.unbind(1)]).norm(dim=0)
    other = (coloured / enough.clamp(min=1e-3) > _COLOUR) & (enough > 0.5)
    counted = ((weight.mean(dim=(-2, -1)) > 0.5) & (spread > _TEXTURE)) | other
    alike = (weighted_correlation(a, b, weight) > _ALIKE) & counted & ~other
    many = counted.sum(dim=(1, 2))
    return alike.sum(dim=(1, 2)) / many.clamp(min=1) * (many >= _FEWEST)
