"""The Transformer encoder: MLP, pre-norm block, stack of blocks.

Shapes: B images, N tokens, D width, M mlp_width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitkit.errors import InputError
from vitkit.model.attention import Attention, OnWeights
from vitkit.model.config import Activation, Size, ViTConfig
from vitkit.model.merging import Merging
from vitkit.model.positions import RelativeBias, Rotary


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """... 2M -> ... M: the first half, through SiLU, gates the second (as in DINOv2 giant)."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": gelu_tanh,
    "quick-gelu": quick_gelu,
    "swiglu": swiglu,
}


def dropout(x: Tensor, rate: float) -> Tensor:
    """Without the cost of a call when nothing is dropped: in a small model that cost counts."""
    return F.dropout(x, rate) if rate else x


class MLP(nn.Module):
    def __init__(self, width: int, mlp_width: int, activation: Activation = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * mlp_width if activation == "swiglu" else mlp_width)
        self.activation = ACTIVATIONS[activation]
        self.down = nn.Linear(mlp_width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        rate = self.dropout if self.training else 0.0
        return dropout(self.down(dropout(self.activation(self.up(x)), rate)), rate)  # B N M inside, B N D outside

    def init_weights(self) -> None:
        for linear in (self.up, self.down):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)


def drop_path(x: Tensor, rate: float) -> Tensor:
    """Stochastic depth: leave a branch out for whole images, and scale the rest to keep the mean."""
    kept = torch.rand((x.shape[0], 1, 1), device=x.device) >= rate
    return x * kept.to(x.dtype) / (1 - rate)


class Block(nn.Module):
    """x + MHSA(LN(x)), then x + MLP(LN(x)); each branch optionally scaled (LayerScale) and dropped."""

    def __init__(self, config: ViTConfig, drop_path_rate: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, config.norm_eps)
        self.attention = Attention(config.width, config.heads, config.attention_dropout, config.qkv_bias)
        self.relative = RelativeBias(config) if config.positions == "relative" else None
        self.norm2 = nn.LayerNorm(config.width, config.norm_eps)
        self.mlp = MLP(config.width, config.mlp_width, config.activation, config.dropout)
        self.dropout, self.drop_path_rate = config.dropout, drop_path_rate
        self.layer_scale = config.layer_scale or 0.0
        self.scale1 = self.scale2 = None
        if config.layer_scale is not None:
            self.scale1 = nn.Parameter(torch.empty(config.width))
            self.scale2 = nn.Parameter(torch.empty(config.width))

    def forward(
        self,
        x: Tensor,
        grid: Size,
        rotate: Callable[[Tensor], Tensor] | None = None,
        on_weights: OnWeights | None = None,
        only: int | None = None,
        merging: Merging | None = None,
    ) -> Tensor:
        """B N D -> B N D, or B only D: the states of the first `only` tokens alone, at a fraction of the cost.

        With `merging` fewer tokens come out than went in.
        """
        keys: list[Tensor] = []
        if merging is None:
            bias = None if self.relative is None else self.relative(grid)  # H N N
            y = self.attention(self.norm1(x), bias, rotate, on_weights, only)
        elif on_weights is None:
            y = self.attention(self.norm1(x), merging.bias(), None, None, only, keys.append)
        else:  # who looks sees all tokens that there were: a token that stands for n of them is there n times
            y = self.attention(merging.spread(self.norm1(x)), None, None, on_weights, only, keys.append)
            y, keys = merging.gather(y, x), [merging.gather(k.mean(dim=1), x)[:, None] for k in keys]
        y = dropout(y, self.dropout if self.training else 0.0)
        x = (x if only is None else x[:, :only]) + self._branch(y, self.scale1)
        if merging is not None and only is None:
            x = merging.merge(x, keys[0])
        return x + self._branch(self.mlp(self.norm2(x)), self.scale2)

    def _branch(self, y: Tensor, scale: Tensor | None) -> Tensor:
        y = y if scale is None else y * scale
        return drop_path(y, self.drop_path_rate) if self.training and self.drop_path_rate else y


class Encoder(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.rotary = Rotary(config) if config.positions == "rope-2d" else None
        rates = [config.stochastic_depth * i / max(1, config.depth - 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        self.gradient_checkpointing = False
        self.prefix = config.prefix_tokens
        self.merge = 0  # patches that vanish in each block, in evaluation

    def forward(
        self,
        x: Tensor,
        grid: Size,
        on_weights: OnWeights | None = None,
        layers: Sequence[int] | None = None,
        only: int | None = None,
    ) -> Tensor:
        """`on_weights` sees the attention of `layers` (all when None), in order of depth; the rest stay fused."""
        looked_at = self._layers(layers) if on_weights is not None else set()
        rotate = None if self.rotary is None else self.rotary(grid, x)
        merging = Merging(self.merge, self.prefix) if self.merge and not self.training else None
        for i, block in enumerate(self.blocks):
            look = on_weights if i in looked_at else None
            # The head may read only the class token: then the last block computes nothing else.
            keep = only if i == len(self.blocks) - 1 and look is None else None
            if self.gradient_checkpointing and self.training and look is None:
                x = checkpoint(block, x, grid, rotate, None, keep, use_reentrant=False)
            else:
                x = block(x, grid, rotate, look, keep, merging)
        if only is not None:
            return x[:, :only]
        return x if merging is None else merging.spread(x)

    def _layers(self, layers: Sequence[int] | None) -> set[int]:
        depth = len(self.blocks)
        for layer in layers or ():
            if not -depth <= layer < depth:
                raise InputError(
                    f"layer {layer} does not exist; the model has layers 0 to {depth - 1} (or -1 for last)"
                )
        return set(range(depth)) if layers is None else {layer % depth for layer in layers}

    def init_weights(self) -> None:
        for block in self.blocks:
            assert isinstance(block, Block)
            for projection in block.attention.qkv.weight.chunk(3):  # query, key and value are three maps
                nn.init.xavier_uniform_(projection)
            nn.init.xavier_uniform_(block.attention.out.weight)
            for linear in (block.attention.qkv, block.attention.out):
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
            block.mlp.init_weights()
            if block.relative is not None:
                block.relative.init_weights()
            if block.scale1 is not None and block.scale2 is not None:
                nn.init.constant_(block.scale1, block.layer_scale)
                nn.init.constant_(block.scale2, block.layer_scale)
