"""The simulation against closed forms: pipelines, queues with a buffer, the slowest of many, failures."""

import math
from dataclasses import replace

import numpy as np
import pytest

from vitkit.errors import ConfigError
from vitkit.plan.simulate import (
    Failures,
    Pipeline,
    best_interval,
    constant,
    expected,
    exponential,
    flow,
    noisy,
    survive,
)

LINE = Pipeline(ranks=1, batch=10, read=0.0, decode=0.0, step=1.0)


@pytest.mark.parametrize(
    ("read", "decode", "step", "exchange", "workers"),
    [(0.1, 0.3, 0.7, 0.0, 1), (0.9, 0.3, 0.7, 0.1, 4), (0.1, 2.0, 0.7, 0.0, 2), (0.1, 2.0, 0.7, 0.0, 4)],
)
def test_without_noise_the_slowest_stage_sets_the_pace(
    read: float, decode: float, step: float, exchange: float, workers: int
) -> None:
    line = replace(LINE, read=read, decode=decode, step=step, exchange=exchange, workers=workers, ahead=3)
    slowest = max(read, (read + decode) / workers, step + exchange)
    assert flow(line, 2000).step == pytest.approx(slowest, rel=1e-2)


def test_who_loads_for_itself_does_one_after_the_other() -> None:
    line = replace(LINE, read=0.2, decode=0.3, step=0.5, exchange=0.1, workers=0)
    assert flow(line).step == pytest.approx(1.1)
    assert flow(line).images_per_second == pytest.approx(10 / 1.1)
    assert flow(line).waits_for_data == pytest.approx(0.5 / 1.1)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_two_exponential_stations_with_a_buffer(ahead: int) -> None:
    """Hillier and Boling: of two equal stations and room for b between them (b + 2) / (b + 3) of one's pace is left."""
    line = replace(LINE, decode=1.0, ahead=ahead, decoding=exponential, stepping=exponential)
    assert 1 / flow(line, 16_000).step == pytest.approx((ahead + 1) / (ahead + 2), rel=0.04)


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_the_slowest_of_many_exponential_times_is_a_harmonic_number(ranks: int) -> None:
    line = replace(LINE, ranks=ranks, stepping=exponential)
    harmonic = sum(1 / n for n in range(1, ranks + 1))
    assert flow(line, 8000).step == pytest.approx(harmonic, rel=0.06)


def test_ranks_of_a_node_share_its_storage_and_its_cores() -> None:
    line = replace(LINE, ranks=8, per_node=4, read=0.5, step=1.0, workers=2)
    assert flow(line, 1000).step == pytest.approx(4 * 0.5, rel=1e-2)
    assert flow(replace(line, ranks=9), 1000).step == pytest.approx(4 * 0.5, rel=1e-2)  # the last node has one
    crowded = replace(LINE, ranks=4, per_node=4, cores=2, decode=0.5, workers=0)
    assert flow(crowded).step == pytest.approx(2 * 1.5)


def test_noise_keeps_its_mean_and_spread() -> None:
    times = noisy(0.3)(np.random.default_rng(0), 2.0, 200_000)
    assert times.mean() == pytest.approx(2.0, rel=0.01)
    assert times.std() == pytest.approx(0.6, rel=0.02)
    slow = noisy(0.0, slow=0.1)(np.random.default_rng(0), 1.0, 100_000)
    assert slow.mean() == pytest.approx(1.1, rel=0.01)
    assert set(constant(np.random.default_rng(0), 1.5, 3)) == {1.5}


@pytest.mark.parametrize("interval", [100.0, 600.0, 3000.0])
def test_failures_cost_what_daly_says(interval: float) -> None:
    about = Failures(mtbf=5000.0, restart=200.0, save=20.0, interval=interval)
    work = 400_000.0
    seconds = np.mean([survive(work, about, seed).seconds for seed in range(30)])
    assert seconds == pytest.approx(expected(work, about), rel=0.05)


def test_youngs_interval_is_the_best_one() -> None:
    about = Failures(mtbf=50_000.0, restart=100.0, save=10.0, interval=best_interval(50_000.0, 10.0))
    assert about.interval == pytest.approx(1000.0)
    best = expected(1e6, about)
    assert all(expected(1e6, replace(about, interval=f * 1000.0)) > best for f in (0.5, 0.8, 1.25, 2.0))


def test_without_failures_a_run_takes_its_work_and_its_checkpoints() -> None:
    found = survive(1000.0, Failures(mtbf=math.inf, restart=10.0, save=5.0, interval=100.0))
    assert found.seconds == pytest.approx(1050.0)
    assert (found.failures, found.lost) == (0, 0.0)


def test_the_books_balance() -> None:
    about = Failures(mtbf=3000.0, restart=200.0, save=10.0, interval=500.0)
    found = survive(100_000.0, about, 3)
    assert found.failures > 10
    assert found.seconds == pytest.approx(100_000.0 * 1.02 + found.lost + found.restarting)


def test_impossible_pipelines() -> None:
    with pytest.raises(ConfigError, match="ranks=0"):
        flow(replace(LINE, ranks=0))
