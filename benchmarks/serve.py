"""Serving under load, on this machine alone: a server in its own process, a bounded generator in this one.

What is measured, and what we hold ourselves to:

throughput   32 clients, one image each, again and again: at least 0.85 of the raw runtime's img/s
             at the same batch (in a process of its own, before and after each of four turns; the median turn counts)
half load    images arrive at random, half as many as that: 99% are answered within two batch times
overload     four times as many: the surplus is refused with 503, and those served take hardly longer than
             with 32 clients (at most 1.75 times: 48 images may be on their way instead of 32)
memory       20,000 requests to a small model: the process is no larger after the last than after 4,000 (within 5%)
SIGTERM      during full load: every request that was accepted is answered (by the server's own count, and on every
             connection that was answered before), and the process ends with code 0. A connection that stood in the
             kernel's queue at the moment the door was closed was never accepted; those are counted apart

Latencies count from the moment an image should have been sent, so a stalled generator cannot hide a stalled server.

    python -m benchmarks.serve              # about five minutes on 2 cores
    python -m benchmarks.serve --quick      # one minute, a tiny model: only shows that it works
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parent))
from harness import machine, save, table

BATCH, CLIENTS, QUEUE = 16, 32, 32
TURNS = 4
LIMITS = {"throughput": 0.85, "half load": 2.0, "overload": 1.75, "memory": 1.05, "SIGTERM": 0}


# --- the generator -----------------------------------------------------------------------------------


@dataclass
class Seen:
    """What clients saw."""

    statuses: dict[int, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # of those that were served
    lost: int = 0  # sent on a connection that had been answered before, and no answer came
    turned_away: int = 0  # a new connection that was reset before anything came

    def note(self, status: int, seconds: float) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status == 200:
            self.seconds.append(seconds)

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.seconds, share)) if self.seconds else float("nan")


class Connection:
    """One kept-alive connection. Written by hand, because the generator shares the machine with the server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes) -> int:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        head = f"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = re.search(rb"content-length: (\d+)", answer)
        await reader.readexactly(int(length[1]) if length else 0)
        if b"connection: close" in answer:
            self.close()
        return int(answer.split(b" ", 2)[1])

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


async def closed_loop(port: int, bodies: list[bytes], clients: int, until: float | int) -> tuple[Seen, float]:
    """Each client asks again as soon as it is answered, for so many seconds (float) or requests in all (int)."""
    seen, start, begun = Seen(), time.perf_counter(), 0

    async def client(number: int) -> None:
        nonlocal begun
        connection, turn = Connection(port), number
        while (time.perf_counter() - start < until) if isinstance(until, float) else begun < until:
            begun, turn, sent = begun + 1, turn + 1, time.perf_counter()
            seen.note(await connection.post(bodies[turn % len(bodies)]), time.perf_counter() - sent)
        connection.close()

    await asyncio.gather(*(client(i) for i in range(clients)))
    return seen, time.perf_counter() - start


