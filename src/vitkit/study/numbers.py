"""Mean and 95% interval over seeds, and how a comparison is put into words.

The interval is Student's t over seeds. Two arms of one seed saw the same pictures in the same order, so
their difference is taken seed by seed. When its interval covers zero, the words are "no difference seen".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom; beyond 30 the normal one is close enough.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Interval:
    """A mean and where the true one lies with 95% confidence; with a single seed that is unknown (nan)."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def known(self) -> bool:
        return self.seeds > 1

    @property
    def covers_zero(self) -> bool:
        return not self.known or self.low <= 0 <= self.high

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


def interval(values: Sequence[float]) -> Interval:
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = (_T[n - 2] if n - 2 < len(_T) else 1.96) * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def difference(a: Sequence[float], b: Sequence[float]) -> Interval:
    """a - b, seed by seed."""
    return interval([x - y for x, y in zip(a, b, strict=True)])


def points(share: float) -> str:
    """0.0123 -> "1.2": percentage points with as many digits as they deserve."""
    value = 100 * abs(share)
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def spread(found: Interval, scale: float = 100, unit: str = "") -> str:
    """ "95% interval 0.5 to 1.9, 3 seeds" of what stands before it."""
    if not found.known:
        return "one seed, so no interval"
    return f"95% interval {scale * found.low:+.1f} to {scale * found.high:+.1f}{unit}, {found.seeds} seeds"


def compare(a: str, b: str, found: Interval) -> str:
    """A clause about a - b: who reaches more, by how many points, and how sure that is."""
    if not found.known:
        return f"{a} reaches {100 * found.mean:+.1f} points against {b} ({spread(found)})"
    if found.covers_zero:
        return f"no difference seen between {a} and {b} ({100 * found.mean:+.1f} points, {spread(found)})"
    more = "more" if found.mean > 0 else "fewer"
    return f"{a} reaches {points(found.mean)} points {more} than {b} ({spread(found)})"


def sentence(text: str) -> str:
    """A clause with a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
