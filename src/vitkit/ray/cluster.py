"""Where Ray runs: the cluster at an address, or one of this machine's own for as long as a command lasts."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray
import torch

from vitkit import __version__
from vitkit.errors import ConfigError

_STORE = 200 << 20  # bytes of a local Ray's object store: it holds numbers of pieces and one list of names
_STARTS = 3  # of a local Ray, which gives up after half a minute: a busy machine may need longer
_LOOPBACK = "127.0.0.1"
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h


@dataclass(frozen=True)
class Cluster:
    """What a command needs to know about it."""

    address: str | None  # None: a Ray of our own, on this machine alone
    processes: int
    gpus: bool  # one for each process


@contextmanager
def connected(
    address: str | None = None, processes: int | None = None, device: str | None = None, shown: bool = False
) -> Iterator[Cluster]:
    """Join the cluster at `address`, or start one on this machine alone and end it afterwards.

    processes  None: one for each GPU of the cluster, or for each core where it has none
    shown      what the workers print is shown here
    """
    ours = not ray.is_initialized()
    if ours:
        _quiet()
        _start(address, processes, shown)
    try:
        total = ray.cluster_resources()
        gpus = device in (None, "", "cuda") and total.get("GPU", 0) >= 1
        yield Cluster(address, processes or max(1, int(total["GPU" if gpus else "CPU"])), gpus)
    finally:
        if ours:
            ray.shutdown()


def _start(address: str | None, processes: int | None, shown: bool) -> None:
    how: dict[str, object] = {"log_to_driver": shown, "logging_level": logging.ERROR}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves this machine
        how |= {"num_cpus": processes or os.cpu_count(), "object_store_memory": _STORE}
        how |= {"include_dashboard": False, "_node_ip_address": _LOOPBACK}
    for attempt in range(_STARTS):
        try:
            ray.init(address or "local", **how)
            return
        except Exception as e:  # Ray raises whatever its parts raise, and plain ones
            ray.shutdown()
            if address is not None or attempt == _STARTS - 1:
                raise ConfigError(_why(address, e)) from e


def _why(address: str | None, error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "ersion mismatch" in str(error):
        wanted = f"Ray {ray.__version__} and Python {platform.python_version()}"
        lines = ", ".join(line.strip() for line in str(error).splitlines()[1:] if line.strip())
        return f"the Ray cluster at {address} has other versions than {wanted} here ({lines}); install the same on both"
    if address is None:
        return f"a local Ray cannot be started ({first}); use torchrun, or --address of a cluster that runs"
    hint = "start one with `ray start --head`, or leave out --address for a Ray of this machine's own"
    return f"no Ray cluster answers at {address} ({first}); {hint}"


def _quiet() -> None:
    """Ray's own notes and bars are for its developers; vitkit shows how far a job is."""
    for name in ("ray", "ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)


def versions() -> dict[str, str]:
    """What must be the same in all processes, for the same results."""
    return {"vitkit": __version__, "torch": torch.__version__, "python": platform.python_version()}


def here() -> str:
    return f"worker {os.getpid()} on {platform.node()}"


def join_driver(folder: str, wanted: dict[str, str]) -> None:
    """In a worker: be where the command was started, with the same versions, or say what differs."""
    if other := [f"{k} {v} (the command has {wanted[k]})" for k, v in versions().items() if v != wanted[k]]:
        raise ConfigError(f"{here()} has {', '.join(other)}; install the same versions on all machines")
    try:
        os.chdir(folder)
    except OSError as e:
        raise ConfigError(f"{here()} cannot see {folder} ({e.strerror}); start in a folder that all share") from e


def keep_memory() -> None:
    """In a worker: glibc keeps what is freed for the next batch. It would give it back after each, outside the first
    thread, where Ray calls an actor, and get it again page by page: a tenth of the time of a small model."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, size in ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, 64 << 20)):
            mallopt(option, size)


def reason_of(error: BaseException) -> str:
    """The first line of what Ray says, without its colours and tracebacks."""
    seen: BaseException | None = error
    while seen is not None and not str(seen).strip():
        seen = seen.__cause__
    lines = [line.strip() for line in str(seen or error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
