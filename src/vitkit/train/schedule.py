"""Learning rate as a function of progress, a number from 0 to 1, whether steps or the clock drive it."""

from __future__ import annotations

import math
from typing import Literal


def rate(progress: float, warmup: float, kind: Literal["cosine", "linear"]) -> float:
    """The share of the peak learning rate: up linearly during `warmup`, then down to 0."""
    if progress < warmup:
        return max(progress / warmup, 1e-3)  # the very first step moves a little too
    rest = min(1.0, (progress - warmup) / (1 - warmup))
    return 1 - rest if kind == "linear" else 0.5 * (1 + math.cos(math.pi * rest))


def grown_size(progress: float, start: float, size: int, patch: int) -> int:
    """Progressive pictures: from `start` of the size, in whole patches, to all of it at 70% of the run."""
    share = min(1.0, start + (1 - start) * progress / 0.7)
    return min(size, max(patch, round(size * share / patch) * patch))
