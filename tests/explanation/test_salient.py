"""The patch that is asked when nobody names one: where the model looks and where there is something to see."""

import numpy as np
import torch

from vitkit.explanation.attention import salient


def test_it_is_on_the_object_and_not_an_outlier_on_the_background() -> None:
    """Planted: a textured object of 3 x 3 patches that counts, and a plain patch in a corner that counts far more."""
    pixels = torch.full((3, 64, 64), 90, dtype=torch.uint8)
    pixels[:, 24:48, 32:56] = torch.randint(0, 256, (3, 24, 24), generator=torch.Generator().manual_seed(0)).byte()
    weights = np.full((8, 8), 0.01)
    weights[3:6, 4:7], weights[0, 0] = 0.2, 1.0
    assert salient(weights, pixels) == (4, 5)


def test_an_image_without_contrast_leaves_the_weights_alone() -> None:
    weights = np.zeros((6, 6))
    weights[2, 3] = 1.0
    row, column = salient(weights, torch.zeros((1, 30, 30), dtype=torch.uint8))
    assert abs(row - 2) <= 1
    assert abs(column - 3) <= 1
