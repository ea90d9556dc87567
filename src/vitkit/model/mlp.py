"""The MLP of a block: its activations (a table), the paper's, and one with a norm inside or without biases.

Shapes: B images, N tokens, D width, M mlp_width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.base import Part
from vitkit.model.config import ViTConfig
from vitkit.model.norms import build_norm


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def swiglu(x: Tensor) -> Tensor:
    """... 2M -> ... M: the first half, through SiLU, gates the second (as in DINOv2 giant)."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # and how many values it takes for each it gives
    "gelu": (F.gelu, 1),
    "gelu-tanh": (partial(F.gelu, approximate="tanh"), 1),
    "quick-gelu": (quick_gelu, 1),
    "swiglu": (swiglu, 2),
    "relu": (F.relu, 1),
    "silu": (F.silu, 1),
}


def dropout(x: Tensor, rate: float) -> Tensor:
    """Without the cost of a call when nothing is dropped: in a small model that cost counts."""
    return F.dropout(x, rate) if rate else x


class MLP(Part):
    def __init__(self, width: int, mlp_width: int, activation: str = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.activation, inputs = ACTIVATIONS[activation]
        self.up = nn.Linear(width, inputs * mlp_width)
        self.down = nn.Linear(mlp_width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        rate = self.dropout if self.training else 0.0
        return dropout(self.down(dropout(self.activation(self.up(x)), rate)), rate)  # B N M inside, B N D outside

    def init_weights(self) -> None:
        for linear in (self.up, self.down):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.normal_(linear.bias, std=1e-6)


class VariantMLP(MLP):
    """With a norm before the last layer (EVA-02), or without biases."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config.width, config.mlp_width, config.activation, config.mlp_rate)
        self.norm = build_norm(config, config.mlp_width) if config.mlp_norm else nn.Identity()
        if not config.mlp_bias:
            self.down.register_parameter("bias", None)
            if config.block != "parallel":  # as in timm, where the first layer is part of a larger one
                self.up.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        rate = self.dropout if self.training else 0.0
        return dropout(self.down(self.norm(dropout(self.activation(self.up(x)), rate))), rate)


def build_mlp(config: ViTConfig) -> MLP:
    if config.mlp_norm or not config.mlp_bias:
        return VariantMLP(config)
    return MLP(config.width, config.mlp_width, config.activation, config.mlp_rate)
