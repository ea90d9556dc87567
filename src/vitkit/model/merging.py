"""Fewer tokens from block to block: a table. A new method is a class, a row here and its word in `merge_plan.py`.

Token merging (ToMe, Bolya et al. 2023): between attention and MLP the most alike patches become one token.
Patches are dealt into two hands, every second one to each. Each patch of the first hand points at its most
alike patch of the second, by the cosine of their attention keys; the pairs that are most alike, so many per
block, become one token: the mean over all patches it stands for. From then on a token that stands for n
patches counts n times in attention (log n is added to its scores). Tokens before the patches never merge.

PiToMe (Tran et al. 2024) first asks how crowded it is around each patch, and merges among the most crowded alone.
Pruning drops the patches that the class token looks at least (as in EViT, Liang et al. 2022).

Only `topk`, `sort`, `gather`, `scatter` and matrix products are used: operations that every exported format has.

Shapes: B images, T tokens now, T0 tokens before any merging, P prefix tokens, H heads, K channels per head, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.model.attention import Attention, OnWeights


class Merging:
    """What one pass through the encoder has merged so far. A new one for every batch.

    In each block some patches stay, and each that goes has one that stands for it; methods differ in whom they choose.
    """

    needs_class_token = False

    def __init__(self, per_block: int | Sequence[int], prefix: int) -> None:
        """`per_block` is for all blocks, or one number for each."""
        self.per_block, self.prefix, self.block = per_block, prefix, 0
        self.sizes: Tensor | None = None  # B T 1: how many patches each token stands for; None: one each
        self._keys: list[Tensor] = []  # of the block at work, B H T K
        self._queries: list[Tensor] = []
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def most(self, patches: int) -> int:
        """How many may go."""
        return patches // 2

    def choose(self, metric: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of unit keys B N K: who stays, B N-r; who goes, B r; to which of those who stay, by its new number, B r."""
        raise NotImplementedError

    def next_count(self, most: int) -> int:
        """How many vanish in the block at work; the next call is about the next one."""
        counts = self.per_block
        count = counts if isinstance(counts, int) else counts[self.block]
        self.block += 1
        return min(count, most)

    def _look(self, queries: Tensor, keys: Tensor) -> None:
        self._queries, self._keys = [queries], [keys]

    def attend(self, attention: Attention, x: Tensor, on_weights: OnWeights, queries: int | None) -> Tensor:
        """Attention among merged tokens B T D; the weights shown are of all tokens: one that stands for n, n times."""
        if on_weights is None:
            bias = None if self.sizes is None else self.sizes.log().transpose(1, 2)[:, None]  # B 1 1 T
            return attention(x, bias, queries=queries, on_keys=self._look)
        y = attention(self.spread(x), on_weights=on_weights, queries=queries, on_keys=self._look)
        self._keys = [self.gather(k.mean(dim=1), x)[:, None] for k in self._keys]
        return self.gather(y, x)

    def merge(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Tokens B T D -> B (T - r) D, where r is as planned or what is possible; `keys` B H T K, else the last."""
        keys = self._keys[0] if keys is None else keys
        metric = keys[:, :, self.prefix :].mean(dim=1)  # B N K
        metric = metric / metric.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        r = self.next_count(self.most(metric.shape[1]))
        if r <= 0:
            return x
        step = self.choose(metric, r)
        self._steps.append(step)
        return self.joined(x, step)

    def joined(self, x: Tensor, step: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The mean over all patches that a token stands for."""
        stays, gone = self.stays(x, step), step[1] + self.prefix
        numbers = torch.arange(-self.prefix, step[0].shape[1], device=x.device)
        arrives = (numbers[:, None] == step[2][:, None]).to(x.dtype)  # B T-r r: a one where a token goes
        sizes = torch.ones_like(x[:, :, :1]) if self.sizes is None else self.sizes
        weighed = x if self.sizes is None else x * sizes
        sums, self.sizes = (take(all_of, stays) + arrives @ take(all_of, gone) for all_of in (weighed, sizes))
        return sums / self.sizes

    def stays(self, x: Tensor, step: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """B T-r: the numbers of the tokens of `x` that stay, the prefix first."""
        prefix = torch.arange(self.prefix, device=x.device).expand(x.shape[0], -1)
        return torch.cat([prefix, step[0] + self.prefix], dim=1)

    def where(self, x: Tensor) -> Tensor:
        """B T0: for each token that there was, the number of the one of `x` (B T D) that stands for it now."""
        tokens = x.shape[1] + sum(gone.shape[1] for _, gone, _ in self._steps)
        place = numbers = torch.arange(tokens, device=x.device).expand(x.shape[0], -1)
        for kept, gone, goes_to in self._steps:
            after = torch.arange(kept.shape[1], device=x.device).expand_as(kept)
            new = torch.zeros_like(numbers[:, self.prefix :]).scatter(1, kept, after).scatter(1, gone, goes_to)
            renumbered = torch.cat([numbers[:, : self.prefix], self.prefix + new], dim=1)
            place = renumbered.gather(1, place)
            numbers = numbers[:, : -gone.shape[1]]
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


class ToMe(Merging):
    """Two hands; each patch of the first joins its most alike of the second, if they are among the most alike pairs."""

    def choose(self, metric: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
        first, second = metric[:, 1::2], metric[:, 0::2]
        likeness, partner = (first @ second.transpose(1, 2)).max(dim=-1)  # B N/2 each
        order = likeness.topk(likeness.shape[1], dim=-1).indices
        gone, kept = order[:, :r], order[:, r:].sort(dim=-1).values
        evens = 2 * torch.arange(second.shape[1], device=metric.device).expand(metric.shape[0], -1)
        return torch.cat([2 * kept + 1, evens], dim=1), 2 * gone + 1, partner.gather(1, gone) + kept.shape[1]


class PiToMe(Merging):
    """Merge among the patches that have the most others near them; what stands alone is protected.

    The energy of a patch is the mean of ELU(cosine - margin) to all patches, with a margin that falls from 0.9 in the
    first block towards 0 in the last. The 2r patches of highest energy are dealt into two hands; each of the first
    joins its most alike of the second.
    """

    def margin(self) -> float:
        depth = 12 if isinstance(self.per_block, int) else len(self.per_block)
        return 0.9 - 0.9 * (self.block - 1) / depth

    def choose(self, metric: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
        likeness = metric @ metric.transpose(1, 2)  # B N N
        energy = F.elu(likeness - self.margin()).mean(dim=-1)
        order = energy.topk(energy.shape[1], dim=-1).indices
        gone, partners, protected = order[:, : 2 * r : 2], order[:, 1 : 2 * r : 2], order[:, 2 * r :]
        between = take(metric, gone) @ take(metric, partners).transpose(1, 2)  # B r r
        goes_to = between.argmax(dim=-1) + protected.shape[1]
        return torch.cat([protected, partners], dim=1), gone, goes_to


class Pruning(Merging):
    """Drop the patches with the least attention of the class token, over all heads. They are not looked at any more."""

    needs_class_token = True

    def __init__(self, per_block: int | Sequence[int], prefix: int) -> None:
        super().__init__(per_block, prefix)
        self._alive: Tensor | None = None  # B T: the first numbers of the tokens that are left

    def most(self, patches: int) -> int:
        return patches - 1

    def choose(self, metric: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self._queries[0][:, :, :1], self._keys[0]  # B H 1 K, B H T K
        seen = ((q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)).softmax(dim=-1).mean(dim=1)[:, 0, self.prefix :]  # B N
        order = seen.topk(seen.shape[1], dim=-1).indices
        kept, gone = order[:, :-r].sort(dim=-1).values, order[:, -r:]
        nearest = (take(metric, gone) @ take(metric, kept).transpose(1, 2)).argmax(dim=-1)  # for `spread` alone
        return kept, gone, nearest

    def joined(self, x: Tensor, step: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        stays = self.stays(x, step)
        self._alive = (self._first(x) if self._alive is None else self._alive).gather(1, stays)
        return take(x, stays)

    def _first(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)

    def attend(self, attention: Attention, x: Tensor, on_weights: OnWeights, queries: int | None) -> Tensor:
        """The weights shown are of all tokens; on dropped ones they are 0."""
        if on_weights is None:
            return super().attend(attention, x, on_weights, queries)
        alive, whole = self._first(x) if self._alive is None else self._alive, self.spread(x)
        may = torch.zeros_like(whole[:, :, 0], dtype=torch.bool).scatter(1, alive, True)  # B T0
        y = attention(whole, may[:, None, None], on_weights=on_weights, queries=queries, on_keys=self._look)
        rows = alive[:, None, :, None]  # of queries and keys, B H T0 K
        seen = (*self._queries, *self._keys)
        self._look(*(one.gather(2, rows.expand(-1, one.shape[1], -1, one.shape[3])) for one in seen))
        return y if queries is not None else take(y, alive)


MERGINGS: dict[str, type[Merging]] = {"tome": ToMe, "pitome": PiToMe, "prune": Pruning}


def take(x: Tensor, rows: Tensor) -> Tensor:
    """B T C and B r -> B r C."""
    return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[2]))
