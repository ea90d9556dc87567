"""The Transformer encoder: pre-norm block, stack of blocks.

Shapes: B images, N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitkit.model.attention import OnWeights
from vitkit.model.attention_variants import build_attention
from vitkit.model.base import Part
from vitkit.model.config import ViTConfig
from vitkit.model.merge_plan import MergePlan
from vitkit.model.merging import MERGINGS, Merging
from vitkit.model.mlp import build_mlp, dropout
from vitkit.model.norms import build_norm
from vitkit.model.positions import POSITIONS, Place


def drop_path(x: Tensor, rate: float) -> Tensor:
    """Stochastic depth: leave a branch out for whole images, and scale the rest to keep the mean."""
    kept = torch.rand((x.shape[0], 1, 1), device=x.device) >= rate
    return x * kept.to(x.dtype) / (1 - rate)


class Block(Part):
    """x + MHSA(LN(x)), then x + MLP(LN(x)); each branch optionally scaled (LayerScale) and dropped."""

    def __init__(self, config: ViTConfig, drop_path_rate: float = 0.0) -> None:
        super().__init__()
        self.norm1 = build_norm(config)
        self.attention = build_attention(config)
        self.relative = POSITIONS[config.positions].in_block(config)  # some positions are a bias on the scores
        self.norm2 = build_norm(config)
        self.mlp = build_mlp(config)
        self.dropout, self.drop_path_rate = config.dropout, drop_path_rate
        start = None if config.layer_scale is None else torch.full((config.width,), config.layer_scale)
        self.scale1, self.scale2 = (None if start is None else nn.Parameter(start.clone()) for _ in range(2))

    def forward(
        self,
        x: Tensor,
        place: Place,
        on_weights: OnWeights = None,
        only: int | None = None,
        merging: Merging | None = None,
    ) -> Tensor:
        """B N D -> B N D, or B only D: the states of the first `only` tokens alone, at a fraction of the cost.

        With `merging` fewer tokens come out than went in.
        """
        x = (x if only is None else x[:, :only]) + self.mix(x, place, on_weights, only, merging)
        if merging is not None and only is None:
            x = merging.merge(x)
        return x + self.process(x)

    def mix(self, x: Tensor, place: Place, on_weights: OnWeights, only: int | None, merging: Merging | None) -> Tensor:
        return self.branch(self.attend(self.norm1(x), place, on_weights, only, merging), self.scale1)

    def attend(
        self, x: Tensor, place: Place, on_weights: OnWeights, only: int | None, merging: Merging | None
    ) -> Tensor:
        if merging is None:
            bias = place.bias if self.relative is None else self.relative(place.grid)  # H N N
            y = self.attention(x, bias, place.rotate, on_weights, only)
        else:
            y = merging.attend(self.attention, x, on_weights, only)
        return dropout(y, self.dropout if self.training else 0.0)

    def process(self, x: Tensor) -> Tensor:
        return self.branch(self.mlp(self.norm2(x)), self.scale2)

    def branch(self, y: Tensor, scale: Tensor | None) -> Tensor:
        y = y if scale is None else y * scale
        return drop_path(y, self.drop_path_rate) if self.training and self.drop_path_rate else y

    def init_weights(self) -> None:
        for part in filter(None, (self.attention, self.mlp, self.relative)):
            part.init_weights()


class Encoder(Part):
    def __init__(self, config: ViTConfig, kind: type[Block]) -> None:
        super().__init__()
        rates = [config.stochastic_depth * i / max(1, config.depth - 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(kind(config, rate) for rate in rates)
        self.prefix = config.prefix_tokens

    def forward(
        self,
        x: Tensor,
        place: Place,
        on_weights: OnWeights = None,
        looked_at: Collection[int] = (),
        only: int | None = None,
        kept: dict[int, Tensor] | None = None,
        merge: MergePlan | None = None,
        recompute: bool = False,
        start: int = 0,
    ) -> Tensor:
        """`on_weights` sees the attention of the blocks `looked_at`, in order of depth; the rest stay fused.

        `kept` has the numbers of blocks, and receives the tokens after them; deeper blocks do not run.
        As `merge` says, patches vanish in each block; with `recompute` it runs again in the backward pass.
        `x` is what block number `start` sees: those before it do not run.
        """
        merging = MERGINGS[merge.method](merge.counts(len(self.blocks)), self.prefix) if merge else None
        for i, block in enumerate(self.blocks):
            if i < start:
                continue
            if kept is not None and i > max(kept):
                break
            look = on_weights if i in looked_at else None
            # The head may read only the class token: then the last block computes nothing else.
            keep = only if i == len(self.blocks) - 1 and look is None else None
            if recompute and look is None:
                x = checkpoint(block, x, place.at(i), None, keep, use_reentrant=False)
            else:
                x = block(x, place.at(i), look, keep, merging)
            if kept is not None and i in kept:
                kept[i] = x if merging is None else merging.spread(x)
        if only is not None:
            return x[:, :only]
        return x if merging is None else merging.spread(x)

    def init_weights(self) -> None:
        for block in self.blocks:
            assert isinstance(block, Block)
            block.init_weights()
