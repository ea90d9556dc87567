"""Multi-head self-attention (Dosovitskiy et al. 2021, appendix A).

Two paths, one result. The fused kernel never forms the attention matrix; the plain path forms it,
and hands it to `on_weights` when somebody wants to look. Without a looker the fused kernel is used, unless
`PLAIN_UP_TO` names a device where the plain path is faster. `tests/model/test_attention.py` holds the two paths equal.

Shapes: B images, N tokens, D width, H heads, K = D / H channels per head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError

OnWeights = Callable[[Tensor], None]  # receives B H N N, rows sum to 1
OnKeys = Callable[[Tensor], None]  # receives B H N K

# Up to how many tokens the plain path is used, when gradients are wanted and when they are not: chosen from
# the table that benchmarks/attention.py prints. With torch 2.13 on an AVX2 CPU the fused kernel is level
# with the plain path or ahead of it from 17 tokens up, and holds less memory: nothing is left to the plain one.
PLAIN_UP_TO = {"cpu": {True: 0, False: 0}}


def prefer_fused(device: str, tokens: int, gradients: bool) -> bool:
    """Which path is faster here."""
    return tokens > PLAIN_UP_TO.get(device, {}).get(gradients, 0)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """True = may be attended to -> 0, False -> -inf; an additive mask stays as it is."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    return mask.to(dtype)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(K) + mask). A row that may attend to nothing is all zero."""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT  # B H N N; q is scaled first so that fp16 does not overflow
    if mask is None:
        return scores.softmax(dim=-1)
    scores = scores + additive(mask, scores.dtype)
    nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(dim=-1).masked_fill(nothing, 0.0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    on_weights: OnWeights | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(K) + mask) v, by the path that is wanted or else the faster one."""
    gradients = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if on_weights is None and prefer_fused(q.device.type, k.shape[-2], gradients):
        if mask is not None:  # the kernel wants rows and columns, and additive masks of q's precision
            mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
            mask = mask if mask.ndim > 1 else mask.reshape(1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)  # B H N K
    weights = attention_weights(q, k, mask)
    if on_weights is not None:
        on_weights(weights)  # still in the graph: gradients with respect to it work
    return F.dropout(weights, dropout) @ v  # B H N K


class Attention(nn.Module):
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
        rotate: Callable[[Tensor], Tensor] | None = None,
        on_weights: OnWeights | None = None,
        queries: int | None = None,
        on_keys: OnKeys | None = None,
    ) -> Tensor:
        """`mask` broadcasts to B H N N: boolean (True = may attend) or additive. `rotate` turns q and k (RoPE).

        `queries` computes the output of the first so many tokens alone; all tokens are still attended to.
        """
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # B N 3 H K
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each B H N K
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        if on_keys is not None:
            on_keys(k)
        if queries is not None:
            q = q[:, :, :queries]
            if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
                mask = mask[..., :queries, :]
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0, on_weights)  # B H N K
        return self.out(y.transpose(1, 2).flatten(2))  # B N D

    def to_torch(self) -> nn.MultiheadAttention:
        """The same attention as PyTorch's own module. Note its boolean masks mean the opposite: True = hidden."""
        width = self.out.in_features
        theirs = nn.MultiheadAttention(width, self.heads, self.dropout, batch_first=True)
        theirs = theirs.to(self.qkv.weight).train(self.training)
        with torch.no_grad():
            theirs.in_proj_weight.copy_(self.qkv.weight)
            theirs.in_proj_bias.copy_(self.qkv.bias if self.qkv.bias is not None else torch.zeros(3 * width))
            theirs.out_proj.load_state_dict(self.out.state_dict())
        return theirs

    @classmethod
    def from_torch(cls, theirs: nn.MultiheadAttention) -> Attention:
        """Read PyTorch's own module. Its `batch_first` only says how it is called and does not matter here."""
        if theirs.in_proj_weight is None or theirs.bias_k is not None or theirs.add_zero_attn:
            raise ConfigError(
                "only self-attention converts: nn.MultiheadAttention without kdim, vdim, add_bias_kv and add_zero_attn"
            )
        ours = cls(theirs.embed_dim, theirs.num_heads, theirs.dropout, qkv_bias=theirs.in_proj_bias is not None)
        ours = ours.to(theirs.in_proj_weight).train(theirs.training)
        with torch.no_grad():
            ours.qkv.weight.copy_(theirs.in_proj_weight)
            if theirs.in_proj_bias is not None:
                ours.qkv.bias.copy_(theirs.in_proj_bias)
            ours.out.weight.copy_(theirs.out_proj.weight)
            ours.out.bias.copy_(theirs.out_proj.bias if theirs.out_proj.bias is not None else torch.zeros(()))
        return ours
