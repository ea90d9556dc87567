"""Attention from the output token back to the picture: raw by layer and head, and rolled out over all layers.

Rollout (Abnar & Zuidema 2020; the maps of figure 6 of the paper): heads are averaged, the residual path is
added as 0.5 A + 0.5 I, rows are renormalised, and the layers are multiplied. What "output token" means for
each way of pooling is said in `vitkit.explain.inside`.

Shapes: B images, L layers, H heads, T tokens, h x w grid of patches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.explain.inside import as_vit, batches, grid_of, probe_attention, readout, to_grid


@dataclass(frozen=True)
class OutputAttention:
    raw: np.ndarray  # B L H h w: attention of the output token, by layer and head
    rollout: np.ndarray  # B h w
    probe: np.ndarray | None  # B H h w: where a MAP head looks, None for other pooling


def with_residual(weights: Tensor) -> Tensor:
    """B H T T -> B T T: mean of the heads, half attention and half identity, rows sum to 1."""
    mean = weights.mean(dim=1)
    mixed = 0.5 * mean + 0.5 * torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    return mixed / mixed.sum(dim=-1, keepdim=True)


def rollout(layers: Iterable[Tensor]) -> Tensor:
    """Attention of each layer (B H T T), first layer first -> B T T: how much of each input token is in each output."""
    total: Tensor | None = None
    for weights in layers:
        step = with_residual(weights)
        total = step if total is None else step @ total
    if total is None:
        raise ValueError("rollout needs the attention of at least one layer")
    return total


@torch.no_grad()
def output_attention(model: nn.Module, images: Tensor) -> OutputAttention:
    """Raw attention of the output token in every layer and head, and its rollout, batch by batch."""
    vit = as_vit(model)
    prefix, grid = vit.config.prefix_tokens, grid_of(vit.config, images)
    raws, rolled, probes = [], [], []
    for batch in batches(vit, images):
        share = readout(vit, batch)  # B T
        raw: list[Tensor] = []
        steps: list[Tensor] = []

        def look(weights: Tensor, share: Tensor = share, raw: list[Tensor] = raw, steps: list[Tensor] = steps) -> None:
            raw.append(torch.einsum("bq,bhqk->bhk", share.to(weights), weights).cpu())
            steps.append(with_residual(weights))

        tokens = vit.tokens(batch, on_weights=look)
        row = share[:, None]  # B 1 T; from the last layer to the first only this row is needed
        for step in reversed(steps):
            row = row @ step
        raws.append(to_grid(torch.stack(raw, dim=1), prefix, grid))  # B L H h w
        rolled.append(to_grid(row[:, 0].cpu(), prefix, grid))
        if vit.head.pool is not None:
            probes.append(to_grid(probe_attention(vit.head.pool, tokens).cpu(), prefix, grid))
    probe = torch.cat(probes).numpy() if probes else None
    return OutputAttention(torch.cat(raws).numpy(), torch.cat(rolled).numpy(), probe)


if __name__ == "__main__":
    from vitkit.explain.command import main

    main("attention")
