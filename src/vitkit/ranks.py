"""Several processes share a job, as torchrun starts them: finding each other, and putting the parts together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vitkit.errors import ConfigError

T = TypeVar("T")


def gather(part: T, world_size: int) -> list[T]:
    """Every rank's part, in the order of ranks, on every rank. A world of one needs no torch.distributed."""
    if world_size == 1:
        return [part]
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"world_size={world_size} needs torch.distributed: start with torchrun, or put the parts together yourself"
        )
    if dist.get_world_size() != world_size:
        raise ConfigError(f"world_size={world_size}, but torch.distributed runs {dist.get_world_size()} ranks")
    parts: list[T | None] = [None] * world_size
    dist.all_gather_object(parts, part)
    return parts  # type: ignore[return-value]


@contextmanager
def joined() -> Iterator[tuple[int, int]]:
    """Join the processes that torchrun has started, for a while: (rank, world_size), or (0, 1) without torchrun."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or dist.is_initialized():
        yield (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", **meeting_point())
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def meeting_point() -> dict[str, Any]:
    """Where processes find each other: PyTorch's own way, but for processes that torchrun has started again.

    torchrun may keep the store of the attempt before, with the addresses of processes that are gone; a
    prefix of its own keeps this attempt from calling them.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    size = int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    return {"store": dist.PrefixStore(f"attempt-{attempt}", store), "rank": int(os.environ["RANK"]), "world_size": size}


def is_first() -> bool:
    """Whether this process speaks for all of them."""
    return os.environ.get("RANK", "0") == "0"
