"""Maps as colours over a picture, exactly as the page draws them; the colours are those of static/colours.json."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

import numpy as np

from vitkit.explain.figures.overlay import enlarged, stretched


@cache
def scale(name: str = "magma") -> np.ndarray:
    """256 x 3 in 0..1, from dark to bright."""
    stops = json.loads((files("vitkit.web") / "static" / "colours.json").read_text())[name]
    at = np.linspace(0, 1, len(stops))
    return np.stack([np.interp(np.linspace(0, 1, 256), at, column) for column in np.transpose(stops)], axis=1) / 255


def levels(values: np.ndarray) -> np.ndarray:
    """From the least (0) to the most (1). What is alike everywhere is all 0: noise must not look like a finding."""
    least, most = float(values.min()), float(values.max())
    return (values - least) / (most - least) if most - least > 1e-3 * abs(most) else np.zeros_like(values)


def overlay(picture: np.ndarray, values: np.ndarray, strength: float) -> np.ndarray:
    """A picture (H W 3 uint8) under a map (h w): strength 0 shows the picture alone, 1 the map most."""
    base = enlarged(picture) / 255
    level = stretched(levels(values), base.shape[:2]).clip(0, 1)
    colour = scale()[(level * 255).round().astype(int)]
    grey = base @ np.array([0.299, 0.587, 0.114])
    base = base + strength * (grey[..., None] - base)
    cover = strength * (0.35 + 0.65 * level[..., None])
    return ((base + cover * (colour - base)) * 255).round().clip(0, 255).astype(np.uint8)