async def open_loop(port: int, bodies: list[bytes], rate: float, seconds: float) -> Seen:
    """Images arrive at random, however long the answers take."""
    seen, idle, tasks = Seen(), [], set()
    chance = random.Random(0)

    async def one(due: float, body: bytes) -> None:
        connection = idle.pop() if idle else Connection(port)
        seen.note(await connection.post(body), time.perf_counter() - due)
        idle.append(connection)

    start = due = time.perf_counter()
    while due < start + seconds:
        due += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.ensure_future(one(due, chance.choice(bodies)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return seen


async def terminated(server: Running, bodies: list[bytes], seconds: float) -> tuple[Seen, int, float, bool]:
    """Full load, SIGTERM in the middle of it; clients go on until they are refused a connection."""
    seen = Seen()

    async def client(number: int) -> None:
        connection = Connection(server.port)
        while True:
            sent, used = time.perf_counter(), connection.streams is not None
            try:
                seen.note(await connection.post(bodies[number % len(bodies)]), time.perf_counter() - sent)
            except ConnectionRefusedError:
                return
            except (OSError, EOFError):
                seen.lost += used
                seen.turned_away += not used
                return

    clients = [asyncio.ensure_future(client(i)) for i in range(CLIENTS)]
    await asyncio.sleep(seconds)
    start = time.perf_counter()
    server.process.send_signal(signal.SIGTERM)
    await asyncio.gather(*clients)
    code = await asyncio.to_thread(server.process.wait, 60)
    assert server.process.stderr is not None
    kept_word = "every accepted request was answered" in server.process.stderr.read()
    return seen, code, time.perf_counter() - start, kept_word


# --- the server --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    port: int

    def megabytes(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20


@contextmanager
def serving(model: Path, runtime: str) -> Iterator[Running]:
    options = ["--runtime", runtime, "--max-batch", str(BATCH), "--queue", str(QUEUE), "--port", "0"]
    command = [sys.executable, "-m", "vitkit", "serve", str(model), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"serving on http://[^:]+:(\d+)/", line):
                yield Running(process, int(found[1]))
                return
        raise RuntimeError("the server did not start")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def checkpoint(name: str, folder: Path) -> Path:
    """Fresh weights are as fast as trained ones."""
    import vitkit

    path = folder / f"{name.replace('/', '-')}.safetensors"
    vitkit.save(vitkit.create(name, classes=1000), path)
    return path


def images(count: int = 16, side: tuple[int, int] = (256, 256)) -> list[bytes]:
    """JPEGs with some detail, as they come from a page: about 20 kB."""
    from PIL import Image

    chance, made = np.random.default_rng(0), []
    for _ in range(count):
        coarse = Image.fromarray(chance.integers(0, 255, (24, 24, 3), dtype=np.uint8))
        out = io.BytesIO()
        coarse.resize(side, Image.Resampling.BICUBIC).save(out, "JPEG", quality=88)
        made.append(out.getvalue())
    return made


def raw(model: Path, runtime: str, seconds: float) -> float:
    """Seconds of one batch of the bare runtime, the median, in a process of its own."""
    command = [sys.executable, __file__, "--raw", str(model), "--runtime", runtime, "--seconds", str(seconds)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_raw(model: str, runtime: str, seconds: float) -> None:
    import torch

    import vitkit
    from vitkit.runtime import open_runtime

    loaded = vitkit.load(model)
    ready = open_runtime(loaded, runtime, source=model)
    images = torch.randn(BATCH, 3, *loaded.config.image_size)
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - start < seconds:
        begun = time.perf_counter()
        ready.run(images)
        times.append(time.perf_counter() - begun)
    print(float(np.median(times[2:])))


# --- the five questions ------------------------------------------------------------------------------


def under_load(model: Path, runtime: str, seconds: float) -> Iterator[dict[str, Any]]:
    bodies = images()
    bare = [raw(model, runtime, seconds / 8)]
    with serving(model, runtime) as server:
        asyncio.run(closed_loop(server.port, bodies, CLIENTS, 3.0))  # warm
        full, speeds = Seen(), []
        for _ in range(TURNS):
            turn, took = asyncio.run(closed_loop(server.port, bodies, CLIENTS, seconds / TURNS))
            bare.append(raw(model, runtime, seconds / 8))
            speeds.append(len(turn.seconds) / took)
            full.seconds += turn.seconds
        batch_time, speed = float(np.median(bare)), float(np.median(speeds))
        around = [(before + after) / 2 for before, after in pairwise(bare)]  # the machine may have changed meanwhile
        ratio = float(np.median([s * b / BATCH for s, b in zip(speeds, around, strict=True)]))
        more = {"images_per_second": round(speed, 1), "raw_images_per_second": round(BATCH / batch_time, 1)}
        yield row("throughput", ratio, ratio >= LIMITS["throughput"], {**more, "p99_ms": ms(full.quantile(0.99))})

        half = asyncio.run(open_loop(server.port, bodies, speed / 2, seconds))
        ratio = half.quantile(0.99) / batch_time
        more = {"p50_ms": ms(half.quantile(0.5)), "p99_ms": ms(half.quantile(0.99)), "batch_ms": ms(batch_time)}
        yield row("half load", ratio, ratio < LIMITS["half load"] and set(half.statuses) == {200}, more)

        over = asyncio.run(open_loop(server.port, bodies, 4 * speed, seconds / 2))
        ratio = over.quantile(0.99) / full.quantile(0.99)
        served, refused = over.statuses.get(200, 0), over.statuses.get(503, 0)
        fine = ratio < LIMITS["overload"] and refused > 0 and set(over.statuses) == {200, 503}
        more = {"served": served, "refused": refused, "served_per_second": round(served / (seconds / 2), 1)}
        yield row("overload", ratio, fine, {**more, "p99_ms": ms(over.quantile(0.99))})

        last, code, ended, kept_word = asyncio.run(terminated(server, bodies, seconds / 5))
        fine = last.lost == 0 and code == 0 and kept_word and set(last.statuses) <= {200, 503}
        more = {"answered": sum(last.statuses.values()), "turned_away": last.turned_away, "exit_code": code}
        more["seconds_to_end"] = round(ended, 2)
        yield row("SIGTERM", last.lost, fine, more)


def memory(model: Path, runtime: str, requests: int) -> dict[str, Any]:
    bodies = images(side=(64, 64))
    with serving(model, runtime) as server:
        asyncio.run(closed_loop(server.port, bodies, CLIENTS, requests // 5))
        before = server.megabytes()
        _, took = asyncio.run(closed_loop(server.port, bodies, CLIENTS, requests - requests // 5))
        after = server.megabytes()
    ratio = after / before
    more = {"requests": requests, "mb_before": round(before, 1), "mb_after": round(after, 1)}
    return row("memory", ratio, ratio < LIMITS["memory"], {**more, "requests_per_second": round(requests * 0.8 / took)})


def row(what: str, value: float, holds: bool, more: dict[str, Any]) -> dict[str, Any]:
    return {"what": what, "value": round(value, 3), "limit": LIMITS[what], "holds": holds, "more": more}


def ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit-ti/16", help="a name of the zoo (default: vit-ti/16)")
    parser.add_argument("--runtime", default="eager")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each phase (default: 40)")
    parser.add_argument("--threads", type=int, help="threads of PyTorch (default: PyTorch's choice)")
    parser.add_argument("--requests", type=int, default=20_000, help="for the memory (default: 20,000)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few seconds; nothing is kept")
    parser.add_argument("--save", type=Path, help="where the JSON goes (default: results/; none with --quick)")
    parser.add_argument("--raw", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if args.raw:
        return measure_raw(args.raw, args.runtime, args.seconds)
    if args.quick:
        args.model, args.seconds, args.requests = "mu", 3.0, 1000
    about, rows = machine(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for found in under_load(checkpoint(args.model, folder), args.runtime, args.seconds):
            rows.append({"model": args.model, "runtime": args.runtime, **found})
            print(json.dumps(rows[-1]), flush=True)
        rows.append(
            {"model": "mu", "runtime": args.runtime, **memory(checkpoint("mu", folder), args.runtime, args.requests)}
        )
    print(table([{k: v for k, v in found.items() if k != "more"} for found in rows]))
    save("serve", args.save, about, rows, args.quick)
    return None


if __name__ == "__main__":
    main()
