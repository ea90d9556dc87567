"""Ranks and devices: one process is a world of one; `torchrun` makes larger ones.

Only this module sets up torch.distributed and picks a device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vitkit.errors import ConfigError, VitkitError

T = TypeVar("T")
_PEER_GONE = r"Connection (closed|reset) by peer|Broken pipe|Software caused connection abort"


def accelerators() -> list[torch.device]:
    """What can compute here besides the CPU, the fastest first."""
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("mps")] if torch.backends.mps.is_available() else []


@contextmanager
def using_threads(number: int | None) -> Iterator[None]:
    """PyTorch's threads on a CPU, for a while; 0 or None: as many as there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def has_bf16(device: torch.device) -> bool:
    """Whether it multiplies bfloat16 itself, and so faster than fp32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    words = ("avx512_bf16", "amx_tile") if device.type == "cpu" else ()
    return any(getattr(torch.cpu, f"_is_{word}_supported", bool)() for word in words)


def has_vnni() -> bool:
    """Whether this processor adds products of 8-bit numbers in 32 bits; others overflow 16 bits."""
    return bool(getattr(torch.cpu, "_is_vnni_supported", bool)())


def resolve_device(wanted: str | torch.device | None = None) -> torch.device:
    """The device that was asked for, if it can be used; otherwise the best there is. "cuda" is this rank's own."""
    best = next((device.type for device in accelerators()), "cpu")
    name = str(wanted or best)
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as e:
        first = str(e).splitlines()[0]
        raise ConfigError(f"--device {wanted} cannot be used here ({first}); leave it out for {best}") from None
    return torch.device(name)


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process speaks for all of them."""
        return self.rank == 0

    def largest(self, *values: float) -> list[float]:
        """Each value, the largest over all processes: how they agree to stop, save or skip."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(v) for v in tensor.tolist()]

    def mean(self, value: Tensor) -> Tensor:
        if self.size == 1:
            return value
        value = value.clone()
        dist.all_reduce(value)
        return value / self.size

    def share(self, value: T) -> T:
        """The first process's value, in all of them."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, part: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Every process's flat tensor, which has the length `sizes[rank]`, in all of them."""
        if self.size == 1:
            return [part]
        padded = part.new_zeros(max(sizes))
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return [each[:size] for each, size in zip(parts, sizes, strict=True)]

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    @property
    def on_one_machine(self) -> bool:
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) == self.size


def join(device: str = "") -> World:
    """Join the processes that torchrun started, or be alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = resolve_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size > 1 and not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if chosen.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, **_meeting_point())
        except dist.DistError as e:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            what = f"the other processes were not found at {where} ({str(e).splitlines()[0]})"
            raise VitkitError(f"{what}; with nodes that come and go set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") from e
    return World(dist.get_rank(), dist.get_world_size(), chosen) if dist.is_initialized() else World(0, 1, chosen)


_left: list[dist.ProcessGroup | None] = []  # groups that were left, kept for `leave`'s reason


def leave() -> None:
    """Leave the group, but keep the object: a DDP model may outlive this call.

    The last owner of a gloo group waits for its threads. DDP does that without releasing Python's lock, for
    which such a thread may be waiting at that moment, and both wait forever; PyTorch's own handle releases it.
    """
    if dist.is_initialized():
        _left.append(dist.group.WORLD)
        dist.destroy_process_group()


@contextmanager
def joined(device: str = "") -> Iterator[World]:
    """`join` for a while; a group that was there before stays."""
    before = dist.is_initialized()
    world = join(device)
    try:
        with ends_with_others():
            yield world
    finally:
        if not before:
            leave()


class PeerGone(VitkitError):
    """Another process of the same command has ended: whoever starts processes may start them again."""


@contextmanager
def ends_with_others() -> Iterator[None]:
    """Whoever waits for a process that has ended hears of it from the network within a second; here in words."""
    try:
        yield
    except RuntimeError as e:
        if os.environ.get("WORLD_SIZE", "1") == "1" or not re.search(_PEER_GONE, str(e)):
            raise
        rank = os.environ.get("RANK", "?")
        what = f"process {rank} ends because another one of the same command has ended"
        raise PeerGone(f"{what}; the message of that one says why") from e


def ensure_group() -> None:
    """A process group of one, for code that needs one: a sharded run that continues in one process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def mean_of_all(value: Tensor) -> Tensor:
    """The mean over all processes; gradients flow to what every one of them put in."""
    if processes() == 1:
        return value
    if not torch.is_grad_enabled():
        value = value.clone()
        dist.all_reduce(value)
        return value / processes()
    from torch.distributed.nn.functional import all_reduce

    total: Tensor = all_reduce(value)  # type: ignore[no-untyped-call,unused-ignore]
    return total / processes()


def gather(part: T, world_size: int) -> list[T]:
    """Every rank's part, in the order of ranks, on every rank. A world of one needs no torch.distributed."""
    if world_size == 1:
        return [part]
    ranks = dist.get_world_size() if dist.is_initialized() else 0
    if ranks != world_size:
        raise ConfigError(f"world_size={world_size}, but torch.distributed runs {ranks} ranks; start with torchrun")
    parts: list[T | None] = [None] * world_size
    dist.all_gather_object(parts, part)
    return parts  # type: ignore[return-value]


def is_first() -> bool:
    """Whether this process speaks for all of them, before or after they have joined."""
    return os.environ.get("RANK", "0") == "0"


def _meeting_point() -> dict[str, Any]:
    """Where processes find each other: PyTorch's default, but for processes that torchrun has restarted.

    torchrun may keep the store of the attempt before, with the addresses of processes that are gone; a
    prefix of its own keeps this attempt from calling them.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    size = int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    return {"store": dist.PrefixStore(f"attempt-{attempt}", store), "rank": int(os.environ["RANK"]), "world_size": size}
