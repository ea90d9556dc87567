"""Intervals against scipy, and words that follow the numbers."""

import math

import numpy as np
import pytest
import scipy.stats

from vitkit.study.numbers import (
    Interval,
    compare,
    difference,
    gained,
    interval,
    points,
    power,
    quantile,
    seeds_for,
    verdict,
)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 9, 30, 101])
@pytest.mark.parametrize("share", [0.5, 0.95, 0.995])
def test_quantile_is_students(freedom: int, share: float) -> None:
    # bisection to the last bit; scipy's own error is about 1e-12 relative
    assert quantile(share, freedom) == pytest.approx(scipy.stats.t.ppf((1 + share) / 2, freedom), rel=1e-9)


def test_interval_is_scipys() -> None:
    values = [0.91, 0.93, 0.90, 0.95]
    low, high = scipy.stats.t.interval(0.95, 3, scipy.stats.tmean(values), scipy.stats.sem(values))
    found = interval(values)
    assert (found.mean, found.low, found.high) == pytest.approx((0.9225, low, high))
    assert found.half == pytest.approx((high - low) / 2)


def test_differences_are_paired() -> None:
    """Seeds differ by far more than the arms do; taken seed by seed the difference is certain."""
    a, b = [0.50, 0.70, 0.90], [0.49, 0.69, 0.89]
    found = difference(a, b)
    assert found.mean == pytest.approx(0.01)
    assert not found.covers_zero
    assert interval(a).low < interval(b).mean < interval(a).high


def test_picked_pairs_widen_the_interval() -> None:
    one, ten = (interval([0.01, 0.02, 0.03], pairs) for pairs in (1, 10))
    assert ten.half / one.half == pytest.approx(quantile(0.995, 2) / quantile(0.95, 2))
    assert "widened for 10 pairs" in compare("a", "b", ten)
    assert "widened" not in compare("a", "b", one)


def test_one_seed_has_no_interval() -> None:
    found = interval([0.5])
    assert math.isnan(found.low)
    assert found.covers_zero
    assert "one seed, so no interval" in compare("a", "b", found)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.01, 0.03, "a reaches 2.0 points more than b (95% interval +1.0 to +3.0, 3 seeds)"),
        (-0.03, -0.01, "a reaches 2.0 points fewer than b (95% interval -3.0 to -1.0, 3 seeds)"),
        (-0.01, 0.03, "it is open whether a or b reaches more (+1.0 points, 95% interval -1.0 to +3.0, 3 seeds)"),
        (0.0, 0.02, "it is open whether a or b reaches more (+1.0 points, 95% interval +0.0 to +2.0, 3 seeds)"),
        (-0.004, 0.006, "a and b are alike within a point (+0.1 points, 95% interval -0.4 to +0.6, 3 seeds)"),
    ],
)
def test_words_follow_the_interval(low: float, high: float, words: str) -> None:
    assert compare("a", "b", Interval((low + high) / 2, low, high, 3)) == words


def test_verdicts() -> None:
    up, down, none = Interval(0.02, 0.01, 0.03, 3), Interval(-0.02, -0.03, -0.01, 3), Interval(0.0, -0.1, 0.1, 3)
    alike = Interval(0.0, -0.004, 0.004, 3)
    assert [verdict(alike, expected) for expected in (1, 0)] == [
        "so what the paper saw does not show here",
        "as in the paper",
    ]
    assert verdict(up, 1) == "as in the paper"
    assert verdict(down, 1) == "unlike the paper"
    assert verdict(down, -1) == "as in the paper"
    assert verdict(none, 1) == "so this says nothing about the paper"
    assert verdict(none, 0) == "which does not contradict the paper"
    assert verdict(up, 0) == "unlike the paper"
    assert [gained(f) for f in (up, down, none, alike)] == [
        "gains 2.0 points",
        "costs 2.0 points",
        "open",
        "alike within a point",
    ]


@pytest.mark.parametrize("seeds", [3, 5, 10, 20])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 4.0])
def test_power_is_that_of_the_noncentral_t(seeds: int, ratio: float) -> None:
    """An integral on a grid of 1,000 places; scipy's is exact."""
    critical = scipy.stats.t.ppf(0.975, seeds - 1)
    right = scipy.stats.nct.sf(critical, seeds - 1, ratio * math.sqrt(seeds))
    assert power(ratio, 1.0, seeds) == pytest.approx(right, abs=1e-4)


def test_seeds_see_the_effect_in_four_of_five() -> None:
    """Simulated: normal differences of the planted size, as many seeds as were asked for."""
    random = np.random.default_rng(0)
    for ratio in (0.8, 1.2, 2.0):
        seeds = seeds_for(ratio, 1.0, 3, 40)
        seen = [not interval(random.normal(ratio, 1.0, seeds).tolist()).covers_zero for _ in range(2_000)]
        assert 0.77 < np.mean(seen) < 0.95  # 0.8, or more where one seed less is below it
    assert seeds_for(0.1, 1.0, 3, 20) == 20  # does not suffice, and power says so
    assert power(0.1, 1.0, 20) < 0.1


def test_small_differences_keep_their_digits() -> None:
    assert [points(x) for x in (0.123, -0.0123, 0.00456)] == ["12.3", "1.2", "0.46"]
