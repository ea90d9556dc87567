"""A map over an image, as pixels, exactly as the page of `vitkit serve` draws it. Numpy and Pillow only."""

from __future__ import annotations

import numpy as np
from PIL import Image

SIDE = 224  # the longer side of a drawn image
TOP = 0.98  # quantile of the brightest colour: on photographs one outlier patch would leave all others black
MAGMA = (  # from dark to bright; web/static/colours.json has the same for the page
    *((0, 0, 4), (10, 8, 34), (29, 17, 71), (54, 16, 107), (81, 18, 124), (106, 28, 129), (131, 38, 129)),
    *((156, 46, 127), (183, 55, 121), (208, 65, 111), (231, 82, 99), (245, 107, 92), (252, 137, 97)),
    *((254, 167, 114), (254, 196, 136), (253, 226, 163), (252, 253, 191)),
)
LUMA = np.array([0.299, 0.587, 0.114])


def enlarged(image: np.ndarray) -> np.ndarray:
    """H W 3 uint8 at the size it is drawn: large ones smaller, tiny ones in whole blocks."""
    longest = max(image.shape[:2])
    if longest > SIDE:
        h, w = (max(1, round(n * SIDE / longest)) for n in image.shape[:2])
        return np.asarray(Image.fromarray(image).resize((w, h), Image.Resampling.LANCZOS))
    blocks = SIDE // longest
    return image.repeat(blocks, axis=0).repeat(blocks, axis=1)


def stretched(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """h w -> H W, smoothly."""
    image = Image.fromarray(np.ascontiguousarray(values, dtype=np.float32))
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.BILINEAR))


def blocks(values: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """h w 3 in 0..1 -> H W 3, every patch a block of one colour."""
    rows, columns = (np.arange(n) * k // n for n, k in zip(size, values.shape[:2], strict=False))
    return values[rows][:, columns]


def levels(values: np.ndarray, top: float = TOP) -> np.ndarray:
    """From the least (0) to the quantile `top` (1). What is alike everywhere is all 0: noise is no finding."""
    least, most = float(values.min()), float(np.quantile(values, top))
    if most - least <= 1e-3 * abs(most):  # alike but for outliers, or nearly nothing at all
        most = float(values.max())
    if most - least <= 1e-3 * abs(most):
        return np.zeros_like(values)
    return ((values - least) / (most - least)).clip(0, 1)


def lit(image: np.ndarray, values: np.ndarray, top: float = TOP) -> np.ndarray:
    """As in the paper: the image, lit where the map is high."""
    base = enlarged(image)
    mask = stretched((values / max(float(np.quantile(values, top)), 1e-12)).clip(0, 1), base.shape[:2])
    return (base * mask[..., None]).round().astype(np.uint8)


def overlay(image: np.ndarray, values: np.ndarray, strength: float = 0.8, top: float = TOP) -> np.ndarray:
    """An image (H W 3 uint8) under a map (h w): strength 0 shows the image alone, 1 the map most."""
    base = enlarged(image) / 255
    level = stretched(levels(values, top), base.shape[:2]).clip(0, 1)
    at = level * (len(MAGMA) - 1)
    colour = np.stack([np.interp(at, range(len(MAGMA)), stops) for stops in zip(*MAGMA, strict=True)], axis=-1) / 255
    base = base + strength * ((base @ LUMA)[..., None] - base)
    cover = strength * (0.35 + 0.65 * level[..., None])
    return ((base + cover * (colour - base)) * 255).round().clip(0, 255).astype(np.uint8)
