"""A discrete-event simulation of training: images on their way to the step, and nodes that fail.

Input: every rank has its loading processes; batch k belongs to process k mod W, which reads it (the ranks of a node
share its storage, first come first served) and decodes it, and may begin once batch k - ahead * W was taken. The rank
takes a batch when it is there and the step before has ended; a step ends for all ranks when the slowest has
computed, and gradients were exchanged. Each of these moments is the maximum of the moments it waits for plus a time
of its own, so the events of step k follow from those before it, for all ranks at once.

Failures: nodes fail at random (exponentially distributed), the work since the last checkpoint is lost, and a restart
takes time, in which nodes may fail again.

tests/plan/test_simulate.py holds both to closed forms: pipelines without noise, two exponential stations with a buffer,
the slowest of N exponential times, Daly's expected time of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitkit.errors import ConfigError

Draw = Callable[[np.random.Generator, float, int], np.ndarray]  # (generator, mean, how many) -> times


def constant(random: np.random.Generator, mean: float, count: int) -> np.ndarray:
    return np.full(count, mean)


def exponential(random: np.random.Generator, mean: float, count: int) -> np.ndarray:
    return random.exponential(mean, count)


def noisy(spread: float, slow: float = 0.0) -> Draw:
    """Log-normal around the mean; one in 1 / `slow` takes twice as long."""
    sigma = math.sqrt(math.log1p(spread**2))

    def draw(random: np.random.Generator, mean: float, count: int) -> np.ndarray:
        times: np.ndarray = mean * random.lognormal(-(sigma**2) / 2, sigma, count)
        if slow:
            times[random.random(count) < slow] *= 2
        return times

    return draw


@dataclass(frozen=True)
class Pipeline:
    """Seconds are means for one batch of one rank."""

    ranks: int
    batch: int  # images of one rank
    read: float  # storage of a node, for one batch
    decode: float  # one loading process, for one batch
    step: float  # forward, backward and update
    exchange: float = 0.0  # of gradients, what the backward pass does not hide
    workers: int = 1  # loading processes of a rank; 0: the rank itself reads and decodes
    ahead: int = 2  # batches that each of them may have ready
    per_node: int = 8  # ranks that share storage and cores
    cores: float = math.inf  # of a node, which its ranks share when there are fewer than ranks
    reading: Draw = constant
    decoding: Draw = constant
    stepping: Draw = constant


@dataclass(frozen=True)
class Flow:
    images_per_second: float  # of all ranks
    step: float  # seconds from one step to the next
    waits_for_data: float  # share of the time, mean over ranks
    waits_for_others: float


def flow(line: Pipeline, steps: int = 400, seed: int = 0) -> Flow:
    """The steady state: the first half of the steps fills the queues and is not counted."""
    if line.ranks < 1 or steps < 4 or line.workers < 0:
        raise ConfigError(f"ranks={line.ranks} and steps={steps} must be positive, workers={line.workers} not negative")
    state = _Ranks(line, seed)
    half, middle, waits = steps // 2, 0.0, np.zeros(2)
    for k in range(steps):
        waited = state.next(k)
        if k == half - 1:
            middle = state.end
        elif k >= half:
            waits += waited
    seconds = (state.end - middle) / (steps - half)
    shares = waits / (steps - half) / seconds
    return Flow(line.ranks * line.batch / seconds, seconds, *map(float, shares))


class _Ranks:
    """Moments in seconds of all ranks, row by row of one loading process or one batch."""

    def __init__(self, line: Pipeline, seed: int) -> None:
        self.line, self.random = line, np.random.default_rng(seed)
        self.end = 0.0  # of the step before
        shape = (max(1, line.workers), line.ranks)
        self.free = np.zeros(shape)  # when each loading process has done its last batch
        self.taken = np.zeros((max(1, line.workers * line.ahead), line.ranks))  # when the last batches were taken
        self.storage = np.zeros(math.ceil(line.ranks / line.per_node))  # when each node's is free
        together = min(line.ranks, line.per_node) / line.cores
        self.stretch = max(1.0, together)  # more ranks than cores: each gets its share

    def next(self, k: int) -> np.ndarray:
        """Step k; the seconds that ranks waited for data and for others, on average."""
        line, count = self.line, self.line.ranks
        if line.workers:
            worker, slot = k % line.workers, k % len(self.taken)
            read = self._read(np.maximum(self.free[worker], self.taken[slot]))
            decoded = read + line.decoding(self.random, line.decode, count)
            self.free[worker] = decoded
            start = np.maximum(decoded, self.end)
            self.taken[slot] = start
        else:
            read = self._read(np.full(count, self.end))
            start = read + self.stretch * line.decoding(self.random, line.decode, count)
        done = start + self.stretch * line.stepping(self.random, line.step, count)
        slowest = float(done.max())
        waited = np.array([(start - self.end).mean(), slowest - done.mean()])
        self.end = slowest + line.exchange
        return waited

    def _read(self, ready: np.ndarray) -> np.ndarray:
        """Through the storage of each node: one batch after the other, in the order in which they are asked for."""
        line, nodes = self.line, len(self.storage)
        if not line.read:
            return ready
        places = np.full(nodes * line.per_node, np.inf)  # a node that is not full: the last places are empty
        places[: line.ranks] = ready
        rows = places.reshape(nodes, line.per_node)
        order = rows.argsort(axis=1, kind="stable")
        asked = np.maximum(np.take_along_axis(rows, order, 1), self.storage[:, None])
        times = line.reading(self.random, line.read, rows.size).reshape(rows.shape)
        until = times.cumsum(axis=1)
        # The i-th is done when the latest of those before it began to be served, plus all service since.
        served = until + np.maximum.accumulate(asked - until + times, axis=1)
        self.storage = np.where(np.isfinite(served), served, 0.0).max(axis=1)
        done = np.empty_like(served)
        np.put_along_axis(done, order, served, 1)
        return done.reshape(-1)[: line.ranks]


# --- failures ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failures:
    """Seconds."""

    mtbf: float  # of all nodes together: that of one, divided by their number
    restart: float
    save: float  # that training waits for a checkpoint
    interval: float  # of work between checkpoints


@dataclass(frozen=True)
class Survived:
    seconds: float  # on the clock
    failures: int
    lost: float  # work done twice
    restarting: float


def best_interval(mtbf: float, save: float) -> float:
    """Young's interval between checkpoints (1974), the square root of 2 x their cost x the time between failures."""
    return math.sqrt(2 * save * mtbf)


def expected(work: float, about: Failures) -> float:
    """Daly's expected seconds of a run (2006): every segment of work and checkpoint is tried until it succeeds."""
    theta = about.mtbf
    tries = theta * math.exp(about.restart / theta) * math.expm1((about.interval + about.save) / theta)
    return work / about.interval * tries


def survive(work: float, about: Failures, seed: int = 0) -> Survived:
    """One run of `work` seconds, from event to event."""
    random = np.random.default_rng(seed)
    clock = done = lost = restarting = 0.0
    failures, failure = 0, random.exponential(about.mtbf)
    while done < work:
        segment = min(about.interval, work - done)
        need = segment + about.save * segment / about.interval  # of the last, shorter one a part
        if clock + need <= failure:
            clock, done = clock + need, done + segment
            continue
        lost += failure - clock
        clock, again = failure, True
        while again:  # a restart that fails begins again
            failures, failure = failures + 1, clock + random.exponential(about.mtbf)
            again = failure < clock + about.restart
            before, clock = clock, min(failure, clock + about.restart)
            restarting += clock - before
    return Survived(clock, failures, lost, restarting)
