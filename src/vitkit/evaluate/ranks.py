"""Several processes share an evaluation: who takes part, and putting the parts together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

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
            f"world_size={world_size} needs torch.distributed: start with torchrun, "
            f"or put the parts together with vitkit.evaluate.merge"
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
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
