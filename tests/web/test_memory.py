"""The server's memory: freed blocks go back to the system, and what was loaded is not searched for garbage."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from types import SimpleNamespace

import psutil  # type: ignore[import-untyped]
import pytest

from forks import Forks
from vitkit.web import server
from vitkit.web.memory import freeze_loaded, return_freed
from vitkit.web.settings import ServeSettings

glibc = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc"
)


def held_and_freed() -> list[float]:
    """MB of this process: before, with what 300 uploads leave in the heap, after they were freed, and returned."""
    own, kept, megabytes = psutil.Process(), list[bytearray](), list[float]()

    def note() -> None:
        megabytes.append(own.memory_info().rss / 2**20)

    gc.disable()
    note()
    ctypes.CDLL(None).mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: what glibc learns from a large block that is freed
    blocks = [bytearray(b"x" * 500_000) for _ in range(300)]
    kept.append(blocks.pop())  # one above all others
    note()
    blocks.clear()
    note()
    return_freed()
    note()
    return megabytes


@glibc
def test_what_uploads_held_goes_back_to_the_system() -> None:
    forks = Forks("test_memory")
    try:
        ended = forks("test_memory:held_and_freed", seconds=600.0)
    finally:
        forks.close()
    assert ended.code == 0, ended.err
    before, full, freed, returned = ended.value  # type: ignore[misc]
    assert full > before + 130
    assert freed > before + 100  # why it has to be asked for
    assert returned < before + 30


def test_a_running_server_returns_memory_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(server, "return_freed", lambda: calls.append(1))

    async def ticks() -> None:
        service = SimpleNamespace(settings=ServeSettings())
        app = SimpleNamespace(state=SimpleNamespace(service=service))
        running = server.Server(server.uvicorn.Config(app, lifespan="off"))  # type: ignore[arg-type]
        for counter in range(101):
            await running.on_tick(counter)
        await running._trimming

    asyncio.run(ticks())
    assert len(calls) == 3


def test_what_was_loaded_is_not_searched_again() -> None:
    before = gc.get_freeze_count()
    try:
        freeze_loaded()
        assert gc.get_freeze_count() > before + 10_000
    finally:
        gc.unfreeze()
