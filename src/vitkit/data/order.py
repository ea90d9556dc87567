"""Which samples, in which order, and who loads them.

The order of an epoch is a function of (seed, epoch) and the set. It is cut into global batches; each
rank takes its contiguous part of every one. Nothing else depends on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitkit.data.keys import permutation, sample_keys
from vitkit.data.source import Source
from vitkit.errors import ConfigError

_MIXED_BLOCKS = 4  # blocks of a large set (shards, row groups) that are shuffled together


@dataclass(frozen=True)
class Order:
    """Samples in the order of an epoch; `repeats` counts earlier draws of the same sample."""

    indices: np.ndarray
    repeats: np.ndarray

    def part(self, step: int, batch_size: int, rank: int, world_size: int) -> Order:
        """The part of a global batch that one rank loads."""
        low, high = step * batch_size, min((step + 1) * batch_size, len(self.indices))
        cuts = [low + (high - low) * r // world_size for r in (rank, rank + 1)]
        return Order(self.indices[cuts[0] : cuts[1]], self.repeats[cuts[0] : cuts[1]])


def epoch_order(source: Source, seed: int, epoch: int, shuffle: bool, balanced: bool = False) -> Order:
    count = len(source)
    if balanced:
        return _balanced(source, seed, epoch)
    if not shuffle:
        indices = np.arange(count)
    elif source.blocks is None:
        indices = permutation(seed, epoch, count)
    else:
        indices = _by_blocks(source.blocks, seed, epoch)
    return Order(indices, np.zeros(count, dtype=np.int64))


def _by_blocks(blocks: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Blocks in random order, a few at a time, with the samples of those few shuffled together."""
    names, block = np.unique(blocks, return_inverse=True)
    place = np.argsort(permutation(seed, epoch, len(names), "blocks"))  # when each block has its turn
    window = place[block] // _MIXED_BLOCKS
    return np.lexsort((sample_keys(seed, epoch, np.arange(len(blocks))), window))


def _balanced(source: Source, seed: int, epoch: int) -> Order:
    """As many draws as samples, the same number from every class; small classes repeat theirs."""
    if source.multi_label:
        raise ConfigError("balanced sampling needs one class per picture; with several labels use class weights")
    members = [m for m in source.members if len(m)]
    draws = np.arange(len(source))
    turn, kind = draws // len(members), draws % len(members)
    indices, repeats = np.empty_like(draws), np.empty_like(draws)
    for k, of_class in enumerate(members):
        mixed = of_class[permutation(seed, epoch, len(of_class), f"class {k}")]
        mine = kind == k
        indices[mine] = mixed[turn[mine] % len(mixed)]
        repeats[mine] = turn[mine] // len(mixed)
    shuffled = permutation(seed, epoch, len(draws), "balanced")
    return Order(indices[shuffled], repeats[shuffled])
