"""Patch-embedding filters: what the first layer of the model looks for in a patch (figure 7, left, of the paper).

The filters are the rows of one linear map; their first principal components are a basis of the patterns
it can tell apart. In a trained model they look like the basis of a Fourier or cosine transform.

Shapes: D width, C channels, P x Q pixels of a patch, K components.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import nn

from vitkit.explain.inside import as_vit
from vitkit.model.patches import linear_to_conv


@dataclass(frozen=True)
class Filters:
    components: np.ndarray  # K P Q C, each of length 1
    explained: np.ndarray  # K: share of the filters' variance
    of_pixels: bool  # False for a hybrid: the patches are those of a feature map, not of the picture


def patch_filters(model: nn.Module, count: int = 28) -> Filters:
    """The first principal components of the patch embedding and the share of the variance each explains."""
    vit = as_vit(model)
    weight = vit.patches.weight.detach().double().cpu()
    if vit.patches.form == "linear":
        weight = linear_to_conv(weight, vit.patches.patch)
    d, c, p, q = weight.shape
    vectors, explained = principal_components(weight.permute(0, 2, 3, 1).reshape(d, -1).numpy(), count)
    return Filters(vectors.reshape(-1, p, q, c), explained, of_pixels=vit.stem is None)


def principal_components(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors (K, features) and shares of variance (K,), largest first. Signs: the largest entry is positive."""
    centred = rows - rows.mean(axis=0)
    _, s, vectors = np.linalg.svd(centred, full_matrices=False)
    variance = s**2
    kept = min(count, len(vectors))
    vectors, share = vectors[:kept], variance[:kept] / max(variance.sum(), np.finfo(float).tiny)
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=1)[:, None], axis=1)
    return vectors * np.where(largest < 0, -1.0, 1.0), share


def as_tiles(filters: Filters) -> np.ndarray:
    """K P Q 3 (or 1) in 0..1: each component stretched around mid-grey, so that its sign can be seen."""
    tiles = filters.components
    if tiles.shape[-1] not in (1, 3):  # other numbers of channels cannot be shown as colours
        tiles = tiles.mean(axis=-1, keepdims=True)
    scale = np.abs(tiles).max(axis=(1, 2, 3), keepdims=True)
    return 0.5 + 0.5 * tiles / np.maximum(scale, np.finfo(float).tiny)


if __name__ == "__main__":
    from vitkit.explain.command import main

    main("filters")
