"""What the patch states know: similarity to one patch, and their principal components as colours.

The colours are shared by all images of a layer, so that parts of the same kind have the same colour in
every picture (as popular with DINOv2).

Shapes: B images, S states (before the first block and after each chosen one), N patches, h x w grid, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.explain.inside import as_vit, batches, block_states, grid_of
from vitkit.explain.query import check_patch
from vitkit.model.config import Size


@torch.no_grad()
def token_states(model: nn.Module, images: Tensor, layers: Sequence[int] | None = None) -> np.ndarray:
    """B S h w D: the patches' states after the layers asked for; 0 is before the first block, -1 after the last."""
    vit = as_vit(model)
    depth, grid = len(vit.encoder.blocks), grid_of(vit.config, images)
    for layer in layers or ():
        if not -depth - 1 <= layer <= depth:
            raise InputError(f"there is no state {layer}; 0 is before the first block and {depth} after the last")
    wanted = range(depth + 1) if layers is None else sorted({layer % (depth + 1) for layer in layers})
    found = []
    for batch in batches(vit, images):
        states = [x[:, vit.config.prefix_tokens :].cpu() for i, x in enumerate(block_states(vit, batch)) if i in wanted]
        found.append(torch.stack(states, dim=1).unflatten(2, grid))
    return torch.cat(found).float().numpy()


def token_similarity(states: np.ndarray, patch: Size) -> np.ndarray:
    """... h w D -> ... h w: cosine similarity of every patch to the one at (row, column)."""
    check_patch(patch, states.shape[-3:-1])
    unit = F.normalize(torch.from_numpy(states), dim=-1)
    return (unit * unit[..., patch[0], patch[1], :][..., None, None, :]).sum(dim=-1).numpy()


def token_colours(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """B h w D of one layer -> colours B h w 3 in 0..1, and the share of variance of the three components."""
    flat = torch.from_numpy(states.reshape(-1, states.shape[-1])).double()
    centred = flat - flat.mean(dim=0)
    variance, vectors = torch.linalg.eigh(centred.T @ centred)  # smallest first
    count = min(3, vectors.shape[1])
    top = vectors[:, -count:].flip(1)
    top = top * torch.where(top.gather(0, top.abs().argmax(dim=0, keepdim=True)) < 0, -1.0, 1.0)
    values = F.pad(centred @ top, (0, 3 - count))  # B*N 3
    low, high = (torch.quantile(values, q, dim=0) for q in (0.01, 0.99))
    colours = ((values - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
    share = F.pad(variance[-count:].flip(0), (0, 3 - count)) / variance.sum().clamp_min(1e-30)
    return colours.numpy().reshape(*states.shape[:-1], 3), share.numpy()


if __name__ == "__main__":
    from vitkit.explain.command import main

    main("tokens")
