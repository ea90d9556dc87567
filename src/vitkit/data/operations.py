"""The operations of RandAugment and TrivialAugment on a whole batch of uint8 pictures.

Each function takes pictures (B, C, H, W) and one strength per picture (B,), and returns uint8 pictures.
Every sum is done in whole numbers and every float operation is element by element, so a picture's result
cannot depend on which other pictures are in its batch, nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Operation = Callable[[Tensor, Tensor], Tensor]


def _per_picture(values: Tensor) -> Tensor:
    return values.to(torch.float32).view(-1, 1, 1, 1)


def _to_uint8(values: Tensor) -> Tensor:
    return values.round_().clamp_(0, 255).to(torch.uint8)


def _blend(images: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """other + share * (images - other): share 0 gives `other`, 1 the pictures, above 1 exaggerates."""
    other = other.to(torch.float32)
    return _to_uint8((images.to(torch.float32) - other).mul_(_per_picture(share)).add_(other))


def grey(images: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, 1, H, W), rounded to whole numbers; the usual weights for RGB."""
    if images.shape[1] != 3:
        return images.to(torch.int32).sum(dim=1, keepdim=True) // images.shape[1]
    r, g, b = images.to(torch.int32).unbind(dim=1)
    return ((299 * r + 587 * g + 114 * b + 500) // 1000)[:, None]


def brightness(images: Tensor, share: Tensor) -> Tensor:
    return _to_uint8(images.to(torch.float32).mul_(_per_picture(share)))


def contrast(images: Tensor, share: Tensor) -> Tensor:
    shades = grey(images)
    mean = shades.sum(dim=(1, 2, 3), dtype=torch.int64) // shades[0].numel()
    return _blend(images, mean.view(-1, 1, 1, 1), share)


def saturation(images: Tensor, share: Tensor) -> Tensor:
    return _blend(images, grey(images), share) if images.shape[1] == 3 else images


def sharpness(images: Tensor, share: Tensor) -> Tensor:
    if min(images.shape[-2:]) < 3:
        return images
    wide = images.to(torch.int32)
    h, w = images.shape[-2:]
    around = sum(wide[..., y : h - 2 + y, x : w - 2 + x] for y in range(3) for x in range(3))
    smooth = wide.clone()  # the border keeps its values, as in Pillow
    smooth[..., 1:-1, 1:-1] = (around + 4 * wide[..., 1:-1, 1:-1] + 6) // 13
    return _blend(images, smooth, share)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    mask = (256 - 2 ** (8 - bits.round().to(torch.int64))).clamp(0, 255).to(torch.uint8)
    return images & mask.view(-1, 1, 1, 1)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(images.to(torch.float32) >= _per_picture(threshold), 255 - images, images)


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    low = images.amin(dim=(2, 3), keepdim=True).to(torch.float32)
    span = images.amax(dim=(2, 3), keepdim=True).to(torch.float32) - low
    flat = span == 0
    scale = 255 / torch.where(flat, torch.ones_like(span), span)
    return torch.where(flat, images, _to_uint8((images.to(torch.float32) - low).mul_(scale)))


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Pillow's histogram equalisation, channel by channel."""
    flat = images.flatten(2).flatten(0, 1).to(torch.int64)  # B*C pixels
    counts = torch.zeros((len(flat), 256), dtype=torch.int64)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    last = counts.gather(1, 255 - counts.flip(1).ne(0).int().argmax(dim=1, keepdim=True))
    step = (counts.sum(dim=1, keepdim=True) - last) // 255
    before = counts.cumsum(dim=1) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp(0, 255)
    table = torch.where(step == 0, torch.arange(256), table)
    return table.gather(1, flat).to(torch.uint8).view(images.shape)


def warp(images: Tensor, matrices: Tensor, size: tuple[int, int] | None = None) -> Tensor:
    """Bilinear resampling: output pixel p comes from matrix @ (p, 1), in pixels from the centre; black outside.

    matrices: (B, 2, 3), float64. `size` is the (height, width) of the result.
    """
    height, width = images.shape[-2:]
    out_height, out_width = size or (height, width)
    y = torch.arange(out_height, dtype=torch.float64).view(1, -1, 1) - (out_height - 1) / 2
    x = torch.arange(out_width, dtype=torch.float64).view(1, 1, -1) - (out_width - 1) / 2
    m = matrices.view(-1, 6, 1, 1)
    across = (m[:, 0] * x + m[:, 1] * y) + m[:, 2]  # B H W
    down = (m[:, 3] * x + m[:, 4] * y) + m[:, 5]
    grid = torch.stack([across * (2 / width), down * (2 / height)], dim=-1).to(torch.float32)  # B H W 2, in -1..1
    moved = F.grid_sample(images.to(torch.float32), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return _to_uint8(moved)


# name -> (operation, strength of the RandAugment magnitude m in 0..1, signed). Wide ranges are TrivialAugment's.
COLOUR: dict[str, Operation] = {
    "brightness": brightness,
    "saturation": saturation,
    "contrast": contrast,
    "sharpness": sharpness,
    "posterize": posterize,
    "solarize": solarize,
    "autocontrast": autocontrast,
    "equalize": equalize,
}
GEOMETRY = ("shear-x", "shear-y", "translate-x", "translate-y", "rotate")
ALL = ("identity", *GEOMETRY, *COLOUR)


def colour_strength(name: str, m: np.ndarray, sign: np.ndarray, wide: bool) -> Tensor:
    """Magnitudes in 0..1 and signs -> what the operation takes."""
    if name == "posterize":
        values = 8 - (6 if wide else 4) * m
    elif name == "solarize":
        values = 255 * (1 - m)
    else:
        values = 1 + sign * (0.99 if wide else 0.9) * m
    return torch.from_numpy(np.asarray(values, dtype=np.float64))


def geometry_matrices(names: list[str], m: np.ndarray, sign: np.ndarray, size: tuple[int, int], wide: bool) -> Tensor:
    """One matrix per picture for the geometric operations, ranges as in the papers' code."""
    height, width = size
    shear, angle = (0.99, 135.0) if wide else (0.3, 30.0)
    shift = (min(32, width / 2), min(32, height / 2)) if wide else (150 / 331 * width, 150 / 331 * height)
    amount = m * sign
    matrices = np.tile(np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), (len(names), 1, 1))
    for i, name in enumerate(names):
        if name == "rotate":
            turn = np.deg2rad(angle * amount[i])
            matrices[i, :, :2] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
        elif name == "shear-x":
            matrices[i, 0, 1] = shear * amount[i]
        elif name == "shear-y":
            matrices[i, 1, 0] = shear * amount[i]
        elif name == "translate-x":
            matrices[i, 0, 2] = shift[0] * amount[i]
        elif name == "translate-y":
            matrices[i, 1, 2] = shift[1] * amount[i]
    return torch.from_numpy(matrices)
