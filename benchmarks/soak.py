"""A server under attack, on this machine alone: honest clients keep asking while everything else goes wrong.

Phases alternate: quiet, an attack, quiet, the next attack, and again until the time is over. In every phase 16 honest
clients ask for one image after another, and `/healthz` is asked on a new connection five times a second. So is a
control: a server of one line in a process of its own, with nothing else to do. What it takes is the machine's share.

bombs      forms of 24 16-bit PNGs of 7000x7000 pixels, again and again: far beyond what one request may have
large      forms of 4 of them: as much as one request may have
silent     1,100 connections that say nothing or half a header, opened again when closed; the server has 1,024 files
halves     300 half-sent bodies, with and without most of their bytes
garbage    from 8 clients at once: no HTTP, no image, a wrong field, a damaged image
cancelled  20 clients a second that send an image and hang up
kills      the processes that decode are killed, twice a second, by SIGKILL and SIGSEGV
chaos      the model's file is replaced by a damaged one and removed; the disk of the log is full
all        everything above at once, each with fewer clients

What we hold ourselves to: every honest request is answered (by 200, or 503 with a time to come back), the same image
gets the same answer from the first to the last minute, honest clients keep half of the throughput of the quiet phases
around an attack, `/healthz` answers within a second, the server's own memory is flat, and the log stays small.

    python -m benchmarks.soak                  # an hour
    python -m benchmarks.soak --minutes 10
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parent))
from harness import machine, save, table
from serve import Connection, checkpoint, images, ms

CLIENTS, FILES, SILENT, HALVES = 16, 1024, 1100, 300
LOST = (OSError, EOFError, asyncio.IncompleteReadError)


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    model: Path
    log: Path

    def megabytes(self) -> tuple[float, float]:
        """Of the server itself, and of the processes that decode for it."""
        own = psutil.Process(self.process.pid)
        children = 0.0
        for child in own.children(recursive=True):
            with suppress(psutil.Error):
                children += child.memory_full_info().uss / 2**20
        return own.memory_info().rss / 2**20, children

    def decoders(self) -> list[psutil.Process]:
        """Forked from the one process that is the server's own child."""
        return [grandchild for child in psutil.Process(self.process.pid).children() for grandchild in child.children()]


@dataclass
class Phase:
    name: str
    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)
    lost: int = 0  # honest requests without an answer
    wrong: int = 0  # answers that differ from the first one to the same image
    health: list[float] = field(default_factory=list)
    control: list[float] = field(default_factory=list)
    attacks: int = 0

    @property
    def speed(self) -> float:
        return len(self.times) / self.seconds


# --- honest clients ----------------------------------------------------------------------------------


class Asking(Connection):
    """Keeps the body of the last answer."""

    async def ask(self, body: bytes) -> tuple[int, bytes]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        head = f"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = re.search(rb"content-length: (\d+)", answer)
        text = await reader.readexactly(int(length[1]) if length else 0)
        if b"connection: close" in answer:
            self.close()
        return int(answer.split(b" ", 2)[1]), text


async def honest(port: int, bodies: list[bytes], first: dict[int, str], phase: Phase, until: float) -> None:
    connection = Asking(port)
    while time.monotonic() < until:
        number, start = random.randrange(len(bodies)), time.perf_counter()
        try:
            status, text = await connection.ask(bodies[number])
        except LOST:
            phase.lost += 1
            connection.close()
            continue
        phase.statuses[status] += 1
        if status == 200:
            phase.times.append(time.perf_counter() - start)
            found = str(re.findall(rb'"class": (\d+)', text)[:1])  # batches round differently, the class stays
            phase.wrong += first.setdefault(number, found) != found
        else:
            await asyncio.sleep(0.05)
    connection.close()


