"""Which map to believe: delete or insert patches in the order a map gives, and watch the class probability.

Deletion hides the patches a map calls most important first: a faithful map makes the probability fall fast
(a small area under the curve). Insertion starts from a picture that is all hidden and shows them first: a
faithful map makes it rise fast (a large area). Random orders say what either area means on this picture.

Shapes: B images, M methods, S + 1 points of a curve, h x w grid of N patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.explain.inside import as_vit, grid_of, probabilities
from vitkit.explain.occlusion import hide
from vitkit.explain.relevance import check_classes

RANDOM = "random order"


@dataclass(frozen=True)
class Faithfulness:
    methods: list[str]  # the last one is the random order
    fractions: np.ndarray  # S + 1: share of the patches that were deleted or inserted
    deletion: np.ndarray  # B M S+1: probability of the class
    insertion: np.ndarray  # B M S+1

    def areas(self, kind: str) -> np.ndarray:
        """B M: area under the deletion or insertion curve."""
        return area(getattr(self, kind), self.fractions)

    def table(self) -> list[dict[str, float | str]]:
        """One row per method: mean areas, and how they compare with a random order."""
        deletion, insertion = self.areas("deletion").mean(axis=0), self.areas("insertion").mean(axis=0)
        return [
            {
                "method": name,
                "deletion": float(deletion[i]),
                "insertion": float(insertion[i]),
                "deletion_ratio": float(deletion[i] / max(deletion[-1], 1e-12)),
                "insertion_ratio": float(insertion[i] / max(insertion[-1], 1e-12)),
            }
            for i, name in enumerate(self.methods)
        ]


def area(curves: np.ndarray, fractions: np.ndarray) -> np.ndarray:
    """Trapezoids over the last axis; a curve that stays at p has area p."""
    return ((curves[..., 1:] + curves[..., :-1]) / 2 * np.diff(fractions)).sum(axis=-1)


def faithfulness_curves(
    model: nn.Module,
    images: Tensor,
    classes: Tensor,
    maps: Mapping[str, np.ndarray],
    steps: int = 14,
    random_orders: int = 3,
    seed: int = 0,
) -> Faithfulness:
    """Deletion and insertion curves of each map (B h w, high = important) and of random orders, on each image."""
    vit = as_vit(model)
    check_classes(vit, classes)
    grid = grid_of(vit.config, images)
    count = grid[0] * grid[1]
    counts = np.unique(np.linspace(0, count, min(steps, count) + 1).round().astype(int))
    generator = np.random.default_rng(seed)
    deletion, insertion = [], []
    for i, (image, wanted) in enumerate(zip(images, classes.tolist(), strict=True)):
        orders = [np.argsort(-m[i].reshape(-1), kind="stable") for m in maps.values()]
        orders += [generator.permutation(count) for _ in range(random_orders)]
        masks = np.stack([masks_of(order, counts) for order in orders])  # orders S+1 N: True = deleted
        both = np.stack([masks, ~masks]).reshape(-1, count)  # 2 orders S+1 rows of N
        different, back = np.unique(both, axis=0, return_inverse=True)  # all shown and all hidden come up often
        hidden = torch.from_numpy(different).unflatten(-1, grid)
        curves = _probability(vit, image, hidden, wanted)[back.reshape(-1)].reshape(2, len(orders), -1)
        known = len(maps)
        curves = np.concatenate([curves[:, :known], curves[:, known:].mean(axis=1, keepdims=True)], axis=1)
        deletion.append(curves[0])
        insertion.append(curves[1])
    return Faithfulness([*maps, RANDOM], counts / count, np.stack(deletion), np.stack(insertion))


def masks_of(order: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Patches from the most to the least important -> S+1 N masks of the first 0, ..., N of them."""
    rank = np.empty(len(order), dtype=int)
    rank[order] = np.arange(len(order))
    return rank[None] < counts[:, None]


def _probability(model: object, image: Tensor, hidden: Tensor, wanted: int) -> np.ndarray:
    vit = as_vit(model)  # type: ignore[arg-type]
    parts = [probabilities(vit, hide(image, some, vit.config.patch_size))[:, wanted] for some in hidden.split(64)]
    return torch.cat(parts).numpy()


if __name__ == "__main__":
    from vitkit.explain.command import main

    main("faithfulness")
