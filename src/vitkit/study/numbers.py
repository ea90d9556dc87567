"""Mean and 95% interval over seeds, and how a comparison is put into words.

The interval is Student's t over seeds. Two arms of one seed saw the same images in the same order, so
their difference is taken seed by seed. When its interval covers zero, the arms are alike if all of it lies within a
point, and otherwise it is open which reaches more: a study that is too small says so, and nothing else. Where the best
and the worst of several arms are compared, the interval is widened for the number of pairs they were picked from
(Bonferroni): otherwise luck alone would find a difference soon enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIKE = 0.01  # two arms are alike when the whole interval of their difference is smaller
POWER = 0.8  # chance to see an effect that is there


def within(t: float, freedom: int) -> float:
    """P(|T| < t) for Student's t with a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def quantile(share: float, freedom: int) -> float:
    """The t with P(|T| < t) = share, by bisection."""
    low, high = 0.0, 1.0
    while within(high, freedom) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < share else (low, middle)
    return high


@dataclass(frozen=True)
class Interval:
    """A mean and where the true one lies with 95% confidence; with a single seed that is unknown (nan)."""

    mean: float
    low: float
    high: float
    seeds: int
    pairs: int = 1  # that the compared arms were picked from

    @property
    def known(self) -> bool:
        return self.seeds > 1

    @property
    def covers_zero(self) -> bool:
        return not self.known or self.low <= 0 <= self.high

    @property
    def alike(self) -> bool:
        return self.known and -ALIKE < self.low <= self.high < ALIKE

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of what the values are a sample of."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def interval(values: Sequence[float], pairs: int = 1) -> Interval:
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1, pairs)
    half = quantile(1 - 0.05 / pairs, n - 1) * deviation(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, pairs)


def difference(a: Sequence[float], b: Sequence[float], pairs: int = 1) -> Interval:
    """a - b, seed by seed, as many as both have."""
    return interval([x - y for x, y in zip(a, b, strict=False)], pairs)


def power(effect: float, spread: float, seeds: int) -> float:
    """The chance that the interval of so many seeds excludes zero on the side of the effect (noncentral t).

    The mean over w, what the seeds will show of the spread: w^2 (seeds - 1) is a chi-square of seeds - 1 freedoms.
    """
    if seeds < 2:
        return 0.0
    freedom, moved = seeds - 1, effect * math.sqrt(seeds) / max(spread, 1e-9)
    critical = quantile(0.95, freedom)
    grid = [(i + 0.5) / 200 for i in range(1_000)]  # of w, up to five times the spread
    density = [math.exp((freedom - 1) * math.log(w) - freedom * w * w / 2) for w in grid]
    seen = (math.erfc((critical * w - moved) / math.sqrt(2)) / 2 for w in grid)
    return math.fsum(d * s for d, s in zip(density, seen, strict=True)) / math.fsum(density)


def seeds_for(effect: float, spread: float, least: int, most: int) -> int:
    """The fewest seeds that see the effect with 80% power; `most` where they do not suffice."""
    return next((n for n in range(least, most) if power(effect, spread, n) >= POWER), most)


def points(share: float) -> str:
    """0.0123 -> "1.2": percentage points with as many digits as they deserve."""
    value = 100 * abs(share)
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def spread(gap: Interval, scale: float = 100, unit: str = "") -> str:
    """ "95% interval +0.5 to +1.9, 3 seeds" of what stands before it."""
    if not gap.known:
        return "one seed, so no interval"
    picked = f", widened for {gap.pairs} pairs" if gap.pairs > 1 else ""
    return f"95% interval {scale * gap.low:+.1f} to {scale * gap.high:+.1f}{unit}, {gap.seeds} seeds{picked}"


def compare(a: str, b: str, gap: Interval) -> str:
    """A clause about a - b: who reaches more, by how many points, and how sure that is."""
    if not gap.known:
        return f"{a} reaches {100 * gap.mean:+.1f} points against {b} ({spread(gap)})"
    if more := direction(gap, "more", "fewer"):
        return f"{a} reaches {points(gap.mean)} points {more} than {b} ({spread(gap)})"
    what = f"{a} and {b} are alike within a point" if gap.alike else f"it is open whether {a} or {b} reaches more"
    return f"{what} ({100 * gap.mean:+.1f} points, {spread(gap)})"


def verdict(gap: Interval, expected: int, source: str = "the paper") -> str:
    """How a difference stands to what somebody else saw: +1 more, -1 fewer, 0 alike."""
    if gap.covers_zero and not expected:
        return f"as in {source}" if gap.alike else f"which does not contradict {source}"
    if gap.covers_zero:
        return f"so what {source} saw does not show here" if gap.alike else f"so this says nothing about {source}"
    return f"as in {source}" if gap.mean * expected > 0 else f"unlike {source}"


def direction(gap: Interval, more: str, less: str) -> str:
    """One of the words, or "" when the interval covers zero."""
    return "" if gap.covers_zero else more if gap.mean > 0 else less


def gained(gap: Interval, less: str = "costs ", more: str = "gains ") -> str:
    """ "costs 1.2 points", "alike" or "open", for headlines."""
    word = direction(gap, more, less)
    return f"{word}{points(gap.mean)} points" if word else "alike within a point" if gap.alike else "open"


def sentence(text: str) -> str:
    """A clause with a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
