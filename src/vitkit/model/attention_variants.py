"""Attention as published variants have it. The plain one stays in `attention.py`; a model is built with either.

Shapes: B images, N tokens, D width, H heads, K channels per head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitkit.model.attention import Attention
from vitkit.model.base import Part
from vitkit.model.config import ViTConfig
from vitkit.model.norms import build_norm


class VariantAttention(Attention):
    """Heads of any width, norms of queries, keys and outputs, biases left out, another scale, no output projection."""

    def __init__(self, config: ViTConfig) -> None:
        Part.__init__(self)
        wide, self.heads, self.dropout = config.attention_width, config.heads, config.attention_dropout
        # `attend` divides by sqrt(K); the rest is done here
        self.rescale = math.sqrt(wide / config.heads / config.width) if config.score_scale == "width" else 1.0
        self.qkv = nn.Linear(config.width, 3 * wide, bias=config.qkv_bias and config.key_bias)
        apart = config.qkv_bias and not config.key_bias
        self.query_bias, self.value_bias = (nn.Parameter(torch.empty(wide)) if apart else None for _ in range(2))
        self.query_norm, self.key_norm = (
            build_norm(config, wide // config.heads) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.norm = build_norm(config, wide) if config.attention_norm else nn.Identity()
        self.out = nn.Linear(wide, config.width, config.out_bias) if config.attention_out else nn.Identity()  # type: ignore[assignment]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        qkv = self.qkv(x)  # B N 3HK
        if self.query_bias is not None and self.value_bias is not None:
            qkv = qkv + torch.cat([self.query_bias, torch.zeros_like(self.query_bias), self.value_bias])
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each B H N K
        q, k = self.query_norm(q).to(v.dtype), self.key_norm(k).to(v.dtype)  # autocast norms in fp32
        return q if self.rescale == 1.0 else q * self.rescale, k, v

    def join(self, y: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(y))
        return out

    def init_weights(self) -> None:
        maps = [self.out] if isinstance(self.out, nn.Linear) else []
        for weight in (*self.qkv.weight.chunk(3), *(linear.weight for linear in maps)):
            nn.init.xavier_uniform_(weight)
        for bias in (self.qkv.bias, self.query_bias, self.value_bias, *(linear.bias for linear in maps)):
            if bias is not None:
                nn.init.zeros_(bias)


def build_attention(config: ViTConfig) -> Attention:
    whole = config.key_bias and config.out_bias and config.attention_out and config.attention_width == config.width
    normed = config.qk_norm or config.attention_norm
    if whole and not normed and config.score_scale == "head":
        return Attention(config.width, config.heads, config.attention_dropout, config.qkv_bias)
    return VariantAttention(config)
