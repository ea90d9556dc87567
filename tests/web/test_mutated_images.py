"""Thousands of damaged images: each gets a sentence or a valid answer, the process lives, memory stays flat."""

from __future__ import annotations

import asyncio
import os

import httpx
import numpy as np
import psutil
import pytest
from serving import image, small_model, with_client

from vitkit.web.app import create_app
from vitkit.web.settings import ServeSettings

KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


def mutate(data: bytes, random: np.random.Generator) -> bytes:
    """One of the ways in which files go wrong, or are made to."""
    body = bytearray(data)
    way = random.integers(7)
    if way == 0:  # cut short
        return bytes(body[: random.integers(len(body))])
    if way == 1:  # a few bytes differ
        for _ in range(random.integers(1, 12)):
            body[random.integers(len(body))] = random.integers(256)
    elif way == 2:  # the header differs: sizes, depths, offsets
        for _ in range(random.integers(1, 6)):
            body[random.integers(min(64, len(body)))] = random.integers(256)
    elif way == 3:  # large numbers where lengths stand
        at = int(random.integers(max(1, min(200, len(body)) - 4)))
        body[at : at + 4] = random.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\x80\0\0\0"])
    elif way == 4:  # a piece is repeated
        a, b = sorted(random.integers(len(body), size=2))
        body[a:a] = body[a:b] * int(random.integers(1, 4))
    elif way == 5:  # a piece is missing
        a, b = sorted(random.integers(len(body), size=2))
        del body[a:b]
    else:  # noise in the middle
        a, b = sorted(random.integers(len(body), size=2))
        body[a:b] = random.bytes(int(b - a))
    return bytes(body)


async def throw(client: httpx.AsyncClient, count: int, seed: int) -> dict[int, int]:
    """Send mutated images, eight at a time; how often each status came."""
    random = np.random.default_rng(seed)
    whole = [image(kind=kind, seed=i, size=(37 + 9 * i, 50)) for i in range(3) for kind in KINDS]
    bodies = [mutate(whole[i % len(whole)], random) for i in range(count)]
    seen: dict[int, int] = {}
    for start in range(0, count, 8):
        paths = ["/api/predict" if i % 3 else "/api/explain?method=rollout" for i in range(start, start + 8)]
        answers = await asyncio.gather(
            *(client.post(p, content=b) for p, b in zip(paths, bodies[start : start + 8], strict=False))
        )
        for answer in answers:
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            told = answer.json()
            assert told["error"]["message"] if answer.status_code != 200 else "model" in told
    return seen


def megabytes() -> float:
    return psutil.Process(os.getpid()).memory_info().rss / 2**20


def check(count: int, most_growth: float) -> None:
    app = create_app([small_model()], ServeSettings(max_pixels=4_000_000))

    async def visit(client: httpx.AsyncClient) -> None:
        await throw(client, 100, seed=1)  # every decoder has been used once
        before = megabytes()
        seen = await throw(client, count, seed=2)
        assert set(seen) <= {200, 413, 415, 422}, seen
        assert seen.keys() >= {200, 415, 422}, f"the mutations are too weak or too strong: {seen}"
        assert megabytes() - before < most_growth
        assert (await client.post("/api/predict", content=image())).status_code == 200

    with_client(app, visit)


def test_some_mutated_images() -> None:
    check(240, most_growth=100)


@pytest.mark.slow
def test_five_thousand_mutated_images() -> None:
    """Flat: 100 MB is what a few images of the largest allowed size take while they are decoded."""
    check(5000, most_growth=100)
