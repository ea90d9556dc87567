"""Images are decoded by processes that may die: what a bomb or a crash costs, and whom it does not concern."""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import os
import signal
import struct
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import dying
import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from serving import MODEL, image, images_of, message, with_client

from vitkit.web import decoding
from vitkit.web.app import create_app
from vitkit.web.body import Upload
from vitkit.web.decoder import LARGE, REFUSED, Job, answer, work
from vitkit.web.decoder import header as header_of
from vitkit.web.decoding import Decoder, Died, Lane, Limits
from vitkit.web.settings import ServeSettings


def deep_png(side: int) -> bytes:
    """16-bit grey of one value: megapixels in kilobytes."""
    out = io.BytesIO()
    Image.fromarray(np.full((side, side), 40_000, dtype=np.uint16)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def visit(use: Callable[[httpx.AsyncClient, Any], Awaitable[None]], **settings: Any) -> None:
    app = create_app((MODEL,), ServeSettings(**settings))
    with_client(app, lambda client: use(client, app.state.service))


async def until(true: Callable[[], Any]) -> None:
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to that")


def form(*images: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("f", (f"{i}.png", data)) for i, data in enumerate(images)]


@pytest.mark.slow
def test_spawned_processes_decode_as_forked_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows and macOS: every decoding process imports everything itself."""
    answers = []

    async def use(client: httpx.AsyncClient, service: Any) -> None:
        found = await client.post("/api/predict", files=form(image()))
        assert found.status_code == 200
        answers.append(found.json())

    visit(use)
    monkeypatch.setattr(decoding, "_context", lambda: multiprocessing.get_context("spawn"))
    visit(use)
    assert answers[0] == answers[1]


def test_the_pixels_of_a_request_are_bounded_before_any_is_decoded() -> None:
    bomb = deep_png(2100)  # 4.4 million pixels: for the slow lane

    async def use(client: httpx.AsyncClient, service: Any) -> None:
        answer = await client.post("/api/predict", files=form(*[bomb] * 3))
        assert "10,000,000 pixels together" in message(answer, 422, "too_many_pixels")
        assert not service.decoders.slow.idle, "a process for large images was started"
        assert (await client.post("/api/predict", files=form(bomb, image(), bomb))).status_code == 200

    visit(use, max_request_pixels=10_000_000)


def test_large_images_of_all_requests_are_bounded_and_hold_no_place() -> None:
    """One request fills the slow lane: another large image is refused, small ones are served meanwhile."""
    bomb = deep_png(2100)

    async def use(client: httpx.AsyncClient, service: Any) -> None:
        lane = service.decoders.slow
        async with lane._free:  # somebody else's image
            first = asyncio.ensure_future(client.post("/api/predict", files=form(bomb, image())))
            await until(lambda: service.decoders.taken)
            assert service._predict["small"].taken == 0
            assert "large images" in message(await client.post("/api/predict", content=bomb), 503, "busy")
            assert (await client.post("/api/predict", content=image())).status_code == 200
        assert (await first).status_code == 200
        assert service.decoders.taken == 0

    visit(use, max_request_pixels=8_000_000, max_total_pixels=8_000_000)


def test_large_and_small_images_give_what_the_library_gives() -> None:
    data = [image((2300, 2000), "JPEG"), image(), deep_png(2100)]

    async def use(client: httpx.AsyncClient, service: Any) -> None:
        rows = (await client.post("/api/predict?top=9", files=form(*data))).json()["predictions"]
        for row, one in zip(rows, data, strict=True):
            with torch.no_grad():
                wanted = MODEL.model(images_of(MODEL, one)).softmax(-1)[0]
            for rank in row["classes"]:
                assert rank["probability"] == pytest.approx(float(wanted[rank["class"]]), abs=1e-6)

    visit(use)


def test_nothing_is_decoded_when_nobody_waits_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "GRACE", 0.0)

    async def use(client: httpx.AsyncClient, service: Any) -> None:
        decoders, bomb = service.decoders, deep_png(6000)  # more than a second of work
        reading = decoders.read([Upload(None, bomb)] * 4, MODEL.model.config, False)
        assert not await reading.small()
        rest = asyncio.ensure_future(reading.large())
        await until(lambda: set(decoding._alive) - others - set(decoders.quick.idle))
        await asyncio.sleep(0.1)  # it decodes
        rest.cancel()
        await asyncio.gather(rest, return_exceptions=True)
        assert decoders.taken == 0
        assert decoders.slow.replaced == 1
        await until(lambda: not set(decoding._alive) - others - set(decoders.quick.idle))  # the process has ended

    others = set(decoding._alive)
    visit(use)


def test_processes_that_were_killed_are_replaced() -> None:
    async def use(client: httpx.AsyncClient, service: Any) -> None:
        lane = service.decoders.quick
        for sent in (signal.SIGKILL, signal.SIGSEGV):
            lane.start()
            for one in lane.idle:
                os.kill(one.process.pid, sent)
                one.process.join()
            assert (await client.post("/api/predict", content=image())).status_code == 200
        assert lane.replaced == 2 * lane.count

    visit(use)


def test_a_decoder_that_crashes_costs_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    real = decoding.decoder.run

    async def use(client: httpx.AsyncClient, service: Any) -> None:
        monkeypatch.setattr(decoding.decoder, "run", dying.crash)
        answer = await client.post("/api/predict", content=image())
        assert "ends the process" in message(answer, 422, "bad_image")
        monkeypatch.setattr(decoding.decoder, "run", real)
        assert (await client.post("/api/predict", content=image())).status_code == 200

    visit(use)


@pytest.mark.slow  # a second of CPU
def test_the_kernel_ends_what_takes_too_much_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding.decoder, "run", dying.burn)

    async def use(client: httpx.AsyncClient, service: Any) -> None:
        assert "too long" in message(await client.post("/api/predict", content=image()), 422, "bad_image")

    visit(use)


def test_memory_is_bounded_also_when_a_header_lies() -> None:
    """An icon that says 32x32 and holds a PNG of 100 million pixels."""
    scanlines = zlib.compress(b"\0" * (1250 + 1) * 10_000)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 10_000, 10_000, 1, 0, 0, 0, 0)), (b"IDAT", scanlines), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    icon = struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 32, 32, 0, 0, 1, 1, len(png), 22) + png

    async def use() -> None:
        lane = Lane(1, Limits(bytes=64 * 2**20, seconds=30))
        job = Job.of(MODEL.model.config, False, 50_000_000, 50_000_000)
        try:
            which, _, body = await lane.ask(decoding.pickle.dumps(job), icon)
            assert (which, b"memory" in body) == (REFUSED, True)
            assert lane.replaced == 0, "the process is as good as before"
        finally:
            lane.close()

    asyncio.run(use())


def test_work_is_known_from_the_header() -> None:
    job = Job.of(MODEL.model.config, False, 50_000_000, 1_000_000)
    plain = image((400, 300), "JPEG")
    assert work(header_of(plain), plain) == 120_000
    scans = plain[:-2] + b"\xff\xda" * 320 + plain[-2:]  # each scan costs as much as the image
    assert work(header_of(scans), scans) == 120_000 * 20
    assert answer(job, scans)[:1] == LARGE
    slow = image((400, 300), "JPEG2000")
    assert work(header_of(slow), slow) == 8 * 120_000


def test_a_closed_lane_leaves_no_process() -> None:
    async def use() -> int:
        lane = Lane(1, Limits(bytes=2**29, seconds=3))
        await lane.ask(decoding.pickle.dumps(Job.of(MODEL.model.config, False, 10**7, 10**6)), image())
        pid = lane.idle[0].process.pid
        lane.close()
        return pid

    pid = asyncio.run(use())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_decoder_says_that_it_died() -> None:
    async def use() -> None:
        one = Decoder(Limits(bytes=2**29, seconds=3))
        one.process.kill()
        one.process.join()
        with pytest.raises(Died):
            await one.ask(b"job", b"data")
        one.end()

    asyncio.run(use())