async def health(port: int, times: list[float], until: float) -> None:
    while time.monotonic() < until:
        start, fine = time.perf_counter(), False
        with suppress(*LOST):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            fine = (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
        times.append(time.perf_counter() - start if fine else float("inf"))
        await asyncio.sleep(0.2)


def answer_always(port: Any) -> None:
    """The control: what this machine lets the least of all servers do."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.value = server.sockets[0].getsockname()[1]
        await server.serve_forever()

    asyncio.run(run())


@contextmanager
def control() -> Iterator[int]:
    context = multiprocessing.get_context("fork")
    port = context.Value("i", 0)
    process = context.Process(target=answer_always, args=(port,), daemon=True)
    process.start()
    while not port.value:
        time.sleep(0.05)
    yield port.value
    process.kill()


@dataclass
class Honest:
    """What all phases share: the images, the first answer to each, the port of the control."""

    bodies: list[bytes]
    control: int
    first: dict[int, str] = field(default_factory=dict)


# --- attacks: each one step, repeated until the phase ends --------------------------------------------

Step = Callable[[Server, Phase], Awaitable[None]]


async def send(server: Server, data: bytes, wait: float) -> None:
    """On a connection of its own: send, read for so long, hang up."""
    with suppress(*LOST, asyncio.TimeoutError):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            writer.write(data)
            await asyncio.wait_for(reader.read(1) if wait else asyncio.sleep(0), wait or None)
        finally:
            writer.close()


def post(body: bytes, kind: str = "application/octet-stream", more: int = 0) -> bytes:
    head = f"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body) + more}\r\n\r\n".encode() + body


def form(images: list[bytes]) -> bytes:
    part = b'--x\r\nContent-Disposition: form-data; name="f"; filename="a.png"\r\n\r\n%b\r\n'
    return post(b"".join(part % data for data in images) + b"--x--\r\n", "multipart/form-data; boundary=x")


def bomb() -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(np.full((7000, 7000), 40_000, dtype=np.uint16)).save(out, "PNG")
    return out.getvalue()  # 96 kB


def forms_of(count: int) -> Step:
    body = form([bomb()] * count)

    async def step(server: Server, phase: Phase) -> None:
        phase.attacks += 1
        await send(server, body, 60)

    return step


def held(data: Callable[[], bytes]) -> Step:
    """A connection that is held open, and opened again when closed."""

    async def step(server: Server, phase: Phase) -> None:
        phase.attacks += 1
        await asyncio.sleep(random.random() * 2)
        await send(server, data(), 60)

    return step


def half_of(body: bytes) -> bytes:
    return post(body[: random.choice((1, len(body) // 2, len(body)))], more=random.choice((9, 10**6)))


def garbage_of(body: bytes) -> bytes:
    damaged = bytearray(body)
    for _ in range(20):
        damaged[random.randrange(len(damaged))] = random.randrange(256)
    no_http = (
        b"\0\1\2\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /api/predict?tpo=3 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )
    return random.choice((*no_http, post(b"no image at all"), post(bytes(damaged)), post(body[:300])))


def single(data: Callable[[], bytes], wait: float, pause: float) -> Step:
    async def step(server: Server, phase: Phase) -> None:
        phase.attacks += 1
        await send(server, data(), wait)
        await asyncio.sleep(pause)

    return step


async def kill_one(server: Server, phase: Phase) -> None:
    with suppress(psutil.Error, IndexError):
        random.choice(server.decoders()).send_signal(random.choice((signal.SIGKILL, signal.SIGSEGV)))
        phase.attacks += 1
    await asyncio.sleep(0.5)


async def chaos(server: Server, phase: Phase) -> None:
    """The model's file is replaced by a damaged one and removed, the log's disk is full; then all is as before."""
    phase.attacks += 1
    kept = server.model.with_suffix(".kept")
    if not kept.exists():
        shutil.copy(server.model, kept)
    size = server.log.stat().st_size
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))  # the disk is full
    damaged = server.model.with_suffix(".damaged")
    damaged.write_bytes(os.urandom(2**18))
    damaged.replace(server.model)
    await asyncio.sleep(0.5)
    server.model.unlink()
    await send(server, b"\0 no http\r\n\r\n", 1)  # has something logged
    shutil.copy(kept, server.model)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def attacks() -> dict[str, Step]:
    body, large = images(1)[0], images(1, (1600, 1200))[0]
    silence = itertools.cycle((b"", b"GET /healthz HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "))
    return {
        "bombs": forms_of(24),
        "large": forms_of(4),
        "silent": held(lambda: next(silence)),
        "halves": held(lambda: half_of(large)),
        "garbage": single(lambda: garbage_of(body), 5, 0.04),
        "cancelled": single(lambda: post(random.choice((body, large))), 0, 0.2),
        "kills": kill_one,
        "chaos": chaos,
    }


# steps at once; others: 2
TOGETHER = {"large": 4, "silent": SILENT, "halves": HALVES, "garbage": 8, "cancelled": 4, "kills": 1, "chaos": 1}


# --- the run -----------------------------------------------------------------------------------------


def attack(name: str, steps: dict[str, Step], server: Server, seconds: float, made: Any) -> None:
    """In a process of its own, so that clients and attackers do not wait for each other."""
    phase, until = Phase(name), time.monotonic() + seconds

    async def again(step: Step) -> None:
        while time.monotonic() < until:
            await step(server, phase)

    async def run() -> None:
        crowd = [each for each in steps for _ in range(math.ceil(TOGETHER.get(each, 2) / len(steps)))]
        attackers = {asyncio.ensure_future(again(steps[each])): each for each in crowd}
        await asyncio.sleep(seconds)
        for one, each in attackers.items():
            if each != "chaos":  # which puts the model back
                one.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)

    asyncio.run(run())
    made.value = phase.attacks


def run_phase(name: str, server: Server, steps: dict[str, Step], honestly: Honest, seconds: float) -> Phase:
    phase, context = Phase(name), multiprocessing.get_context("fork")
    made = context.Value("i", 0)
    attacker = context.Process(target=attack, args=(name, steps, server, seconds, made)) if steps else None
    if attacker:
        attacker.start()
    start = time.monotonic()

    async def clients() -> None:
        until = start + seconds
        asking = [honest(server.port, honestly.bodies, honestly.first, phase, until) for _ in range(CLIENTS)]
        looking = [health(server.port, phase.health, until), health(honestly.control, phase.control, until)]
        await asyncio.gather(*looking, *asking)

    asyncio.run(clients())
    phase.seconds = time.monotonic() - start
    if attacker:
        attacker.join()
    phase.attacks = made.value
    return phase


@contextmanager
def serving(model: Path, runtime: str, log: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "vitkit", "serve", str(model), "--runtime", runtime, "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stderr=out)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
    try:
        for _ in range(1200):
            if found := re.search(r"serving on http://[^:]+:(\d+)/", log.read_text()):
                yield Server(process, int(found[1]), model, log)
                return
            time.sleep(0.1)
        raise RuntimeError(f"the server did not start: {log.read_text()}")
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(90)
        process.kill()


def row(phase: Phase, quiet: float, server: Server) -> dict[str, Any]:
    own, decoding = server.megabytes()
    slowest = max(phase.health, default=float("inf"))
    share = phase.speed / quiet
    fine = share >= 0.5 and slowest < 1.0
    return {
        "phase": phase.name,
        "seconds": round(phase.seconds),
        "attacks": phase.attacks,
        "honest img/s": round(phase.speed, 1),
        "of quiet": round(share, 2),
        "p99 ms": ms(float(np.quantile(phase.times, 0.99))) if phase.times else None,
        "healthz max ms": ms(slowest),
        "control max ms": ms(max(phase.control, default=float("inf"))),
        "refused": phase.statuses[503],
        "lost": phase.lost + sum(n for status, n in phase.statuses.items() if status not in (200, 503)),
        "wrong": phase.wrong,
        "server MB": round(own),
        "decoders MB": round(decoding),
        "log kB": round(server.log.stat().st_size / 1000, 1),
        "holds": bool(fine and not phase.lost and not phase.wrong and set(phase.statuses) <= {200, 503}),
    }


def soak(server: Server, minutes: float, each: float, only: list[str], honestly: Honest) -> list[dict[str, Any]]:
    steps = attacks()
    phases = {name: {name: step} for name, step in steps.items()} | {"all": steps}
    phases = {name: steps for name, steps in phases.items() if not only or name in only}
    end, rows = time.monotonic() + 60 * minutes, []
    before = run_phase("quiet", server, {}, honestly, each)
    rows.append(row(before, before.speed, server))
    for name, steps in itertools.cycle(phases.items()):
        attack = run_phase(name, server, steps, honestly, each)
        found = row(attack, 1.0, server)
        after = run_phase("quiet", server, {}, honestly, each / 2)
        around = (before.speed + after.speed) / 2
        found |= {"of quiet": round(attack.speed / around, 2)}
        found["holds"] = row(attack, around, server)["holds"]
        rows += [found, row(after, after.speed, server)]
        print({k: v for k, v in found.items() if k != "seconds"}, flush=True)
        before = after
        if time.monotonic() > end:
            return rows
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--each", type=float, default=30.0, help="seconds of an attack (default: 30)")
    parser.add_argument("--only", nargs="*", default=[], help="these attacks (default: all)")
    parser.add_argument("--model", default="vit-ti/16", help="a name of the zoo (default: vit-ti/16)")
    parser.add_argument("--runtime", default="eager")
    parser.add_argument("--save", type=Path, help="where the JSON goes (default: results/)")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    about = machine()
    with (
        tempfile.TemporaryDirectory() as name,
        control() as port,
        serving(checkpoint(args.model, Path(name)), args.runtime, Path(name) / "log") as server,
    ):
        rows = soak(server, args.minutes, args.each, args.only, Honest(images(), port))
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(90)
        last = server.log.read_text().splitlines()[-1]
    print(table(rows))
    print(f"exit code {code}; {last}")
    save("soak", args.save, about, [*rows, {"phase": "SIGTERM", "exit code": code, "says": last}], False)


if __name__ == "__main__":
    main()
