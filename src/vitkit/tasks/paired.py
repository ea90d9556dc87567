"""Two models on the same images: how much is lost, and could it be chance? Pure functions of four counts.

`lost` images that only the first had right, `won` images that only the second has right, of `count` images.
"""

from __future__ import annotations

import math
from functools import reduce
from statistics import NormalDist

import numpy as np


def mcnemar(lost: int, won: int) -> float:
    """McNemar's test, exact: how likely a split at least as uneven as this is when both are equally good."""
    few = min(lost, won)
    return min(1.0, 2 * _at_most(few, lost + won))


def worse(lost: int, won: int) -> float:
    """One-sided: how likely so many or more losses among the disagreements are when the second is not worse."""
    return _at_most(won, lost + won)


def _at_most(k: int, n: int) -> float:
    """P(X <= k) of n tosses of a fair coin."""
    return float(sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


def kept_on(lost: int, won: int, count: int, max_drop: float, others: int = 200) -> float:
    """How likely at most `max_drop` is lost on so many other images, by the rates of these (half an image added)."""
    up, down = (lost + 0.5) / (count + 1), (won + 0.5) / (count + 1)
    step = np.array([down, max(0.0, 1 - up - down), up])  # one image: won, the same, lost
    total = reduce(np.convolve, [step] * others)  # of others: from all won to all lost
    return float(total[: others + int(max_drop * others + 1e-9) + 1].sum())


def drop_interval(lost: int, won: int, count: int, level: float = 0.95) -> tuple[float, float]:
    """Of the accuracy that is lost, as shares of 1: Wald's interval with half an image in each cell (Agresti and Min).

    The plain interval has no width when nothing was lost or won, and covers too rarely; this one covers at least as
    often as it says for differences that matter here.
    """
    if count < 1:
        raise ValueError("no images, no interval")
    a, b, n = lost + 0.5, won + 0.5, count + 2
    centre = (a - b) / n
    half = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(max(0.0, a + b - (a - b) ** 2 / n)) / n
    return centre - half, centre + half
