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
from typing import Generic, TypeVar

from vitkit.errors import VitkitError
from vitkit.web.metrics import WorkerMetrics
from vitkit.web.problems import busy

J = TypeVar("J")  # what a job is
R = TypeVar("R")  # what comes of it


@dataclass(frozen=True)
class _Waiting(Generic[J, R]):
    job: J
    future: asyncio.Future[R]
    since: float


class Places:
    """Admission of one request: how many of its jobs have not been submitted yet."""

    def __init__(self, count: int) -> None:
        self.coming = count


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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # --- on the event loop -------------------------------------------------------------------------------

    @contextmanager
    def places(self, count: int) -> Iterator[Places]:
        """Room for `count` jobs until the end of the block, or `Problem` 503."""
        self.check_room(count)
        places = Places(count)
        self.taken += count
        self.coming += count
        self.metrics.in_flight.inc(count)
        try:
            yield places
        finally:
            self.taken -= count
            self.coming -= places.coming
            self.metrics.in_flight.dec(count)

    def check_room(self, count: int = 1) -> None:
        if self.taken + count > self.limit or self._closing:
            self.metrics.shed.inc(count)
            raise busy()

    def submit(self, jobs: Sequence[J], places: Places) -> list[asyncio.Future[R]]:
        """One future for each job. Cancel it, and the job is not computed."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        waiting = [_Waiting(job, loop.create_future(), now) for job in jobs]
        self.coming -= len(jobs)
        places.coming -= len(jobs)
        with self._changed:
            self._queue.extend(waiting)
            self._changed.notify()
        return [w.future for w in waiting]

    def close(self) -> None:
        """Compute what is waiting, then end. Blocks until then."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

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
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return []
                until = self._queue[0].since + self.max_wait
                while len(self._queue) < self.max_batch and self.coming and not self._closing:
                    if not self._changed.wait(max(0.0, until - time.monotonic())):
                        break
                if batch := self._pop():
                    return batch

    def _pop(self) -> list[_Waiting[J, R]]:
        batch: list[_Waiting[J, R]] = []
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
