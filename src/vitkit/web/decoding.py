"""Uploads -> the tensors a model wants, decoded by processes that may die: each costs its own request at most.

Two lanes. Most images are small, and go through the quick one. One that is much work (known from its header) is not
begun there: it waits for the slow lane, which has fewer processes that give way to all others, takes a bounded
number of pixels at once and refuses the rest. So nobody who sends small images waits for those who send large ones.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import cache

import numpy as np
import torch
from torch import Tensor

from vitkit.web import decoder
from vitkit.web.answers import Problem
from vitkit.web.body import Upload
from vitkit.web.decoder import HEAD, LARGE, PIXELS, Job, Limits, Target
from vitkit.web.settings import ServeSettings

SMALL = 4_000_000  # pixels that the quick lane decodes: less than 0.2 seconds of CPU
QUICK = Limits(bytes=512 * 2**20, seconds=3)
SLOW = Limits(bytes=2 * 2**30, seconds=20, nice=10)
GRACE = 0.25  # seconds for finishing an image that nobody waits for any more: cheaper than a new process
TRIES = 3  # a process may have been killed by somebody else
_starting = threading.Lock()
_alive: weakref.WeakSet[Decoder] = weakref.WeakSet()


@cache
def _context() -> multiprocessing.context.BaseContext:
    """Processes are forked from one that has imported everything and has no threads; spawned where there is no fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([decoder.__name__])
    return context


class Died(Exception):
    """A process ended while it decoded."""

    def __init__(self, code: int | None) -> None:
        self.out_of_time = code == -getattr(signal, "SIGXCPU", 0) and code != 0


