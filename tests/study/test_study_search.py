"""The search for a learning rate finds the peak of a known curve, also beyond where it began."""

import math

import pytest

from vitkit.study.search import LEAST, MOST, Tried, at_edge, chosen, next_rates
from vitkit.study.table import RATES


def searched(accuracy, first=RATES) -> tuple[float, Tried]:
    tried: Tried = {}
    while wanted := next_rates(tried, first):
        for rate, seed in wanted:
            tried.setdefault(rate, []).append(accuracy(rate, seed))
    return chosen(tried), tried


@pytest.mark.parametrize("peak", [1e-4, 5e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1])
def test_the_peak_is_found(peak: float) -> None:
    """Within the root of two, the half of a step of the grid."""
    found, tried = searched(lambda rate, seed: -abs(math.log(rate / peak)))
    assert abs(math.log2(found / peak)) <= 0.5 + 1e-9
    assert {found / 2, found * 2} <= tried.keys()
    assert not at_edge(found)
    assert sum(map(len, tried.values())) <= 12


def test_nothing_to_choose_ends_at_once() -> None:
    found, tried = searched(lambda rate, seed: 0.1)
    assert found == min(rate for rate, seeds in tried.items() if len(seeds) == 2)
    assert sum(map(len, tried.values())) == 7


def test_it_does_not_climb_forever() -> None:
    for sign in (1, -1):
        found, _ = searched(lambda rate, seed, sign=sign: sign * rate)
        assert LEAST <= found <= MOST
        assert at_edge(found)


def test_a_second_seed_decides_between_the_best_two() -> None:
    lucky = {4e-3: (0.9, 0.1), 2e-3: (0.8, 0.8)}
    found, tried = searched(lambda rate, seed: lucky.get(rate, (0.2, 0.2))[seed])
    assert found == 2e-3
    assert [len(tried[rate]) for rate in (4e-3, 2e-3, 1e-3)] == [2, 2, 1]
