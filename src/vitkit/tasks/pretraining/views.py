"""Several random views of each image, for methods that learn what the views of an image have in common.

Crops, mirror images, brightness, contrast and saturation, some grey and some blurred: the operations of training
(`data/vary.py`), with a key of its own for every view.

Shapes: B images, V views, C channels, H x W pixels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitkit.data import Augment, denormalise, normalise
from vitkit.data.augment import SMALL
from vitkit.data.keys import Keys, scramble, uniforms
from vitkit.data.vary import blurred, crop_and_flip, saturation, vary
from vitkit.model.config import Preprocessing

GREY, BLURRED, JITTER = 0.2, 0.5, 0.4  # probability, probability, share
GLOBAL, LOCAL = (0.4, 1.0), (0.1, 0.4)  # share of the image's area that a view shows


def views(images: Tensor, keys: Keys, pre: Preprocessing, scales: list[tuple[float, float]], flip_safe: bool) -> Tensor:
    """Normalised images B C H W -> normalised views B V C H W, one for each scale."""
    pixels = denormalise(images, pre).cpu()
    made = [one_view(pixels, scramble(keys ^ np.uint64(v + 1)), scale, flip_safe) for v, scale in enumerate(scales)]
    return normalise(torch.stack(made, dim=1).to(images.device), pre)


def one_view(pixels: Tensor, keys: Keys, scale: tuple[float, float], flip_safe: bool) -> Tensor:
    """uint8 B C H W -> uint8 B C H W."""
    size = (pixels.shape[-2], pixels.shape[-1])
    augment = Augment(crop="resized", scale=scale, flip=0.5 if flip_safe else 0.0, jitter=JITTER)
    made = vary(crop_and_flip(pixels, keys, augment, size), keys, augment)
    draws = torch.from_numpy(uniforms(keys, "view", 3))  # B 3
    made = saturation(made, (draws[:, 0] >= GREY).float())
    some = (draws[:, 1] < BLURRED).nonzero()[:, 0]
    if max(size) > SMALL and len(some):
        made[some] = blurred(made[some], (0.1 + 1.9 * draws[some, 2]).float())
    return made
