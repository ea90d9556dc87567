"""Mean attention distance (figure 7, right, of the paper) and attention entropy, streamed over images.

The distance of a head is how far, in pixels between patch centres, its attention reaches, averaged over
all query patches. Class, distillation and register tokens have no place in the picture: they are left
out, as queries and as keys, and the remaining attention of each row is renormalised to sum to 1.

Shapes: B images, L layers, H heads, N patches on a grid (h, w), T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.explain.inside import as_vit, batches, grid_of, without_prefix
from vitkit.model.config import Size


@dataclass(frozen=True)
class AttentionReach:
    distance: np.ndarray  # B L H, pixels
    entropy: np.ndarray  # B L H, nats
    uniform_distance: float  # what attention spread evenly over all patches would give
    uniform_entropy: float  # log N


def patch_distances(grid: Size, patch: Size) -> Tensor:
    """N N: pixels between the centres of patches."""
    y, x = (torch.arange(n, dtype=torch.float64) * p for n, p in zip(grid, patch, strict=True))
    places = torch.stack([y[:, None].expand(grid), x[None].expand(grid)], dim=-1).flatten(0, 1)  # N 2
    return (places[:, None] - places[None]).square().sum(dim=-1).sqrt()


def mean_distance(weights: Tensor, distances: Tensor) -> Tensor:
    """Attention among patches (B H N N, rows sum to 1) -> pixels, B H."""
    return torch.einsum("bhqk,qk->bh", weights, distances.to(weights)) / weights.shape[-2]


def entropy(weights: Tensor) -> Tensor:
    """B H N N -> B H: mean entropy of the rows, in nats. 0 is one patch, log N all alike."""
    return torch.special.entr(weights).sum(dim=-1).mean(dim=-1)


def uniform_distance(grid: Size, patch: Size) -> float:
    """The mean distance of attention that is spread evenly."""
    return float(patch_distances(grid, patch).mean())


@torch.no_grad()
def attention_distance(model: nn.Module, images: Tensor) -> AttentionReach:
    """Distance and entropy of every head of every layer for each image; one layer of one batch is held at a time."""
    vit = as_vit(model)
    config, grid = vit.config, grid_of(vit.config, images)
    apart = patch_distances(grid, config.patch_size)
    near = apart.float().to(next(vit.parameters()).device)
    rows: list[Tensor] = []  # per batch: B L 2 H
    for batch in batches(vit, images):
        layers: list[Tensor] = []

        def look(weights: Tensor, layers: list[Tensor] = layers) -> None:
            patches = without_prefix(weights.float(), config.prefix_tokens)
            layers.append(torch.stack([mean_distance(patches, near), entropy(patches)], dim=1))

        vit.tokens(batch, on_weights=look)
        rows.append(torch.stack(layers, dim=1).cpu())
    found = torch.cat(rows).numpy()
    return AttentionReach(found[:, :, 0], found[:, :, 1], float(apart.mean()), float(np.log(grid[0] * grid[1])))


if __name__ == "__main__":
    from vitkit.explain.command import main

    main("distance")
