"""Smaller images as part of a graph: a model that sees fewer pixels, and is asked as before.

Shapes: B images, C channels, H x W pixels; h x w fewer of them.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from vitkit.checkpoints.family import Checkpoint
from vitkit.checkpoints.load import load
from vitkit.model.base import VisionModel
from vitkit.model.symbolic import MATRICES


class Shrunk(nn.Module):
    """Images are made smaller, by bilinear interpolation with antialiasing; the model is as `--image-size` makes it.

    Both passes are matrix products with constant weights: every runtime gives the same pixels.
    """

    def __init__(self, model: VisionModel, scale: float) -> None:
        super().__init__()
        self.config = config = model.config  # the images that come are as large as before
        sides = list(zip(config.image_size, config.patch_size, strict=True))
        size = shrunk_side(*sides[0], scale), shrunk_side(*sides[1], scale)
        self.model = load(Checkpoint(config, model.state_dict(), model.outputs), image_size=size)  # the same weights
        self.model.merge = model.merge
        for name, old, new in zip(("rows", "columns"), config.image_size, size, strict=True):
            self.register_buffer(name, _weights(old, new), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        rows, columns = (cast(Tensor, table).to(images) for table in (self.rows, self.columns))  # h H, w W
        found: Tensor = self.model(rows @ images @ columns.transpose(0, 1))  # B C h w
        return found


def shrunk_side(side: int, patch: int, scale: float) -> int:
    """In pixels: whole patches, at least one."""
    return patch * max(1, round(scale * (side // patch)))


def _weights(old: int, new: int) -> Tensor:
    numbers = torch.arange(new, dtype=torch.float64)[:, None]
    return MATRICES["siglip2"](old, numbers, torch.tensor([float(new)], dtype=torch.float64)).float()
