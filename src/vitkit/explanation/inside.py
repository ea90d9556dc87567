"""What all figures take out of a model: attention of chosen layers, states, predictions, and what is read out.

Which token is the "output token"? With a class token it is that one; with mean pooling every patch
has an equal say; a MAP head asks with a probe of its own. `readout` writes all of them as one
distribution over the tokens, so that no figure needs to know how a model pools.

Shapes: B images, H heads, L layers, P prefix tokens, N patches on a grid (h, w), T = P + N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.model.build import Model
from vitkit.model.config import AnyConfig, Size, ViTConfig
from vitkit.model.vit import ViT
from vitkit.tasks import task_of

T = TypeVar("T")
WEIGHTS_BUDGET = 256 * 2**20  # bytes of one layer's attention weights in one batch


def as_vit(model: nn.Module) -> ViT:
    if isinstance(model, ViT):
        return model
    name = type(model).__name__
    raise InputError(f"this looks at attention, and a {name} has none; give a ViT (`vitkit zoo` lists them)")


def grid_of(config: ViTConfig, images: Tensor) -> Size:
    """Patches (down, across) of these images."""
    return images.shape[-2] // config.patch_size[0], images.shape[-1] // config.patch_size[1]


def batch_size(config: AnyConfig, images: Tensor, most: int = 32) -> int:
    """Images per batch, so that one layer's attention weights stay within the budget."""
    if not isinstance(config, ViTConfig):
        return most
    h, w = grid_of(config, images)
    per_image = config.all_heads * (config.prefix_tokens + h * w) ** 2 * 4
    return max(1, min(most, WEIGHTS_BUDGET // per_image))


def batches(model: Model, images: Tensor, most: int = 32) -> Iterator[Tensor]:
    """The images, some at a time, where the model is."""
    device = next(model.parameters()).device
    return (part.to(device) for part in images.split(batch_size(model.config, images, most)))


@torch.no_grad()
def predictions(model: Model, images: Tensor, most: int = 32) -> Tensor:
    """B C H W -> B outputs, batch by batch: probabilities of classes or labels, or values in their own units."""
    found = torch.cat([model(part).float().cpu() for part in batches(model, images, most)])
    return task_of(model).activate(found).float()


def attention_weights(model: nn.Module, images: Tensor, layers: Sequence[int] | None = None) -> list[Tensor]:
    """The attention (B H T T) of the layers asked for (all when None), in order of depth. All of it is kept."""
    return by_layer(as_vit(model), images, Tensor.detach, layers)


@torch.no_grad()
def by_layer(model: ViT, images: Tensor, take: Callable[[Tensor], T], layers: Sequence[int] | None = None) -> list[T]:
    """What `take` makes of the attention (B H T T) of each layer; one layer's is held at a time."""
    kept: list[T] = []
    model.tokens(images, on_weights=lambda weights: kept.append(take(weights)), layers=layers)
    return kept


def without_prefix(weights: Tensor, prefix: int) -> Tensor:
    """... T T -> ... N N: class, distillation and register tokens left out, the rest renormalised to sum to 1."""
    patches = weights[..., prefix:, prefix:]
    return patches / patches.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(patches.dtype).tiny)


def readout(model: ViT, images: Tensor) -> Tensor:
    """B T: how much each token counts in what the classifier sees. Rows sum to 1."""
    return readouts(model, images).mean(dim=1)


@torch.no_grad()
def readouts(model: ViT, images: Tensor) -> Tensor:
    """B R T: the same by each head of the probe of a MAP head; other poolings have one row."""
    pool, (h, w) = model.head.pool, grid_of(model.config, images)
    count = model.config.prefix_tokens + h * w
    if pool.attends:
        kept: list[Tensor] = []
        pool(model.tokens(images), on_weights=kept.append)
        return F.pad(kept[0][:, :, 0], (count - kept[0].shape[-1], 0))  # it may look at the patches alone
    each = torch.eye(count, device=images.device)[None]  # what becomes of token i is column i
    return pool(each).reshape(-1, count).mean(dim=0).expand(len(images), 1, -1)


def states(model: ViT, images: Tensor, depths: Sequence[int]) -> list[Tensor]:
    """B T D each: after so many blocks, in rising order; 0 is before the first."""
    first = [model.embedded(images)[0]] if 0 in depths else []
    layers = [depth - 1 for depth in depths if depth]
    return first + model.features(images, layers) if layers else first


def to_grid(values: Tensor, prefix: int, grid: Size) -> Tensor:
    """... T -> ... h w: the patches' values in their places."""
    return values[..., prefix:].unflatten(-1, grid)


def check_patch(patch: Size, grid: Size) -> int:
    """(row, column) -> the number of the patch, row by row."""
    if not all(0 <= i < n for i, n in zip(patch, grid, strict=True)):
        ends = f"rows are 0 to {grid[0] - 1} and columns 0 to {grid[1] - 1}"
        raise InputError(f"patch {patch[0]},{patch[1]} (row, column) is outside the grid; {ends}")
    return patch[0] * grid[1] + patch[1]


def half_mass(values: np.ndarray) -> float:
    """The smallest share of the patches that holds half of the sum."""
    ordered = np.sort(values.reshape(-1))[::-1]
    total = np.cumsum(ordered)
    return float((np.searchsorted(total, total[-1] / 2) + 1) / len(ordered))
