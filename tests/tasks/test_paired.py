"""Paired comparisons against scipy's binomial test, closed forms, and the exact distribution."""

import math

import pytest

from vitkit.tasks.paired import drop_interval, mcnemar, worse


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (1, 0), (0, 5), (3, 3), (7, 2), (10, 25), (60, 41)])
def test_exact_tests_are_those_of_scipy(lost: int, won: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    if lost + won:
        assert mcnemar(lost, won) == pytest.approx(stats.binomtest(lost, lost + won).pvalue)
        one_sided = stats.binomtest(lost, lost + won, alternative="greater").pvalue
        assert worse(lost, won) == pytest.approx(one_sided)
    else:
        assert mcnemar(0, 0) == worse(0, 0) == 1


def test_closed_forms() -> None:
    assert mcnemar(5, 0) == 2 * 0.5**5
    assert worse(5, 0) == 0.5**5
    assert worse(0, 5) == 1
    assert mcnemar(4, 4) == 1


def test_the_interval_moves_with_what_is_lost_and_narrows_with_images() -> None:
    low, high = drop_interval(0, 0, 100)
    assert low == -high
    assert high == pytest.approx(1.959964 * 1 / 102, rel=1e-6)  # a + b = 1: sqrt(1) / 102
    assert drop_interval(10, 2, 500)[0] > drop_interval(5, 7, 500)[0]
    wide, narrow = (h - w for w, h in (drop_interval(4, 4, 100), drop_interval(40, 40, 1000)))
    assert wide > 2.5 * narrow
    with pytest.raises(ValueError, match="no images"):
        drop_interval(0, 0, 0)


@pytest.mark.parametrize(("p_lost", "p_won"), [(0.01, 0.01), (0.03, 0.01), (0.02, 0.02), (0.08, 0.03)])
def test_it_covers_as_often_as_it_says(p_lost: float, p_won: float) -> None:
    """By the exact trinomial distribution of 150 images."""
    n, inside, total = 150, 0.0, 0.0
    logs = [math.log(p) for p in (p_lost, p_won, 1 - p_lost - p_won)]
    for lost in range(40):
        for won in range(40):
            ways = math.lgamma(n + 1) - math.lgamma(lost + 1) - math.lgamma(won + 1) - math.lgamma(n - lost - won + 1)
            chance = math.exp(ways + lost * logs[0] + won * logs[1] + (n - lost - won) * logs[2])
            low, high = drop_interval(lost, won, n)
            total += chance
            inside += chance * (low <= p_lost - p_won <= high)
    assert total > 0.9999
    assert inside >= 0.94
