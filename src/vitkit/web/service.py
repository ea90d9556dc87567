"""Requests -> answers: admission, decoding, computing, in that order, and nothing after the client has gone."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from fastapi import Request
from torch import Tensor

from vitkit.web.body import Intake, Upload, uploads
from vitkit.web.explaining import Question, explain
from vitkit.web.metrics import Metrics
from vitkit.web.models import Served, find_model
from vitkit.web.pictures import to_input, to_picture, to_png
from vitkit.web.problems import ClientGone, Problem
from vitkit.web.settings import ServeSettings
from vitkit.web.worker import Worker

T = TypeVar("T")
EXPLAIN_QUEUE = 16
SMALL = 2**18  # bytes


class Service:
    """The models with their workers. Made and used on one event loop; `close` blocks, and is called off it."""

    def __init__(self, models: Sequence[Served], settings: ServeSettings) -> None:
        self.models, self.settings = models, settings
        self.metrics, self.intake = Metrics(), Intake(settings)
        self.draining = False
        self.begun = self.answered = self.gone = 0  # requests: read, answered to the end, left by their clients
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="decode")
        self._predict: dict[str, Worker[Tensor, np.ndarray]] = {}
        self._explain: dict[str, Worker[tuple[Tensor, Question], tuple[bytes, str]]] = {}
        for served in models:
            measured = self.metrics.of_worker(served.name, "predict")
            self._predict[served.name] = Worker(
                "predict",
                served.probabilities,  # type: ignore[arg-type]
                measured,
                settings.max_batch,
                settings.max_wait,
                settings.in_flight,
            )
            measured = self.metrics.of_worker(served.name, "explain")
            one_by_one = _one_by_one(served)
            self._explain[served.name] = Worker("explain", one_by_one, measured, 1, 0.0, EXPLAIN_QUEUE)

    @property
    def _workers(self) -> list[Worker[Any, Any]]:
        return [*self._predict.values(), *self._explain.values()]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()

    def not_ready(self) -> str | None:
        """Why no work should be sent here, if so."""
        if self.draining:
            return "shutting down"
        alive = all(worker.alive for worker in self._workers)
        return None if alive else "a worker has stopped; start the server again"

    def model(self, name: str | None) -> Served:
        return find_model(self.models, name)

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def predict(self, request: Request, name: str | None, top: int, picture: bool, prepared: bool) -> bytes:
        served = self.model(name)
        if not served.classes and not picture:
            raise Problem(422, "no_classes", f"{served.name} has no classifier; /api/explain shows its attention")
        worker = self._predict[served.name]

        async def answer(found: list[Upload]) -> bytes:
            with worker.places(len(found)) as places:
                pixels = await self.in_thread(self._inputs, found, served, prepared)
                rows = await asyncio.gather(*worker.submit(pixels, places))
            if picture:
                return await self.in_thread(_predictions, served, found, rows, top, pixels)
            return _predictions(served, found, rows, top, None)

        return await self._answer(request, worker, answer, self.settings.max_pictures)

    async def explain(
        self, request: Request, name: str | None, question: Question, prepared: bool
    ) -> tuple[bytes, str]:
        served = self.model(name)
        served.vit  # noqa: B018 - a Problem when there is no attention
        worker = self._explain[served.name]

        async def answer(found: list[Upload]) -> tuple[bytes, str]:
            with worker.places(1) as places:
                (pixels,) = await self.in_thread(self._inputs, found, served, prepared)
                return await worker.submit([(pixels, question)], places)[0]

        return await self._answer(request, worker, answer, most=1)

    def _inputs(self, found: list[Upload], served: Served, prepared: bool) -> list[Tensor]:
        inputs = []
        for i, upload in enumerate(found):
            where = f"picture {i + 1} ({(upload.name or 'without a name')[:60]}): " if len(found) > 1 else ""
            inputs.append(to_input(upload, served.config, self.settings.max_pixels, prepared, where))
        return inputs

    async def _answer(
        self, request: Request, worker: Worker[Any, Any], answer: Callable[[list[Upload]], Awaitable[T]], most: int
    ) -> T:
        """Read the body, then compute, both within their time, and stop when the client hangs up."""
        with self.intake.reading() as held:
            body = await held.read(request)
            worker.check_room()  # a full server says so before it does anything
            kind = request.headers.get("content-type", "")
            if len(body) < SMALL:  # a thread would cost more than it saves
                found = uploads(kind, body, most)
            else:
                found = await self.in_thread(uploads, kind, body, most)
            work = asyncio.ensure_future(answer(found))
            gone = asyncio.ensure_future(_disconnected(request))
            try:
                await asyncio.wait({work, gone}, timeout=self.settings.timeout, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    return work.result()
                if gone.done():
                    raise ClientGone
                told = f"no answer within {self.settings.timeout:g} seconds; the server has too much to do"
                raise Problem(504, "timeout", told)
            finally:
                work.cancel()
                gone.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _one_by_one(served: Served) -> Callable[[list[tuple[Tensor, Question]]], list[tuple[bytes, str]]]:
    return lambda jobs: [explain(served, *job) for job in jobs]


def _predictions(
    served: Served, found: list[Upload], rows: Sequence[np.ndarray], top: int, pixels: list[Tensor] | None
) -> bytes:
    """The answer's body; with `pixels`, also each picture as the model sees it."""
    told = []
    for i, (upload, row) in enumerate(zip(found, rows, strict=True)):
        if not np.isfinite(row).all():
            raise Problem(500, "not_finite", "the model's answer is no finite number; its weights may be damaged")
        best: Sequence[int] = np.argsort(-row, kind="stable")[:top].tolist() if served.classes else []
        ranked = [{"class": c, "name": served.classes[c], "probability": float(f"{row[c]:.6g}")} for c in best]
        one: dict[str, Any] = {"file": upload.name, "classes": ranked}
        if pixels is not None:
            shown = to_picture(pixels[i]) if len(pixels[i]) == 3 else pixels[i][0].numpy()
            one["picture"] = f"data:image/png;base64,{base64.b64encode(to_png(shown)).decode()}"
        told.append(one)
    return json.dumps({"model": served.name, "predictions": told}, ensure_ascii=False).encode(errors="replace")
