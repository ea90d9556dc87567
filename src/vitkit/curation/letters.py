"""Do two documents say the same? Receipts and forms of one template differ in some letters only.

At the size at which photographs are compared (`verification`) no letter is seen. So of two images that are paper, one
flat tone for the most part, what is printed is compared where letters can be told apart: in a copy, however it was
encoded or resized, every cell in which both have strong strokes correlates; in another receipt of the same till most
do, and those with another date or price do not. What is too small or too blurred to have strokes says nothing.

Shapes: B pairs, S side of the images.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from vitkit.curation.alignment import blurred, detail, grey, in_cells, register, sampled, weighted_correlation

SIDE = 1024  # of an image whose letters are compared
_STEPS = ((256, 4), (512, 4))  # side, iterations
_CELL = 32  # pixels along a side
_FLAT, _PAPER = 12, 0.5  # grey levels around the tone of the paper, and the share of pixels that are within
_STROKES = 12.0  # grey levels: a cell whose detail deviates less has none
_OTHER = 0.4  # correlation of the strokes of a cell that says something else
_FEWEST, _SHARE = 2, 0.01  # cells that say something else, at least, and their share of those with strokes


def are_paper(images: np.ndarray) -> np.ndarray:
    """uint8 B s s 3 -> B."""
    tones = grey(torch.from_numpy(images)).flatten(1)
    return np.asarray(((tones - tones.median(dim=1, keepdim=True).values).abs() <= _FLAT).float().mean(dim=1) >= _PAPER)


def say_the_same(image: np.ndarray, other: np.ndarray, start: np.ndarray) -> bool:
    """uint8 S S 3 twice, 2 3: False where some of the strokes that both have are others.

    start  the affine map from `other` to `image` that `alignment` found
    """
    a, b = (grey(torch.from_numpy(x)[None]) for x in (image, other))  # 1 1 S S
    theta = torch.from_numpy(start)[None].float()
    for side, iterations in _STEPS:
        image_detail, other_detail = (detail(F.adaptive_avg_pool2d(x, side)) for x in (a, b))
        theta = register(image_detail, other_detail, theta, iterations)
    a, inside = sampled(a, theta)
    a, b = ((blurred(x, 3) - blurred(x, 15))[:, 0] for x in (a, b))
    a, b, weight = (in_cells(x, _CELL) for x in (a, b, inside))
    strokes = torch.minimum(*(x.std(dim=(-2, -1), correction=0) for x in (a, b))) > _STROKES
    strokes &= weight.mean(dim=(-2, -1)) == 1
    other_words = int((strokes & (weighted_correlation(a, b, weight) < _OTHER)).sum())
    return other_words < max(_FEWEST, _SHARE * int(strokes.sum()))
