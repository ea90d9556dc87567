"""Multi-head self-attention (Dosovitskiy et al. 2021, appendix A).

Two paths, one result. PyTorch's fused kernel never forms the attention matrix; the plain path forms it and
hands it to `on_weights` when somebody wants to look. `tests/model/test_attention.py` holds the two equal;
`benchmarks/attention.py` finds the fused one as fast or faster from 17 tokens up.

Shapes: B images, N tokens, D width, H heads, K = D / H channels per head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.model.base import Part
from vitkit.model.positions import Rotate

OnWeights = Callable[[Tensor], None] | None  # receives B H N N, rows sum to 1
OnKeys = Callable[[Tensor, Tensor], None] | None  # receives queries and keys, each B H N K


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(K) + mask). A row that may attend to nothing is all zero."""
    scores: Tensor = (q * q.shape[-1] ** -0.5) @ k.mT  # B H N N; q is scaled first so that fp16 does not overflow
    if mask is None:
        return scores.softmax(dim=-1)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(dim=-1).masked_fill(nothing, 0.0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, on_weights: OnWeights = None
) -> Tensor:
    """softmax(q k^T / sqrt(K) + mask) v; the matrix is formed only when `on_weights` wants it.

    On a CPU the fused kernel's gradient in bf16 takes far longer than in fp32, and is less exact.
    """
    if on_weights is None:
        if q.dtype == torch.bfloat16 and q.device.type == "cpu" and torch.is_grad_enabled() and q.requires_grad:
            with torch.autocast("cpu", enabled=False):
                return attend(q.float(), k.float(), v.float(), mask, dropout).to(q.dtype)
        if mask is not None:  # the kernel wants rows and columns, and additive masks of q's precision
            mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
            mask = mask if mask.ndim > 1 else mask.reshape(1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)  # B H N K
    weights = attention_weights(q, k, mask)
    on_weights(weights)  # still in the graph: gradients with respect to it work
    return F.dropout(weights, dropout) @ v  # B H N K


class Attention(Part):
    def __init__(self, width: int, heads: int, dropout: float = 0.0, qkv_bias: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"heads={heads} must divide width={width}; ViT uses width / 64 heads")
        self.heads = heads
        self.dropout = dropout  # on the attention weights; the ViT paper uses 0
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)  # rows: (3, heads, K), as in nn.MultiheadAttention
        self.out = nn.Linear(width, width)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotate: Rotate = None,
        on_weights: OnWeights = None,
        queries: int | None = None,
        on_keys: OnKeys = None,
    ) -> Tensor:
        """`mask` broadcasts to B H N N: boolean (True = may attend) or additive. `rotate` turns q and k (RoPE).

        `queries` computes the output of the first so many tokens alone; all tokens are still attended to.
        """
        q, k, v = self.split(x)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        if on_keys is not None:
            on_keys(q, k)
        if queries is not None:
            q = q[:, :, :queries]
            if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
                mask = mask[..., :queries, :]
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0, on_weights)  # B H N K
        return self.join(y.transpose(1, 2).flatten(2))  # B N D

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """B N D -> queries, keys and values, each B H N K."""
        qkv: Tensor = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # B N 3 H K
        return qkv.permute(2, 0, 3, 1, 4).unbind()

    def join(self, y: Tensor) -> Tensor:
        """The outputs of all heads side by side, B N HK -> B N D."""
        out: Tensor = self.out(y)
        return out

    def init_weights(self) -> None:
        for weight in (*self.qkv.weight.chunk(3), self.out.weight):  # query, key and value are three maps
            nn.init.xavier_uniform_(weight)
        for bias in (self.qkv.bias, self.out.bias):
            if bias is not None:
                nn.init.zeros_(bias)
