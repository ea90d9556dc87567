"""Randomness that belongs to a sample, not to a process.

Every random choice is a function of (seed, epoch, sample index, purpose): workers, ranks and interruptions cannot
change it. The function is SplitMix64, for whole batches; its results depend on the version of no library.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def scramble(values: Keys) -> Keys:
    """SplitMix64's finaliser: neighbouring numbers become unrelated ones."""
    with np.errstate(over="ignore"):
        z = values + _STEP
        z = (z ^ (z >> np.uint64(30))) * _FIRST
        z = (z ^ (z >> np.uint64(27))) * _SECOND
        mixed: Keys = z ^ (z >> np.uint64(31))
    return mixed


def _as_words(values: int | Sequence[int] | np.ndarray) -> Keys:
    return np.atleast_1d(np.asarray(values, dtype=np.int64)).astype(np.uint64)


def sample_keys(seed: int, epoch: int, indices: Sequence[int] | np.ndarray, repeats: np.ndarray | None = None) -> Keys:
    """One 64-bit key per sample. `repeats` tells apart the same sample drawn twice in one epoch."""
    keys = scramble(scramble(_as_words(seed)) ^ _as_words(epoch))
    keys = scramble(keys ^ _as_words(indices))
    return keys if repeats is None else np.where(repeats > 0, scramble(keys ^ _as_words(repeats)), keys)


def uniforms(keys: Keys, purpose: str, count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) per key, a different set for every purpose: (keys, count)."""
    base = scramble(keys ^ np.uint64(zlib.crc32(purpose.encode())))[:, None]
    with np.errstate(over="ignore"):
        words = scramble(base + np.arange(count, dtype=np.uint64)[None] * _STEP)
    numbers: NDArray[np.float64] = (words >> np.uint64(11)) * 2.0**-53
    return numbers


def permutation(seed: int, epoch: int, count: int, purpose: str = "order") -> NDArray[np.int64]:
    """The numbers 0..count-1 in an order that depends on seed, epoch and purpose only."""
    keys = sample_keys(seed, epoch, np.arange(count)) ^ np.uint64(zlib.crc32(purpose.encode()))
    return np.argsort(scramble(keys), kind="stable")
