"""Ways into a model that all figures share: attention of chosen layers, states, and who is read out.

Which token is the "output token"? With a class token it is that one; with mean pooling every patch
has an equal say; a MAP head asks with a probe of its own. `readout` writes all of them as one
distribution over the tokens, so that no figure needs to know how a model pools.

Shapes: B images, H heads, L layers, P prefix tokens, N patches on a grid (h, w), T = P + N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.model.config import Size, ViTConfig
from vitkit.model.head import MapPool
from vitkit.model.vit import ViT

WEIGHTS_BUDGET = 256 * 2**20  # bytes of one layer's attention weights in one batch


def as_vit(model: nn.Module) -> ViT:
    if isinstance(model, ViT):
        return model
    raise InputError(
        f"explain looks at attention, and {type(model).__name__} has none; give it a Vision Transformer "
        f"(`vitkit zoo` lists them)"
    )


def grid_of(config: ViTConfig, images: Tensor) -> Size:
    """Patches (down, across) of these images."""
    return images.shape[-2] // config.patch_size[0], images.shape[-1] // config.patch_size[1]


def batch_size(config: ViTConfig, images: Tensor, most: int = 32) -> int:
    """Images per batch, so that one layer's attention weights stay within the budget."""
    h, w = grid_of(config, images)
    per_image = config.heads * (config.prefix_tokens + h * w) ** 2 * 4
    return max(1, min(most, WEIGHTS_BUDGET // per_image))


def batches(model: ViT, images: Tensor, most: int = 32) -> Iterator[Tensor]:
    """The images, some at a time, where the model is."""
    device = next(model.parameters()).device
    for part in images.split(batch_size(model.config, images, most)):
        yield part.to(device)


@torch.no_grad()
def probabilities(model: ViT, images: Tensor, most: int = 32) -> Tensor:
    """B C H W -> B classes, batch by batch."""
    return torch.cat([model(part).float().softmax(-1).cpu() for part in batches(model, images, most)])


@torch.no_grad()
def attention_weights(model: nn.Module, images: Tensor, layers: Sequence[int] | None = None) -> list[Tensor]:
    """The attention (B H T T) of the layers asked for (all when None), in order of depth.

    All of it is kept: for statistics over many images use the functions that stream.
    """
    kept: list[Tensor] = []
    as_vit(model).tokens(images, on_weights=lambda weights: kept.append(weights.detach()), layers=layers)
    return kept


def without_prefix(weights: Tensor, prefix: int) -> Tensor:
    """... T T -> ... N N: class, distillation and register tokens left out, the rest renormalised to sum to 1."""
    patches = weights[..., prefix:, prefix:]
    return patches / patches.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(patches.dtype).tiny)


@torch.no_grad()
def readout(model: ViT, images: Tensor) -> Tensor:
    """B T: how much each token counts in what the classifier sees. Rows sum to 1."""
    config = model.config
    h, w = grid_of(config, images)
    share = torch.zeros(len(images), config.prefix_tokens + h * w, device=images.device)
    if model.head.pool is not None:
        return probe_attention(model.head.pool, model.tokens(images)).mean(dim=1)
    if config.pooling in ("mean", "cls+mean"):
        share[:, config.prefix_tokens :] = 1 / (h * w)
    if config.pooling in ("cls", "cls+mean"):
        readers = 1 + int(config.distillation_token)
        share[:, :readers] = 1 / readers
    return share / share.sum(dim=-1, keepdim=True)


def probe_attention(pool: MapPool, tokens: Tensor) -> Tensor:
    """B H T: where the probe of a MAP head looks."""
    kept: list[Tensor] = []
    pool(tokens, on_weights=kept.append)
    return kept[0][:, :, 0]


def block_states(model: ViT, images: Tensor) -> Iterator[Tensor]:
    """B T D before the first block, then after each block; one at a time, so that few are kept."""
    x, grid = model.embed(images)
    rotate = None if model.encoder.rotary is None else model.encoder.rotary(grid, x)
    yield x
    for block in model.encoder.blocks:
        x = block(x, grid, rotate)
        yield x


def to_grid(values: Tensor, prefix: int, grid: Size) -> Tensor:
    """... T -> ... h w: the patches' values in their places."""
    return values[..., prefix:].unflatten(-1, grid)
