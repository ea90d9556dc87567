"""Images described without a model: edges and colours, the features of the years before deep networks.

For whoever needs features in seconds and has no checkpoint: a baseline before training, similar images. Three parts
of equal weight, each of norm 1, so that the cosine of two descriptions is the mean of three cosines:

edges    histograms of oriented gradients (Dalal & Triggs 2005), the numbers of scikit-image's `hog`
colours  what share of the pixels has which colour, in the whole image and in its quarters (square roots: Hellinger)
layout   the mean colour of 4 x 4 fields, less the mean of the image

Shapes: N images, C channels, S side, D numbers of a description.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import DataError

SIDE, CELL, ORIENTATIONS, BLOCK = 64, 16, 9, 2  # pixels, pixels, directions over half a turn, cells
LEVELS = {3: 4}  # per channel of a joint histogram for colour; other channels are counted one by one, in
SINGLE = 16  # levels
_FIELDS = 4  # of the layout, along a side
_AT_ONCE = 256  # images


def describe(images: Tensor) -> Tensor:
    """uint8 N C H W of any size -> float32 N D on the CPU; D depends on C only: 692 for colour."""
    if images.dtype != torch.uint8 or images.ndim != 4 or not all(images.shape[1:]):
        raise DataError(f"describe() takes uint8 images N C H W, not {images.dtype} {tuple(images.shape)}")
    parts = [_describe(some) for some in torch.split(images.cpu(), _AT_ONCE)] if len(images) else []
    return torch.cat(parts) if parts else torch.zeros(0, width(images.shape[1]))


def width(channels: int) -> int:
    """D: the numbers of a description."""
    cells = SIDE // CELL
    edges = (cells - BLOCK + 1) ** 2 * BLOCK**2 * ORIENTATIONS
    bins = LEVELS[channels] ** channels if channels in LEVELS else SINGLE * channels
    return edges + 5 * bins + channels * _FIELDS**2


def _describe(images: Tensor) -> Tensor:
    x = F.interpolate(images.float(), (SIDE, SIDE), mode="bilinear", antialias=True).clamp(0, 255)  # N C S S
    layout = F.adaptive_avg_pool2d(x, _FIELDS)  # N C 4 4
    layout = layout - layout.mean(dim=(2, 3), keepdim=True)
    parts = gradients(x / 255), colours(x), layout.flatten(1) / 255
    return torch.cat([F.normalize(part, dim=1) for part in parts], dim=1)  # N D


def gradients(x: Tensor) -> Tensor:
    """N C S S -> N blocks*cells*orientations: `skimage.feature.hog(block_norm="L2-Hys")` of each image.

    A pixel counts with the channel whose gradient is steepest there.
    """
    down, across = torch.zeros_like(x), torch.zeros_like(x)
    down[:, :, 1:-1] = x[:, :, 2:] - x[:, :, :-2]
    across[..., 1:-1] = x[..., 2:] - x[..., :-2]
    steepness, channel = (down**2 + across**2).sqrt().max(dim=1, keepdim=True)  # N 1 S S
    angle = torch.atan2(down.gather(1, channel), across.gather(1, channel)) % math.pi
    direction = (angle * (ORIENTATIONS / math.pi)).long().clamp(max=ORIENTATIONS - 1)
    votes = torch.zeros(len(x), ORIENTATIONS, *x.shape[2:]).scatter_(1, direction, steepness)
    cells = F.avg_pool2d(votes, CELL)  # N O 4 4
    blocks = cells.unfold(2, BLOCK, 1).unfold(3, BLOCK, 1)  # N O 3 3 2 2
    flat = blocks.permute(0, 2, 3, 4, 5, 1).flatten(3)  # N 3 3 block
    for most in (0.2, 1.0):  # normalised, cut, normalised again
        flat = (flat / (flat.square().sum(dim=-1, keepdim=True) + 1e-10).sqrt()).clamp(max=most)
    return flat.flatten(1)


def colours(x: Tensor) -> Tensor:
    """N C S S in 0..255 -> N 5*bins: square roots of the shares of the image, then of its quarters."""
    channels, half = x.shape[1], SIDE // 2
    levels = LEVELS.get(channels, SINGLE)
    level = (x * (levels / 256)).long().clamp(max=levels - 1)  # N C S S
    if channels in LEVELS:
        place = levels ** torch.arange(channels)
        level, bins = (level * place.view(-1, 1, 1)).sum(dim=1, keepdim=True), levels**channels  # N 1 S S
    else:
        level, bins = level + levels * torch.arange(channels).view(-1, 1, 1), levels * channels
    quarters = level.unfold(2, half, half).unfold(3, half, half)  # N C 2 2 half half
    flat = quarters.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)  # N 4 pixels
    counts = torch.zeros(len(x), 4, bins).scatter_add_(2, flat, torch.ones(1).expand(flat.shape))
    shares = torch.cat([counts.sum(dim=1, keepdim=True) / 4, counts], dim=1) / half**2  # N 5 bins
    return shares.sqrt().flatten(1)
