"""Which learning rate to try next: the best one so far must have a worse neighbour on both sides, half and twice it.

The search begins with three rates, a factor of four apart, and climbs from the best in factors of two, beyond the
first three if need be. The best two are trained with a second seed, and the mean decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Tried = dict[float, list[float]]  # learning rate -> validation accuracy of each seed, or what stands for it
LEAST, MOST = 3e-5, 0.3  # beyond these nobody looks


def next_rates(tried: Tried, first: Sequence[float]) -> list[tuple[float, int]]:
    """(learning rate, number of the seed) of the trainings that are still missing; none: the search is over."""
    if not tried:
        return [(rate, 0) for rate in first]
    best = _best(tried, first)[0]
    beside = [rate for rate in (best / 2, best * 2) if rate not in tried and LEAST <= rate <= MOST]
    if beside:
        return [(rate, 0) for rate in beside]
    return [(rate, 1) for rate in _best(tried, first)[:2] if len(tried[rate]) < 2]


def chosen(tried: Tried) -> float:
    """The best mean of those with both seeds; of equal ones the smallest."""
    twice = {rate: sum(found) for rate, found in tried.items() if len(found) > 1}
    return max(sorted(twice), key=lambda rate: twice[rate])


def at_edge(rate: float) -> bool:
    return rate / 2 < LEAST or rate * 2 > MOST


def _best(tried: Tried, first: Sequence[float]) -> list[float]:
    """By the first seed, best first; of equal ones those nearest to where the search began."""
    middle = math.log2(first[len(first) // 2])
    return sorted(tried, key=lambda rate: (-tried[rate][0], abs(math.log2(rate) - middle)))
