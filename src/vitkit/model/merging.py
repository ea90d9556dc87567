"""Token merging (Bolya et al. 2023): between attention and MLP the most alike patches become one token.

Patches are dealt into two hands, every second one to each. Each patch of the first hand points at its most
alike patch of the second, by the cosine of their attention keys; the pairs that are most alike, so many per
block, become one token: the mean over all patches it stands for. From then on a token that stands for n
patches counts n times in attention (log n is added to its scores). Tokens before the patches never merge.

Only `topk`, `sort`, `gather` and matrix products are used: operations that every exported format has.

Shapes: B images, T tokens now, T0 tokens before any merging, P prefix tokens, H heads, K channels per head, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.model.attention import Attention, OnWeights


class Merging:
    """What one pass through the encoder has merged so far. A new one for every batch."""

    def __init__(self, per_block: int, prefix: int) -> None:
        self.per_block, self.prefix = per_block, prefix
        self.sizes: Tensor | None = None  # B T 1: how many patches each token stands for; None: one each
        self._keys: list[Tensor] = []  # of the block at work, B H T K
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, attention: Attention, x: Tensor, on_weights: OnWeights, queries: int | None) -> Tensor:
        """Attention among merged tokens B T D; the weights shown are of all tokens: one that stands for n, n times."""
        self._keys.clear()
        if on_weights is None:
            bias = None if self.sizes is None else self.sizes.log().transpose(1, 2)[:, None]  # B 1 1 T
            return attention(x, bias, queries=queries, on_keys=self._keys.append)
        y = attention(self.spread(x), on_weights=on_weights, queries=queries, on_keys=self._keys.append)
        self._keys = [self.gather(k.mean(dim=1), x)[:, None] for k in self._keys]
        return self.gather(y, x)

    def merge(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Tokens B T D -> B (T - r) D, where r is `per_block` or what is possible; `keys` B H T K, else the last."""
        keys = self._keys[0] if keys is None else keys
        metric = F.normalize(keys.mean(dim=1)[:, self.prefix :], dim=-1)  # B N K
        first, second = metric[:, 1::2], metric[:, 0::2]
        r = min(self.per_block, first.shape[1])
        if r <= 0:
            return x
        likeness, partner = (first @ second.transpose(1, 2)).max(dim=-1)  # B N/2 each
        order = likeness.topk(likeness.shape[1], dim=-1).indices
        gone, kept = order[:, :r], order[:, r:].sort(dim=-1).values
        goes_to = partner.gather(1, gone)  # B r, numbers in the second hand
        self._steps.append((kept, gone, goes_to))
        sizes = torch.ones_like(x[:, :, :1]) if self.sizes is None else self.sizes
        sums = self._join(x * sizes, kept, gone, goes_to)
        self.sizes = self._join(sizes, kept, gone, goes_to)
        return sums / self.sizes

    def _join(self, x: Tensor, kept: Tensor, gone: Tensor, goes_to: Tensor) -> Tensor:
        """B T C -> B (T - r) C: prefix, what is kept of the first hand, and the second hand with what came to it."""
        first, second = x[:, self.prefix + 1 :: 2], x[:, self.prefix :: 2]
        numbers = torch.arange(second.shape[1], device=x.device)
        arrives = (numbers[:, None] == goes_to[:, None]).to(x.dtype)  # B N/2 r: a one where a token goes
        second = second + arrives @ take(first, gone)
        return torch.cat([x[:, : self.prefix], take(first, kept), second], dim=1)

    def where(self, x: Tensor) -> Tensor:
        """B T0: for each token that there was, the number of the one of `x` (B T D) that stands for it now."""
        tokens = x.shape[1] + sum(gone.shape[1] for _, gone, _ in self._steps)
        place = numbers = torch.arange(tokens, device=x.device).expand(x.shape[0], -1)
        for kept, gone, goes_to in self._steps:
            numbers = numbers[:, : -gone.shape[1]]
            start = self.prefix + kept.shape[1]  # of the second hand
            stays, second = numbers[:, self.prefix : start], numbers[:, start:]
            first = torch.zeros_like(second).scatter(1, kept, stays)  # as long as the second hand, at most one unused
            patches = torch.stack([second, first.scatter(1, gone, start + goes_to)], dim=-1).flatten(1)
            place = torch.cat([numbers[:, : self.prefix], patches], dim=1).gather(1, place)
        return place

    def spread(self, x: Tensor) -> Tensor:
        """B T D -> B T0 D: every token that there was has the state of the one that stands for it."""
        return take(x, self.where(x)) if self._steps else x

    def gather(self, spread: Tensor, like: Tensor) -> Tensor:
        """The way back, B T0 D -> B T D, by the mean: gradients reach every token that was spread to."""
        if self.sizes is None:
            return spread
        numbers = torch.arange(like.shape[1], device=like.device)
        stands_for = (numbers[:, None] == self.where(like)[:, None]).to(spread.dtype)  # B T T0
        return stands_for @ spread / self.sizes


def take(x: Tensor, rows: Tensor) -> Tensor:
    """B T C and B r -> B r C."""
    return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[2]))
