"""Several processes of this machine for one run: `vitkit train --processes N`, without torchrun.

This process is the first of them and starts the others, which run the same configuration. They live and die together:
whoever waits for one that has ended hears of it from the network (`vitkit.world`), and Ctrl-C or SIGTERM asks all to
save and stop, since they agree on that at every step.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitkit.errors import ConfigError, TrainError, VitkitError
from vitkit.io import json_text, read_json
from vitkit.training.config import TrainConfig
from vitkit.world import PeerGone, resolve_device

READY = "ready"  # what a process says when it is about to join
PEER = 3  # exit code of a process that ends because another has
END = 10.0  # seconds that the others may take to end after the first
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def count(config: TrainConfig, out: Path, resume: bool) -> int:
    """Processes to run with: those of the run in the folder, when it is resumed. Its bits depend on them."""
    try:
        return TrainConfig.from_dict(read_json(out / "config.json")["train"]).processes if resume else config.processes
    except (OSError, ValueError, KeyError, TypeError, VitkitError):
        return 1  # what is wrong is said where the run is read


@contextmanager
def started(config: TrainConfig, processes: int, **how: object) -> Iterator[None]:
    """The others of so many processes, which run `train(config, **how)`; none within torchrun's or Ray's."""
    if processes < 2 or "WORLD_SIZE" in os.environ:
        yield
        return
    if resolve_device(config.device).type != "cpu":
        raise ConfigError("processes are for a CPU: add --set device=cpu, or on GPUs use torchrun --nproc-per-node")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = str(processes)
    place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    told = json_text({"config": config.to_dict(), "how": how, "parent": os.getpid()})
    before = {name: os.environ.get(name) for name in _PLACE}
    others: list[subprocess.Popen[str]] = []
    try:
        for rank in range(1, processes):
            environment = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            words = [sys.executable, "-m", "vitkit.training.other"]
            others.append(subprocess.Popen(words, env=environment, text=True, **pipes))  # type: ignore[call-overload]
            _say(others[-1], told)
        for rank, process in enumerate(others, start=1):
            _expect(rank, process)
        os.environ.update(place, RANK="0", LOCAL_RANK="0")
        yield
    except PeerGone as e:
        raise TrainError(_ended(others)) from e
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _end(others)


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except OSError:  # it has ended: `_expect` says so
        return


def _expect(rank: int, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != READY:
        process.wait()
        raise TrainError(f"process {rank} of this run could not start ({_how(process.returncode)})")


def _how(code: int | None) -> str:
    if code is None:
        return "it runs"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _ended(others: list[subprocess.Popen[str]]) -> str:
    for process in others:
        try:
            process.wait(END)
        except subprocess.TimeoutExpired:
            continue
    gone = [f"process {rank} ({_how(p.returncode)})" for rank, p in enumerate(others, start=1) if p.returncode != PEER]
    what = f"the run has ended because it lost {', '.join(gone) or 'another process'}"
    return f"{what}. Most often memory ran out. The run can be resumed from its last checkpoint with --resume"


def _end(others: list[subprocess.Popen[str]]) -> None:
    for process in others:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
