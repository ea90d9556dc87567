"""Occlusion: how the probability of a class changes as each patch is hidden. The honest check of the others.

A hidden patch is filled with the picture's mean colour. Nothing is assumed about the model: it is only asked.

Shapes: B images, C channels, h x w grid of N patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.explain.inside import as_vit, grid_of, probabilities
from vitkit.explain.relevance import check_classes
from vitkit.model.config import Size


@dataclass(frozen=True)
class Occlusion:
    drop: np.ndarray  # B h w: probability of the class with all patches shown, minus with this one hidden
    probability: np.ndarray  # B: with all patches shown


def hide(image: Tensor, hidden: Tensor, patch: Size, fill: Tensor | None = None) -> Tensor:
    """One image C H W and masks M h w (True = hidden) -> M C H W, hidden patches filled with the mean colour."""
    fill = image.mean(dim=(-2, -1), keepdim=True) if fill is None else fill
    mask = hidden.repeat_interleave(patch[0], dim=-2).repeat_interleave(patch[1], dim=-1)  # M H W
    return torch.where(mask[:, None], fill, image)


def occlusion_map(model: nn.Module, images: Tensor, classes: Tensor, most: int = 32) -> Occlusion:
    """The drop in the probability of each image's class (B) for every patch, many patches per batch."""
    vit = as_vit(model)
    check_classes(vit, classes)
    grid = grid_of(vit.config, images)
    masks = torch.eye(grid[0] * grid[1], dtype=torch.bool).unflatten(-1, grid)  # N h w
    shown = probabilities(vit, images, most).gather(1, classes[:, None])[:, 0]  # B
    drops = []
    for image, wanted, whole in zip(images, classes.tolist(), shown, strict=True):
        hidden = torch.cat(  # the hidden versions of one image are made a batch at a time
            [probabilities(vit, hide(image, m, vit.config.patch_size), most)[:, wanted] for m in masks.split(4 * most)]
        )
        drops.append((whole - hidden).unflatten(0, grid))
    return Occlusion(torch.stack(drops).numpy(), shown.numpy())


if __name__ == "__main__":
    from vitkit.explain.command import main

    main("occlusion")
