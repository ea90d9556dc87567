"""What one chosen patch attends to, in every layer and head.

Shapes: B images, L layers, H heads, h x w grid of patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.explain.inside import as_vit, batches, grid_of, to_grid
from vitkit.model.config import Size


def check_patch(patch: Size, grid: Size) -> int:
    """(row, column) -> the number of the patch, row by row."""
    if not all(0 <= i < n for i, n in zip(patch, grid, strict=True)):
        raise InputError(
            f"patch {patch[0]},{patch[1]} (row, column) is outside the grid; "
            f"rows are 0 to {grid[0] - 1} and columns 0 to {grid[1] - 1}"
        )
    return patch[0] * grid[1] + patch[1]


@torch.no_grad()
def query_attention(model: nn.Module, images: Tensor, patch: Size, layers: Sequence[int] | None = None) -> np.ndarray:
    """B L H h w: the attention of the patch at (row, column) to all patches, for the layers asked for."""
    vit = as_vit(model)
    grid, prefix = grid_of(vit.config, images), vit.config.prefix_tokens
    row = prefix + check_patch(patch, grid)
    found = []
    for batch in batches(vit, images):
        kept: list[Tensor] = []

        def look(weights: Tensor, kept: list[Tensor] = kept) -> None:
            kept.append(weights[:, :, row].cpu())

        vit.tokens(batch, on_weights=look, layers=layers)
        found.append(to_grid(torch.stack(kept, dim=1), prefix, grid))
    return torch.cat(found).numpy()


if __name__ == "__main__":
    from vitkit.explain.command import main

    main("query")
