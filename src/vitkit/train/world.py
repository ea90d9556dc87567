"""One process is a world of one; `torchrun` makes larger ones. Everything about ranks is here.

The model never hears of it: `wrap` puts DDP or FSDP around it from outside.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitkit.model.vit import ViT
from vitkit.ranks import meeting_point


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def largest(self, *values: float) -> list[float]:
        """Each value, the largest over all processes: how they agree to stop, save or skip."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def mean(self, value: Tensor) -> Tensor:
        if self.size == 1:
            return value
        value = value.clone()
        dist.all_reduce(value)
        return value / self.size

    def share(self, value: Any) -> Any:
        """The first process's value, in all of them."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def join(device: str = "") -> World:
    """Join the processes that torchrun started, or be alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if not device:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    chosen = torch.device(f"cuda:{local}" if device == "cuda" else device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size > 1 and not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, **meeting_point())
    return World(int(os.environ.get("RANK", "0")) if size > 1 else 0, size, chosen)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def wrap(trainee: nn.Module, world: World, shard: bool) -> nn.Module:
    """DDP, or FSDP over the blocks and then the rest; a world of one needs neither."""
    if world.size == 1 and not shard:
        return trainee
    if not shard:
        frozen = any(not p.requires_grad for p in trainee.parameters())
        ids = [world.device.index] if world.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(trainee, device_ids=ids, find_unused_parameters=frozen)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():  # a sharded run that goes on in one process
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in _blocks(trainee):
        fully_shard(block, mesh=mesh)
    fully_shard(trainee, mesh=mesh)
    return trainee


def _blocks(module: nn.Module) -> Iterable[nn.Module]:
    return [b for m in module.modules() if isinstance(m, ViT) for b in m.encoder.blocks]


def whole(tensor: Tensor) -> Tensor:
    """A tensor that FSDP keeps in parts, put together; others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
