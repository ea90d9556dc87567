"""The worker: what it computes together, what it refuses, what it drops, and that it drains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from serving import image, small_model, with_client

from vitkit.web.answers import Problem
from vitkit.web.app import create_app
from vitkit.web.settings import ServeSettings
from vitkit.web.worker import Metrics, Worker


class Doubler:
    """Doubles numbers, remembers its batches, and waits at a gate that the test opens."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, jobs: list[int]) -> list[int]:
        self.batches.append(list(jobs))
        assert self.gate.wait(20)
        if 13 in jobs:
            raise RuntimeError("unlucky")
        return [2 * job for job in jobs]


def make(compute: Any, max_batch: int = 4, max_wait: float = 0.01, in_flight: int = 8) -> Worker[int, int]:
    return Worker("test", compute, Metrics().workers.of("m", "w"), max_batch, max_wait, in_flight)


async def ask(worker: Worker[int, int], *jobs: int) -> list[int]:
    with worker.places(len(jobs)) as places:
        return list(await asyncio.gather(*worker.submit(jobs, places)))


def run(worker: Worker[int, int], test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await test()
        finally:
            await asyncio.to_thread(worker.close)

    asyncio.run(whole())


async def until(true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to that")


def test_what_arrives_during_a_batch_is_the_next_batch() -> None:
    compute = Doubler()
    worker = make(compute, in_flight=16)

    async def test() -> None:
        compute.gate.clear()
        first = asyncio.ensure_future(ask(worker, 1))
        await until(lambda: bool(compute.batches))
        others = [asyncio.ensure_future(ask(worker, i)) for i in range(2, 8)]
        await until(lambda: len(worker._queue) == 6)
        compute.gate.set()
        assert await first == [2]
        assert await asyncio.gather(*others) == [[2 * i] for i in range(2, 8)]
        assert compute.batches == [[1], [2, 3, 4, 5], [6, 7]]

    run(worker, test)


def test_a_lone_job_waits_for_nobody() -> None:
    """Nothing else is on its way, so a batch of one is computed although it could wait for an hour."""
    compute = Doubler()
    worker = make(compute, max_wait=3600)
    run(worker, lambda: _lone(worker))
    assert compute.batches == [[7]]


async def _lone(worker: Worker[int, int]) -> None:
    assert await asyncio.wait_for(ask(worker, 7), 10) == [14]


def test_a_batch_waits_for_jobs_on_their_way() -> None:
    compute = Doubler()
    worker = make(compute, max_wait=3600)

    async def late() -> list[int]:
        with worker.places(1) as places:  # admitted, but still being decoded
            await asyncio.sleep(0.1)
            return list(await asyncio.gather(*worker.submit([2], places)))

    async def test() -> None:
        assert await asyncio.wait_for(asyncio.gather(late(), ask(worker, 1)), 10) == [[4], [2]]
        assert compute.batches == [[1, 2]]

    run(worker, test)


def test_but_not_longer_than_it_may() -> None:
    compute = Doubler()
    worker = make(compute, max_wait=0.02)

    async def test() -> None:
        with worker.places(1):  # never submitted
            assert await asyncio.wait_for(ask(worker, 1), 10) == [2]

    run(worker, test)


def test_full_is_said_at_once_and_places_come_back() -> None:
    compute = Doubler()
    worker = make(compute, in_flight=3)

    async def test() -> None:
        compute.gate.clear()
        waiting = [asyncio.ensure_future(ask(worker, i)) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Problem) as refused:
            await ask(worker, 9)
        assert (refused.value.status, refused.value.response().headers["retry-after"]) == (503, "1")
        compute.gate.set()
        await asyncio.gather(*waiting)
        assert worker.taken == worker.coming == 0
        assert await ask(worker, 9) == [18]

    run(worker, test)


def test_cancelled_jobs_are_not_computed() -> None:
    compute = Doubler()
    worker = make(compute)

    async def test() -> None:
        compute.gate.clear()
        first = asyncio.ensure_future(ask(worker, 1))
        await until(lambda: bool(compute.batches))
        gone, stays = asyncio.ensure_future(ask(worker, 2)), asyncio.ensure_future(ask(worker, 3))
        await until(lambda: len(worker._queue) == 2)
        gone.cancel()
        await asyncio.sleep(0)
        compute.gate.set()
        assert (await first, await stays) == ([2], [6])
        assert compute.batches == [[1], [3]]
        assert worker.taken == 0

    run(worker, test)


def test_one_bad_job_does_not_spoil_the_batch() -> None:
    compute = Doubler()
    worker = make(compute)

    async def test() -> None:
        with worker.places(3) as places:
            found = await asyncio.gather(*worker.submit([1, 13, 2], places), return_exceptions=True)
        assert found[0::2] == [2, 4]
        assert isinstance(found[1], RuntimeError)
        assert await ask(worker, 5) == [10]

    run(worker, test)


def test_closing_computes_what_is_waiting_and_takes_no_more() -> None:
    compute = Doubler()
    worker = make(compute)

    async def test() -> None:
        compute.gate.clear()
        waiting = [asyncio.ensure_future(ask(worker, i)) for i in range(6)]
        await until(lambda: bool(compute.batches))
        closing = asyncio.ensure_future(asyncio.to_thread(worker.close))
        await until(lambda: worker._closing)
        with pytest.raises(Problem):
            await ask(worker, 9)
        compute.gate.set()
        assert await asyncio.gather(*waiting) == [[2 * i] for i in range(6)]
        await closing
        assert not worker.thread.is_alive()

    run(worker, test)


# --- the same through the whole application ----------------------------------------------------------


class Gated:
    """A runtime that waits for the test."""

    def __init__(self, real: Any) -> None:
        self.real, self.gate, self.sizes = real, threading.Event(), []
        self.name, self.device = "gated", real.device

    def run(self, images: Any) -> Any:
        self.sizes.append(len(images))
        assert self.gate.wait(20)
        return self.real.run(images)


def gated(**settings: Any) -> tuple[Any, Gated]:
    served = small_model()
    runtime = Gated(served.runtime)
    object.__setattr__(served, "runtime", runtime)
    return create_app([served], ServeSettings(**settings)), runtime


def test_requests_are_batched_shed_and_answered() -> None:
    app, runtime = gated(max_batch=4, queue=6)

    async def visit(client: httpx.AsyncClient) -> None:
        asked = [asyncio.ensure_future(client.post("/api/predict", content=image())) for _ in range(30)]
        await until(lambda: sum(task.done() for task in asked) == 20)  # ten fit: four computed and six waiting
        refused = [task.result() for task in asked if task.done()]
        assert {answer.status_code for answer in refused} == {503}
        assert {answer.headers["retry-after"] for answer in refused} == {"1"}
        assert (await client.get("/healthz")).status_code == 200  # while the model computes: the event loop is free
        waiting = app.state.service._predict["small"]._queue
        await until(lambda: len(waiting) + sum(runtime.sizes) == 10)  # all are decoded
        runtime.gate.set()
        answers = await asyncio.gather(*asked)
        assert sorted(answer.status_code for answer in answers) == [200] * 10 + [503] * 20
        assert sum(runtime.sizes) == 10
        assert max(runtime.sizes) == 4
        assert (await client.post("/api/predict", content=image())).status_code == 200

    with_client(app, visit)


def test_a_request_without_answer_is_given_up_and_its_images_dropped() -> None:
    app, runtime = gated(timeout=2.0, max_batch=1)
    runtime.gate.set()

    async def visit(client: httpx.AsyncClient) -> None:
        assert (await client.post("/api/predict", content=image())).status_code == 200  # decoding has started
        runtime.gate.clear()
        answers = await asyncio.gather(*(client.post("/api/predict", content=image()) for _ in range(5)))
        assert [answer.status_code for answer in answers] == [504] * 5
        assert "2 seconds" in answers[0].text
        runtime.gate.set()
        await until(lambda: app.state.service._predict["small"].taken == 0)
        assert (await client.post("/api/predict", content=image())).status_code == 200
        assert len(runtime.sizes) == 3  # the first, the one that had begun, and the last

    with_client(app, visit)


def test_more_images_than_fit_are_refused_as_a_whole() -> None:
    app, runtime = gated(max_batch=2, queue=2)
    runtime.gate.set()

    async def visit(client: httpx.AsyncClient) -> None:
        files = [("f", (f"{i}.png", image())) for i in range(5)]
        assert (await client.post("/api/predict", files=files)).status_code == 503
        assert (await client.post("/api/predict", files=files[:4])).status_code == 200

    with_client(app, visit)


def test_uploads_together_are_bounded() -> None:
    app, runtime = gated(max_buffered=3000, max_bytes=2500)

    async def visit(client: httpx.AsyncClient) -> None:
        body = image(kind="JPEG")[:2000]
        asked = [asyncio.ensure_future(client.post("/api/predict", content=image((20, 20), "JPEG"))) for _ in range(4)]
        await until(lambda: sum(task.done() for task in asked) >= 1)
        assert asked[-1].result().status_code == 503
        runtime.gate.set()
        await asyncio.gather(*asked)
        assert app.state.service.intake.buffered == 0
        assert (await client.post("/api/predict", content=body)).status_code in (200, 422)

    with_client(app, visit)
