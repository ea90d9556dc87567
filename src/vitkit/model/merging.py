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


class Merging:
    """What one pass through the encoder has merged so far. Made anew for every batch."""

    def __init__(self, per_block: int, prefix: int) -> None:
        self.per_block, self.prefix = per_block, prefix
        self.sizes: Tensor | None = None  # B T 1: how many patches each token stands for; None: one each
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def bias(self) -> Tensor | None:
        """B 1 1 T to be added to the attention scores: log of the sizes."""
        return None if self.sizes is None else self.sizes.log().transpose(1, 2)[:, None]

    def merge(self, x: Tensor, keys: Tensor) -> Tensor:
        """Tokens B T D and their keys B H T K -> B (T - r) D, where r is `per_block` or what is possible."""
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
        batch = x.shape[0]
        tokens = x.shape[1] + sum(gone.shape[1] for _, gone, _ in self._steps)
        place = torch.arange(tokens, device=x.device).expand(batch, -1)
        for kept, gone, goes_to in self._steps:
            left, r = kept.shape[1], gone.shape[1]
            seconds = tokens - self.prefix - left - r
            second = torch.arange(self.prefix + left, self.prefix + left + seconds, device=x.device).expand(batch, -1)
            stays = torch.arange(self.prefix, self.prefix + left, device=x.device).expand(batch, -1)
            first = torch.zeros_like(second).scatter(1, kept, stays)  # as long as the second hand, at most one unused
            first = first.scatter(1, gone, self.prefix + left + goes_to)
            patches = torch.stack([second, first], dim=-1).flatten(1)
            ahead = torch.arange(self.prefix, device=x.device).expand(batch, -1)
            place = torch.cat([ahead, patches], dim=1).gather(1, place)
            tokens -= r
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