class Decoder:
    """One process. `ask` may be called again once it has returned."""

    def __init__(self, limits: Limits) -> None:
        self.socket, theirs = socket.socketpair()
        with _starting, theirs:  # the first one waits for the process that all are forked from
            self.process = _context().Process(target=decoder.run, args=(theirs, limits), daemon=True)  # type: ignore[attr-defined]
            self.process.start()
        self.socket.setblocking(False)
        _alive.add(self)

    async def ask(self, job: bytes, data: bytes) -> tuple[bytes, int, bytes]:
        """(which, work, what follows), or `Died`."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.socket, struct.pack(">IQ", len(job), len(data)) + job)
            await loop.sock_sendall(self.socket, data)
            which, work, length = HEAD.unpack(await self._read(HEAD.size))
            return which, work, await self._read(length)
        except (OSError, EOFError):
            await loop.run_in_executor(None, self.process.join, 1)
            raise Died(self.process.exitcode) from None

    async def _read(self, length: int) -> bytes:
        held, at, loop = bytearray(length), 0, asyncio.get_running_loop()
        while at < length:
            got = await loop.sock_recv_into(self.socket, memoryview(held)[at:])
            if not got:
                raise EOFError
            at += got
        return bytes(held)

    def end(self) -> None:
        _alive.discard(self)
        self.socket.close()
        self.process.kill()
        self.process.join()
        self.process.close()


@atexit.register
def _end_all() -> None:
    """Before multiprocessing asks them politely, which they do not hear."""
    for one in list(_alive):
        one.end()


class Lane:
    """So many processes with the same limits, started when they are needed and replaced when they die."""

    def __init__(self, count: int, limits: Limits, threads: Executor | None = None) -> None:
        self.count, self.limits, self.threads = count, limits, threads
        self.idle: list[Decoder] = []
        self.replaced = 0  # processes that died or were ended
        self._free = asyncio.Semaphore(count)
        self._closed = False

    async def ask(self, job: bytes, data: bytes) -> tuple[bytes, int, bytes]:
        async with self._free:
            one = self._living() or await self._start()
            asked = asyncio.ensure_future(one.ask(job, data))
            try:
                return await asyncio.shield(asked)
            finally:  # also when nobody waits any more
                if not asked.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait({asked}, timeout=GRACE)
                asked.cancel()
                self._back(one, whole=asked.done() and not asked.cancelled() and asked.exception() is None)

    def _living(self) -> Decoder | None:
        while self.idle:
            one = self.idle.pop()
            if one.process.is_alive():
                return one
            self._back(one, whole=False)
        return None

    async def _start(self) -> Decoder:
        starting = asyncio.get_running_loop().run_in_executor(self.threads, Decoder, self.limits)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # it starts all the same: for the next one
            starting.add_done_callback(lambda done: self._back(done.result(), whole=True))
            raise

    def _back(self, one: Decoder, whole: bool) -> None:
        if whole and not self._closed and len(self.idle) < self.count:
            self.idle.append(one)
        else:
            self.replaced += 1
            threading.Thread(target=one.end, daemon=True).start()  # the kernel may take a while to free its memory

    def start(self) -> None:
        """All processes now, so that the first requests need not wait for them. Blocks."""
        while len(self.idle) < self.count:
            self.idle.append(Decoder(self.limits))

    def close(self) -> None:
        self._closed = True
        while self.idle:
            self.idle.pop().end()


class Decoders:
    """Both lanes, and what the slow one has taken on."""

    def __init__(self, settings: ServeSettings, threads: Executor) -> None:
        self.settings = settings
        count = max(2, min(8, os.cpu_count() or 1))
        self.quick, self.slow = Lane(count, QUICK, threads), Lane(max(1, count // 4), SLOW, threads)
        self.taken = 0  # pixels that the slow lane has taken on

    def read(self, files: Sequence[Upload], config: Target, prepared: bool) -> Reading:
        return Reading(self, files, config, prepared)

    def close(self) -> None:
        self.quick.close()
        self.slow.close()


class Reading:
    """The images of one request on their way to tensors: first `small`, then `large`. It can be cancelled anywhere."""

    def __init__(self, decoders: Decoders, files: Sequence[Upload], config: Target, prepared: bool) -> None:
        self.decoders, self.files, self.most = decoders, files, decoders.settings.max_request_pixels
        self.shape = (config.channels, *config.preprocessing.size)
        each = decoders.settings.max_pixels
        self.jobs = [pickle.dumps(Job.of(config, prepared, each, work)) for work in (min(SMALL, self.most), self.most)]
        self.done: list[Tensor | None] = []
        self.work = 0  # of all images, in pixels
        self.left = 0  # of those that are left for the slow lane

    async def small(self) -> bool:
        """Decode what the quick lane takes; whether that was all."""
        for number in range(len(self.files)):
            work, pixels = await self._ask(self.decoders.quick, self.jobs[0], number)
            self.work += work
            self.left += 0 if pixels is not None else work
            self.done.append(pixels)
            if self.work > self.most:
                many = f"the images have more than {self.most:,} pixels together (a slow format counts several times)"
                raise Problem(422, "too_many_pixels", f"{many}; send them in several requests, or smaller ones")
        return self.left == 0

    async def large(self) -> None:
        """Decode the rest, when the slow lane has room for it."""
        if self.decoders.taken + self.left > self.decoders.settings.max_total_pixels:
            raise Problem(503, "busy", "too many large images are being decoded; try again in a second")
        self.decoders.taken += self.left
        try:
            for number, pixels in enumerate(self.done):
                if pixels is None:
                    _, self.done[number] = await self._ask(self.decoders.slow, self.jobs[1], number)
        finally:
            self.decoders.taken -= self.left

    @property
    def pixels(self) -> list[Tensor]:
        """uint8 C H W of each image."""
        return [pixels for pixels in self.done if pixels is not None]

    async def _ask(self, lane: Lane, job: bytes, number: int) -> tuple[int, Tensor | None]:
        """(work, pixels) of an image; no pixels when it is too much work for this lane."""
        name = (self.files[number].name or "without a name")[:60]
        where = f"image {number + 1} ({name}): " if len(self.files) > 1 else ""
        for tries_left in reversed(range(TRIES)):
            try:
                which, work, body = await lane.ask(job, self.files[number].data)
                break
            except Died as e:
                if e.out_of_time:
                    raise Problem(422, "bad_image", f"{where}the image takes too long to decode") from None
                if not tries_left:
                    raise Problem(422, "bad_image", f"{where}the image ends the process that decodes it") from None
        if which == LARGE:
            return work, None
        if which == PIXELS and len(body) == np.prod(self.shape):
            return work, torch.frombuffer(bytearray(body), dtype=torch.uint8).view(self.shape)
        status, code, reason = json.loads(body)
        raise Problem(int(status), str(code), f"{where}{reason}")
