"""A thread that computes what has arrived as one batch: dynamic batching with a bounded queue.

On the event loop, `places(n)` admits a request or refuses it at once; places are held until the answer,
so decoding, waiting and computing are bounded together. `submit` hands the jobs to the thread. The thread
takes up to `max_batch` of them. It waits (up to `max_wait`) only while admitted jobs are still on their way:
a lone request is computed at once. Jobs whose futures were cancelled - the client has gone, or the time is
up - are dropped before they are computed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.process_collector import ProcessCollector

from vitkit.errors import VitkitError
from vitkit.web.answers import Problem

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
J = TypeVar("J")  # what a job is
R = TypeVar("R")  # what comes of it


@dataclass(frozen=True)
class _Waiting(Generic[J, R]):
    job: J
    future: asyncio.Future[R]
    since: float


class Worker(Generic[J, R]):
    def __init__(
        self,
        name: str,
        compute: Callable[[list[J]], Sequence[R]],
        metrics: WorkerMetrics,
        max_batch: int,
        max_wait: float,
        in_flight: int,
    ) -> None:
        self.compute, self.metrics = compute, metrics
        self.max_batch, self.max_wait, self.limit = max_batch, max_wait, in_flight
        self.taken = 0  # places; changed on the event loop only, like the next one
        self.coming = 0  # admitted and not yet submitted
        self._queue: deque[_Waiting[J, R]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    # --- on the event loop -------------------------------------------------------------------------------

    @contextmanager
    def places(self, count: int) -> Iterator[list[asyncio.Future[R]]]:
        """Room for `count` jobs until the end of the block, or `Problem` 503; the list is for `submit` to fill."""
        self.check_room(count)
        places: list[asyncio.Future[R]] = []
        self.taken += count
        self.coming += count
        self.metrics.in_flight.inc(count)
        try:
            yield places
        finally:
            self.taken -= count
            self.coming -= count - len(places)
            self.metrics.in_flight.dec(count)

    def check_room(self, count: int = 1) -> None:
        if self.taken + count > self.limit or self._closing:
            self.metrics.shed.inc(count)
            raise Problem(503, "busy", "too many images are waiting; try again in a second")

    def submit(self, jobs: Sequence[J], places: list[asyncio.Future[R]]) -> list[asyncio.Future[R]]:
        """One future for each job. Cancel it, and the job is not computed."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        waiting = [_Waiting(job, loop.create_future(), now) for job in jobs]
        self.coming -= len(jobs)
        places += [w.future for w in waiting]
        with self._changed:
            self._queue.extend(waiting)
            self._changed.notify()
        return places

    def close(self) -> None:
        """Compute what is waiting, then end. Blocks until then."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self.thread.join()

    # --- in the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._take():
            start = time.perf_counter()
            results = self._results(batch)
            self.metrics.batch_size.observe(len(batch))
            self.metrics.batch_seconds.observe(time.perf_counter() - start)
            loop = batch[0].future.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, batch, results)
            del batch, results  # not kept alive while waiting for the next

    def _take(self) -> list[_Waiting[J, R]]:
        """The next batch; empty when there will be none."""
        batch: list[_Waiting[J, R]] = []
        with self._changed:
            while not batch:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    break
                patience = self._queue[0].since + self.max_wait - time.monotonic()
                self._changed.wait_for(
                    lambda: len(self._queue) >= self.max_batch or not self.coming or self._closing, patience
                )
                while self._queue and len(batch) < self.max_batch:
                    waiting = self._queue.popleft()
                    if waiting.future.cancelled():
                        self.metrics.dropped.inc()
                    else:
                        batch.append(waiting)
        return batch

    def _results(self, batch: list[_Waiting[J, R]]) -> Sequence[R | Exception]:
        """What comes of each job; when a batch fails, each job alone, so that one cannot spoil the others."""
        try:
            return self.compute([w.job for w in batch])
        except Exception as e:
            if len(batch) > 1:
                return [self._results([w])[0] for w in batch]
            if not isinstance(e, VitkitError):  # those are the client's mistakes
                self.metrics.failed.inc()
            return [e]


def _deliver(batch: list[_Waiting[J, R]], results: Sequence[R | Exception]) -> None:
    for waiting, result in zip(batch, results, strict=True):
        if waiting.future.done():  # cancelled while it was computed
            continue
        if isinstance(result, Exception):
            waiting.future.set_exception(result)
        else:
            waiting.future.set_result(result)


# --- what Prometheus reads at /metrics -------------------------------------------------------------------


class WorkerMetrics(NamedTuple):
    batch_size: Histogram
    batch_seconds: Histogram
    in_flight: Gauge
    shed: Counter
    dropped: Counter
    failed: Counter

    def of(self, model: str, worker: str) -> WorkerMetrics:
        """The same for one worker of one model, with its labels filled in."""
        return WorkerMetrics._make(metric.labels(model, worker) for metric in self)


class Metrics:
    """A registry of its own, so that several servers can live in one process. Labels never come from clients."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        ProcessCollector(registry=own)
        labels = ["model", "worker"]
        self.requests = Counter("vitkit_requests", "Answers by route and status.", ["route", "status"], registry=own)
        self.seconds = Histogram("vitkit_request_seconds", "Time to answer.", ["route"], buckets=SECONDS, registry=own)
        self.workers = WorkerMetrics(
            Histogram("vitkit_batch_size", "Jobs computed at once.", labels, buckets=SIZES, registry=own),
            Histogram("vitkit_batch_seconds", "Time of a batch.", labels, buckets=SECONDS, registry=own),
            Gauge("vitkit_in_flight", "Jobs between admission and answer.", labels, registry=own),
            Counter("vitkit_shed", "Jobs refused because the queue was full.", labels, registry=own),
            Counter("vitkit_dropped", "Jobs given up before they were computed.", labels, registry=own),
            Counter("vitkit_failed", "Jobs whose computation failed.", labels, registry=own),
        )
