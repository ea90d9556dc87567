"""What the model knows about where a patch is (figure 7, centre, of the paper).

Added positions (learned, 2-D, sin-cos) and the phases of rotary positions are vectors, one per patch:
their cosine similarities show rows, columns and distance. Relative positions have no vector; there the
learned bias by offset is the picture.

Shapes: N patches on a grid (h, w), D width, L layers, H heads.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.explain.inside import as_vit
from vitkit.model.config import Size


@torch.no_grad()
def position_vectors(model: nn.Module, grid: Size | None = None) -> Tensor:
    """N x D: the vector of every patch position, row by row, at this grid (default: the model's own)."""
    vit = as_vit(model)
    grid = grid or vit.config.grid
    kind = vit.config.positions
    if vit.encoder.rotary is not None:
        cos, sin = vit.encoder.rotary.angles(grid)
        return torch.cat([cos, sin], dim=-1)[vit.config.prefix_tokens :].double()
    if kind in ("none", "relative"):
        look = "; use position_offsets" if kind == "relative" else ""
        raise InputError(f"a model with positions={kind!r} has no vector per position{look}")
    return vit.positions.patch_table(grid).double().cpu()


def position_similarity(model: nn.Module, grid: Size | None = None) -> np.ndarray:
    """h w h w: [i, j] is the map of cosine similarities of position (i, j) with all others."""
    vit = as_vit(model)
    grid = grid or vit.config.grid
    unit = F.normalize(position_vectors(vit, grid), dim=-1)
    return (unit @ unit.mT).numpy().reshape(*grid, *grid)


@torch.no_grad()
def position_offsets(model: nn.Module) -> np.ndarray:
    """L H 2h-1 2w-1: the learned bias for every (row, column) offset, of a model with relative positions."""
    vit = as_vit(model)
    if vit.config.positions != "relative":
        raise InputError(f"a model with positions={vit.config.positions!r} has no bias by offset; see the similarity")
    tables = [block.relative.by_offset for block in vit.encoder.blocks]  # type: ignore[union-attr]
    return torch.stack([t.double().cpu() for t in tables]).numpy()  # type: ignore[misc]


def row_column_score(similarity: np.ndarray) -> dict[str, float]:
    """How much more alike positions of one row, or of one column, are than positions that share neither.

    Differences of mean cosine similarities: 0 says that rows and columns were not found.
    """
    h, w = similarity.shape[:2]
    i, j, k, m = np.ogrid[:h, :w, :h, :w]
    same_row, same_column = np.broadcast_arrays(i == k, j == m)
    elsewhere = similarity[~same_row & ~same_column]
    if not elsewhere.size:  # a grid of a single row or column
        return {"row": 0.0, "column": 0.0}
    base = float(elsewhere.mean())
    pairs = {"row": same_row & ~same_column, "column": same_column & ~same_row}
    return {name: float(similarity[pair].mean()) - base for name, pair in pairs.items()}


if __name__ == "__main__":
    from vitkit.explain.command import main

    main("positions")
