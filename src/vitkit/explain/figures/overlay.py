"""A map over a picture, as pixels. Numpy and Pillow only."""

from __future__ import annotations

import numpy as np
from PIL import Image

SIDE = 224  # the longer side of a drawn picture


def enlarged(picture: np.ndarray) -> np.ndarray:
    """H W 3 uint8 at the size it is drawn: large ones smaller, tiny ones in whole blocks."""
    longest = max(picture.shape[:2])
    if longest > SIDE:
        h, w = (max(1, round(n * SIDE / longest)) for n in picture.shape[:2])
        return np.asarray(Image.fromarray(picture).resize((w, h), Image.Resampling.LANCZOS))
    blocks = SIDE // longest
    return picture.repeat(blocks, axis=0).repeat(blocks, axis=1)


def stretched(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """h w -> H W, smoothly."""
    image = Image.fromarray(np.ascontiguousarray(values, dtype=np.float32))
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.BILINEAR))


def blocks(values: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """h w 3 in 0..1 -> H W 3, every patch a block of one colour."""
    rows, columns = (np.arange(n) * k // n for n, k in zip(size, values.shape[:2], strict=False))
    return values[rows][:, columns]


def lit(picture: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The paper's way: the picture, lit where the map is high."""
    base = enlarged(picture)
    mask = stretched(values / max(float(values.max()), 1e-12), base.shape[:2]).clip(0, 1)[..., None]
    return (base * mask).round().astype(np.uint8)


def coloured(picture: np.ndarray, values: np.ndarray, high: float, colours: str = "magma") -> np.ndarray:
    """The map in colours over the picture in grey; `high` is the value of the brightest colour."""
    from matplotlib import colormaps

    base = enlarged(picture)
    level = stretched(values / max(high, 1e-12), base.shape[:2]).clip(0, 1)
    grey = base.mean(axis=2, keepdims=True) / 255
    colour = colormaps[colours](level)[..., :3]
    strength = 0.35 + 0.5 * level[..., None]
    return ((1 - strength) * grey * 0.85 + strength * colour).clip(0, 1)
