"""Do two results of one study agree? Arm by arm: the same within the effect that the study looks for, or not.

An equivalence test (two one-sided tests, Welch): two means agree when the 90% interval of their difference lies within
plus and minus the effect, and differ when the 95% interval excludes zero; otherwise it is open. Two results of the
same seeds on one machine are the same numbers, and agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitkit.errors import DataError
from vitkit.io import read_json
from vitkit.study.numbers import ALIKE, Interval, deviation, quantile

Result = Mapping[str, object]  # what NAME.json holds
WANTED = "give the NAME.json that `vitkit study NAME` writes"


@dataclass(frozen=True)
class Agreement:
    arm: str
    first: float  # mean accuracy
    second: float
    gap: Interval  # first - second, 95%
    verdict: str  # "agrees", "differs" or "open"


def read_result(path: Path) -> Result:
    try:
        found = read_json(path)
    except ValueError as e:
        raise DataError(f"{path} is no JSON ({e}); {WANTED}") from e
    if not isinstance(found, dict):
        raise DataError(f"{path} is no result of a study; {WANTED}")
    return found


def agreements(first: Result, second: Result) -> list[Agreement]:
    """Of every arm that both have."""
    if first.get("study") != second.get("study"):
        raise DataError(f"{first.get('study')} and {second.get('study')} are two studies; give two results of one")
    margin = max(ALIKE, float(first.get("effect", ALIKE)))  # type: ignore[arg-type]
    ours, theirs = _arms(first), _arms(second)
    shared = [name for name in ours if name in theirs]
    if not shared:
        raise DataError("the two results have no arm in common; give two that were made by one version")
    return [_compared(name, ours[name], theirs[name], margin) for name in shared]


def _arms(result: Result) -> dict[str, list[float]]:
    try:
        return {arm["arm"]: list(map(float, arm["accuracy_by_seed"])) for arm in result["arms"]}  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError):
        raise DataError(f"this is no result of a study; {WANTED}") from None


def _compared(name: str, a: Sequence[float], b: Sequence[float], margin: float) -> Agreement:
    means = math.fsum(a) / len(a), math.fsum(b) / len(b)
    gap = unpaired(a, b)
    inner = unpaired(a, b, 0.9)
    verdict = "open"
    if gap.known and not gap.covers_zero and gap.mean:
        verdict = "differs"
    elif list(a) == list(b) or (inner.known and -margin < inner.low <= inner.high < margin):
        verdict = "agrees"
    return Agreement(name, *means, gap, verdict)


def unpaired(a: Sequence[float], b: Sequence[float], share: float = 0.95) -> Interval:
    """a - b with Welch's interval; its degrees of freedom are rounded down."""
    mean = math.fsum(a) / len(a) - math.fsum(b) / len(b)
    seeds = min(len(a), len(b))
    if seeds < 2:
        return Interval(mean, math.nan, math.nan, seeds)
    own = [deviation(values) ** 2 / len(values) for values in (a, b)]
    if not sum(own):
        return Interval(mean, mean, mean, seeds)
    freedom = sum(own) ** 2 / sum(v**2 / (len(values) - 1) for v, values in zip(own, (a, b), strict=True))
    half = quantile(share, max(1, int(freedom + 1e-9))) * math.sqrt(sum(own))
    return Interval(mean, mean - half, mean + half, seeds)
