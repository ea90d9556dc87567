"""Requests -> answers: admission, decoding, computing, in that order, and nothing after the client has gone."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from fastapi import Request
from starlette.requests import ClientDisconnect
from torch import Tensor

from vitkit.io import dumps
from vitkit.model.config import AnyConfig
from vitkit.web.answers import Problem
from vitkit.web.body import Intake, Upload, to_png, uploads
from vitkit.web.decoding import Decoders
from vitkit.web.explaining import Explained, Question, explain
from vitkit.web.explored import Explored, from_pixels
from vitkit.web.models import Served
from vitkit.web.settings import ServeSettings
from vitkit.web.tensors import InferRequest
from vitkit.web.worker import Metrics, Worker

T = TypeVar("T")
J = TypeVar("J")  # what a worker computes
R = TypeVar("R")  # what comes of it
P = TypeVar("P")  # what a body holds
AnyWorker = Worker[Tensor, Tensor] | Worker[tuple[Tensor, Question], Explained]
EXPLAIN_QUEUE = 16
SMALL = 2**18  # bytes of a body: a thread would cost more than it saves


class Service:
    """The models with their workers. Made and used on one event loop; `close` blocks, and is called off it."""

    def __init__(self, models: Sequence[Served], settings: ServeSettings, data: Explored | None = None) -> None:
        self.models, self.settings, self.data = models, settings, data
        self.metrics, self.intake = Metrics(), Intake(settings)
        self.draining = False
        self.begun = self.answered = self.gone = 0  # requests: read, answered to the end, left by their clients
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="service")
        self.decoders = Decoders(settings, self._threads)
        self._predict = {served.name: self._predictor(served) for served in models}
        self._explain = {served.name: self._explainer(served) for served in models}
        self._search = [self._searcher(data)] if data is not None else []
        self.workers: list[AnyWorker] = [*self._predict.values(), *self._explain.values(), *self._search]

    def _predictor(self, served: Served) -> Worker[Tensor, Tensor]:
        measured, batch = self.metrics.workers.of(served.name, "predict"), self.settings.max_batch
        in_flight = self.settings.queue + batch  # anywhere between being read and being answered
        return Worker("predict", served.logits, measured, batch, self.settings.max_wait, in_flight)

    def _explainer(self, served: Served) -> Worker[tuple[Tensor, Question], Explained]:
        measured = self.metrics.workers.of(served.name, "explain")
        return Worker("explain", lambda jobs: [explain(served, *job) for job in jobs], measured, 1, 0.0, EXPLAIN_QUEUE)

    def _searcher(self, data: Explored) -> Worker[Tensor, Tensor]:
        measured = self.metrics.workers.of("data", "search")
        return Worker("search", data.embed, measured, self.settings.max_batch, self.settings.max_wait, EXPLAIN_QUEUE)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.decoders.close()
        self._threads.shutdown()

    def model(self, name: str | None) -> Served:
        for served in self.models:
            if name in (None, served.name):
                return served
        if not self.models:
            raise Problem(404, "no_model", "no model is served here; start with vitkit serve MODEL --index INDEX")
        known = ", ".join(served.name for served in self.models)
        raise Problem(422, "no_model", f"model={str(name)[:60]!r} is not served here; there is {known}")

    def check_ready(self) -> None:
        if self.draining or not all(worker.thread.is_alive() for worker in self.workers):
            why = "shutting down" if self.draining else "a worker has stopped; start the server again"
            raise Problem(503, "not_ready", why)

    async def in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def predict(self, request: Request, served: Served, top: int, image: bool, prepared: bool) -> bytes:
        if not served.names and not image:
            raise Problem(422, "no_classes", f"{served.name} has no classifier; /api/explain shows its attention")
        worker = self._predict[served.name]

        async def answer(files: list[Upload]) -> bytes:
            rows, pixels = await self._compute(worker, files, served.model.config, prepared, lambda pixels: pixels)
            body = partial(_predictions, served, files, rows, top, pixels if image else [])
            return await self.in_thread(body) if image else body()

        return await self._answer(request, worker, answer, self._images_of(request, self.settings.max_pictures))

    async def infer(
        self, request: Request, served: Served, read: Callable[[bytes], InferRequest]
    ) -> tuple[InferRequest, list[Tensor]]:
        """The tensors of a request, and a row of outputs for each image in them."""
        worker = self._predict[served.name]

        async def answer(asked: InferRequest) -> tuple[InferRequest, list[Tensor]]:
            if asked.prepared is None:
                rows, _ = await self._compute(worker, asked.files, served.model.config, False, lambda pixels: pixels)
                return asked, rows
            with worker.places(asked.count) as places:
                jobs = torch.from_numpy(asked.prepared.astype(np.float32)).unbind()
                return asked, await asyncio.gather(*worker.submit(jobs, places))

        return await self._answer(request, worker, answer, read)

    async def explain(self, request: Request, served: Served, question: Question, prepared: bool) -> Explained:
        served.vit  # noqa: B018 - a Problem when there is no attention
        worker = self._explain[served.name]

        async def answer(files: list[Upload]) -> Explained:
            jobs = partial(map, lambda pixels: (pixels, question))
            (explained,), _ = await self._compute(worker, files, served.model.config, prepared, jobs)
            return explained

        return await self._answer(request, worker, answer, self._images_of(request, 1))

    async def search(self, request: Request, data: Explored, top: int) -> list[dict[str, object]]:
        async def answer(files: list[Upload]) -> list[dict[str, object]]:
            (features,), _ = await self._compute(
                self._search[0], files, data.embedder.config, False, lambda pixels: pixels
            )
            return await self.in_thread(partial(data.search, features, top))

        return await self._answer(request, self._search[0], answer, self._images_of(request, 1))

    async def set_image(self, data: Explored, row: int, longest: int) -> bytes:
        """An image of the served set as a JPEG."""
        if (held := await self.in_thread(partial(data.in_memory, row))) is not None:
            return held
        upload, wanted = await self.in_thread(partial(data.encoded, row, longest))
        reading = self.decoders.read([upload], wanted, False)
        if not await reading.small():
            await reading.large()
        return await self.in_thread(partial(from_pixels, reading.pixels[0]))

    async def _compute(
        self,
        worker: Worker[J, R],
        files: list[Upload],
        config: AnyConfig,
        prepared: bool,
        jobs: Callable[[list[Tensor]], Iterable[J]],
    ) -> tuple[list[R], list[Tensor]]:
        """What comes of each image, and its pixels. Large images are decoded without a place in the queue."""
        reading = self.decoders.read(files, config, prepared)
        with worker.places(len(files)) as places:
            if await reading.small():
                return await asyncio.gather(*worker.submit(list(jobs(reading.pixels)), places)), reading.pixels
        await reading.large()
        with worker.places(len(files)) as places:
            return await asyncio.gather(*worker.submit(list(jobs(reading.pixels)), places)), reading.pixels

    def _images_of(self, request: Request, most: int) -> Callable[[bytes], list[Upload]]:
        return lambda body: uploads(request.headers.get("content-type", ""), body, most)

    async def _answer(
        self, request: Request, worker: AnyWorker, answer: Callable[[P], Awaitable[T]], read: Callable[[bytes], P]
    ) -> T:
        """Read the body, then compute, both within their time, and stop when the client hangs up."""
        async with self.intake.body(request) as body:
            worker.check_room()  # a full server says so before it does anything
            asked = read(body) if len(body) < SMALL else await self.in_thread(partial(read, body))
            work, gone = asyncio.ensure_future(answer(asked)), asyncio.ensure_future(_disconnected(request))
            try:
                await asyncio.wait({work, gone}, timeout=self.settings.timeout, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    return work.result()
                if gone.done():
                    raise ClientDisconnect
                seconds = f"{self.settings.timeout:g} seconds"
                raise Problem(504, "timeout", f"no answer within {seconds}; the server has too much to do")
            finally:
                work.cancel()
                gone.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _predictions(served: Served, files: list[Upload], rows: list[Tensor], top: int, pixels: list[Tensor]) -> bytes:
    """The answer's body; with `pixels`, also each image as the model sees it."""
    outputs = torch.stack(rows)
    if not outputs.isfinite().all():
        raise Problem(500, "not_finite", "the model's answer is no finite number; its weights may be damaged")
    found = zip(files, served.task.answers(outputs, top), strict=True)
    answers: list[dict[str, object]] = [{"file": upload.name, **row} for upload, row in found]
    for answer, image in zip(answers, pixels, strict=False):
        png = to_png(image.permute(1, 2, 0).squeeze(2).numpy())
        answer["picture"] = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return dumps({"model": served.name, "predictions": answers}).encode(errors="replace")
