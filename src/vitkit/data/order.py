"""Which samples, in which order: a function of (seed, epoch) and the set, cut into global batches.

Each rank takes its contiguous part of every batch, so that a batch does not depend on the number of ranks. Sets in
shards are walked in lanes, one for each place in a batch: then a rank's part of all batches is in shards of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from vitkit.data.keys import permutation, sample_keys
from vitkit.data.source import Runs, Source
from vitkit.errors import ConfigError

_MIXED_BLOCKS = 4  # row groups of a large set that are shuffled together
_WINDOW = 1024  # neighbours in a shard that are shuffled together


class EpochOrder(ABC):
    @abstractmethod
    def part(self, step: int, batch_size: int, rank: int, world_size: int) -> Order:
        """The part of a global batch that one rank loads."""


@dataclass(frozen=True)
class Order(EpochOrder):
    """Samples in the order in which they are used."""

    indices: np.ndarray
    repeats: np.ndarray  # earlier draws of the same sample

    def part(self, step: int, batch_size: int, rank: int, world_size: int) -> Order:
        own = _own_part(len(self.indices), step, batch_size, rank, world_size)
        return Order(self.indices[own], self.repeats[own])


@dataclass(frozen=True)
class InOrder(EpochOrder):
    """As they are numbered."""

    count: int

    def part(self, step: int, batch_size: int, rank: int, world_size: int) -> Order:
        own = _own_part(self.count, step, batch_size, rank, world_size)
        return _once(np.arange(own.start, own.stop))


def _own_part(count: int, step: int, batch_size: int, rank: int, world_size: int) -> slice:
    low, high = step * batch_size, min((step + 1) * batch_size, count)
    return slice(*(low + (high - low) * r // world_size for r in (rank, rank + 1)))


def stratified_order(groups: np.ndarray, seed: int = 0) -> np.ndarray:
    """Every sample once, in an order whose every beginning has each group with the share it has of all."""
    mixed = permutation(seed, 0, len(groups), "part")
    order = mixed[np.argsort(groups[mixed], kind="stable")]  # group after group, each in random order
    _, starts, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    rank = np.arange(len(groups)) - np.repeat(starts, sizes)
    return order[np.argsort((rank + 0.5) / np.repeat(sizes, sizes), kind="stable")]


def stratified_part(source: Source, count: int, seed: int = 0) -> Source:
    """So many samples of a source, always the same ones, with every class at its share; 0: all."""
    if not 0 < count < len(source):
        return source
    return source.take(np.sort(stratified_order(source.groups, seed)[:count]))


def _once(indices: np.ndarray) -> Order:
    return Order(indices, np.zeros(len(indices), dtype=np.int64))


class Lanes(EpochOrder):
    """The shards of a set in random order, one after another, are a line; place p of every batch walks its own lane.

    Of N samples and batches of B, lane p goes from N p // B to N (p + 1) // B, and batch s is what stands at step s of
    every lane. Rank r of W has the lanes r B / W to (r + 1) B / W: together the stretch of the line from N r / W to
    N (r + 1) / W, whatever B is. So a batch is the same for every W, and a shard is read by one rank, but for those (at
    most W - 1) that lie across the border of two. In a shard, windows of neighbours are shuffled.
    """

    def __init__(self, runs: Runs, seed: int, epoch: int) -> None:
        turn = permutation(seed, epoch, len(runs.starts), "blocks")
        self.seed, self.epoch, self.sorted = seed, epoch, runs.sorted
        self.starts, sizes = runs.starts[turn], runs.sizes[turn]
        self.ends = np.cumsum(sizes)
        self.firsts = self.ends - sizes
        self._windows: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def part(self, step: int, batch_size: int, rank: int, world_size: int) -> Order:
        lanes = np.arange(batch_size * rank // world_size, batch_size * (rank + 1) // world_size)
        places = lanes * int(self.ends[-1]) // batch_size + step
        blocks = np.searchsorted(self.ends, places, side="right")
        windows, within = np.divmod(places - self.firsts[blocks], _WINDOW)
        while len(self._windows) > 2 * len(lanes):  # each lane is in one; the oldest are done with
            self._windows.popitem(last=False)
        found = zip(blocks.tolist(), windows.tolist(), within.tolist(), strict=True)
        return _once(np.array([self._window(b, w)[i] for b, w, i in found], dtype=np.int64))

    def _window(self, block: int, number: int) -> np.ndarray:
        """The samples of a window, shuffled."""
        key = (block, number)
        if key not in self._windows:
            first = int(self.starts[block]) + number * _WINDOW
            end = int(self.starts[block]) + int(self.ends[block] - self.firsts[block])
            samples = np.arange(first, min(first + _WINDOW, end))
            samples = samples if self.sorted is None else self.sorted[samples]
            self._windows[key] = samples[np.argsort(sample_keys(self.seed, self.epoch, samples), kind="stable")]
        return self._windows[key]


def order_version(source: Source, balanced: bool = False) -> int:
    """Another one once the same (seed, epoch) gives another order. Shards were read in blocks, four at a time, in 1."""
    return 2 if source.runs is not None and not balanced else 1


def epoch_order(source: Source, seed: int, epoch: int, shuffle: bool, balanced: bool = False) -> EpochOrder:
    if balanced:
        return _balanced(source, seed, epoch)
    if not shuffle:
        return InOrder(len(source))
    if source.blocks is not None:
        return _by_blocks(source.blocks, seed, epoch)
    return _once(permutation(seed, epoch, len(source))) if source.runs is None else Lanes(source.runs, seed, epoch)


def _by_blocks(blocks: np.ndarray, seed: int, epoch: int) -> Order:
    """Blocks in random order, a few at a time, their samples shuffled together."""
    names, block = np.unique(blocks, return_inverse=True)
    turn = np.argsort(permutation(seed, epoch, len(names), "blocks"))  # when each block has its turn
    keys = sample_keys(seed, epoch, np.arange(len(blocks)))
    return _once(np.lexsort((keys, turn[block] // _MIXED_BLOCKS)))


def _balanced(source: Source, seed: int, epoch: int) -> Order:
    """As many draws as samples, the same number from every class; small classes repeat theirs."""
    if source.label_kind != "classes":
        raise ConfigError("balanced sampling needs one class per image; with several labels use class weights")
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
