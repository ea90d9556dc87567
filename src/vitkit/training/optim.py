"""Optimisers, their table, which weights decay and how fast each layer learns; schedules; averaged weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitkit.model.base import VisionModel
from vitkit.model.build import Model
from vitkit.world import World

if TYPE_CHECKING:
    from vitkit.training.config import TrainConfig

Optimizers = list[torch.optim.Optimizer]
# Weights that are tables or gains and not maps: decaying them only makes the model forget.
_TOKENS = ("class_token", "distillation_token", "registers")
_NO_DECAY = (*_TOKENS, "positions.", "rotary.", ".relative.", "probe", "scale1", "scale2")
_FILTERS = "stem.blocks."  # convolutions with a norm behind them


class Group(TypedDict):
    """Parameters that are treated alike: `factor` scales the learning rate, `apart` is for a second optimiser."""

    params: list[nn.Parameter]
    weight_decay: float
    factor: float
    apart: bool


@dataclass(frozen=True)
class Kind:
    """A row of the table."""

    build: Callable[[list[Group], TrainConfig], Optimizers]  # one or several
    lr: float  # peak learning rate, found with batches of `batch` images
    batch: int
    power: float  # how it grows with the batch
    decay: float  # of the weights
    matrices: bool = False  # the matrices of the blocks, and filters, come in groups of their own, `apart`


def groups(model: nn.Module, config: TrainConfig, beside: Iterable[tuple[str, nn.Parameter]] = ()) -> list[Group]:
    """Parameters that learn, by (apart, decay, learning-rate factor); `beside`: what a task adds to the model."""
    depth = len(model.blocks) if isinstance(model, VisionModel) else 0
    apart = OPTIMIZERS[config.optimizer or "adamw"].matrices
    found: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for name, parameter in (*model.named_parameters(), *((f"task.{n}", p) for n, p in beside)):
        if not parameter.requires_grad:
            continue
        table = parameter.ndim < 2 or any(word in name for word in _NO_DECAY)
        block, late = name.startswith("encoder.blocks."), name.startswith(("norm.", "head.", "task."))
        layer = 1 + int(name.split(".")[2]) if block else depth + 1 if late else 0  # the embedding is 0
        matrix = not table and ((block and parameter.ndim == 2) or name.startswith(_FILTERS))
        factor = config.layer_decay ** (depth + 1 - layer) if depth else 1.0
        key = (apart and matrix, 0.0 if table else config.weight_decay, factor)
        found.setdefault(key, []).append(parameter)
    return [Group(params=p, weight_decay=decay, factor=f, apart=a) for (a, decay, f), p in found.items()]


def build(model: nn.Module, config: TrainConfig, beside: Iterable[tuple[str, nn.Parameter]] = ()) -> Optimizers:
    return OPTIMIZERS[config.optimizer or "adamw"].build(groups(model, config, beside), config)


def adamw(parts: list[Group], config: TrainConfig, share: float = 1.0) -> Optimizers:
    fused = all(p.device.type in ("cpu", "cuda") for g in parts for p in g["params"]) and not config.shard
    betas = (0.9, config.beta2)
    return [torch.optim.AdamW(map(dict, parts), lr=config.lr * share, betas=betas, fused=fused, foreach=not fused)]


def sgd(parts: list[Group], config: TrainConfig) -> Optimizers:
    return [torch.optim.SGD(map(dict, parts), lr=config.lr, momentum=config.momentum, foreach=True)]


def lamb(parts: list[Group], config: TrainConfig) -> Optimizers:
    return [Lamb(map(dict, parts), lr=config.lr, betas=(0.9, config.beta2))]


class Lamb(torch.optim.Optimizer):
    """You et al. 2020: Adam whose step of each tensor is scaled to the tensor's own norm.

    Tensors that do not decay (biases, norms) take plain Adam steps, as DeiT III's code does.
    """

    def __init__(self, params: Iterable[Mapping[str, object]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(list(map(dict, params)), {"lr": lr, "betas": betas, "eps": 1e-6, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"step": torch.zeros(()), "mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
                state["step"] += 1
                (b1, b2), turn = group["betas"], state["step"].item()
                state["mean"].lerp_(p.grad, 1 - b1)
                state["square"].lerp_(p.grad.square(), 1 - b2)
                root = (state["square"] / (1 - b2**turn)).sqrt_().add_(group["eps"])
                move = state["mean"] / (1 - b1**turn) / root + group["weight_decay"] * p
                trust = p.norm() / move.norm() if group["weight_decay"] else torch.ones(())
                p.sub_(move * (group["lr"] * torch.where(torch.isfinite(trust) & (trust > 0), trust, 1.0)))


LONG = 4  # times as many columns as rows: then Newton-Schulz on rows by rows is clearly cheaper
# Muon's update has a fixed size per weight; AdamW's tables, norms and head want smaller steps beside it.
MUON_ADAM_SHARE = 0.6
FILTERS = 4.0  # a filter's step in those of a matrix: its length is kept, so that long steps do not make it grow


def muon(parts: list[Group], config: TrainConfig) -> Optimizers:
    """Two: Muon takes the matrices of the blocks and the filters of a whitened stem, AdamW the rest."""
    matrices, rest = ([g for g in parts if g["apart"] == apart] for apart in (True, False))
    momentum, half = config.muon_momentum or 0.95, config.precision == "bf16"
    found: Optimizers = [Muon(matrices, config.lr, momentum, half)] if matrices else []
    return found + (adamw(rest, config, MUON_ADAM_SHARE if matrices else 1.0) if rest else [])


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Jordan et al. 2024), for matrices of hidden layers.

    The Newton-Schulz steps run in bf16 on a GPU and where the passes do. Matrices of one shape are
    treated as one batch. The fused qkv is three maps and is treated as three. A filter bank is the
    matrix of its flattened filters; the norm behind it makes their length meaningless, which is kept constant.
    Where `world` has several processes, each makes its part of the matrices orthogonal, and they exchange them.
    """

    world: World | None = None

    def __init__(
        self, params: Iterable[Mapping[str, object]], lr: float, momentum: float = 0.95, half: bool = False
    ) -> None:
        super().__init__(map(dict, params), {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.half = half

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        stacks, owners = list[Tensor](), list[tuple[float, list[nn.Parameter], dict[str, float]]]()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter.grad)
                buffer = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(buffer, group["momentum"])  # Nesterov
                by_shape.setdefault(parameter.shape, []).append((parameter, update.flatten(1)))
            for shape, pairs in by_shape.items():
                parts = 3 if len(shape) == 2 and shape[0] == 3 * shape[1] else 1
                stack = torch.stack([u for _, u in pairs]).unflatten(1, (parts, -1)).flatten(0, 1)  # B M N
                stacks.append(stack)
                owners.append((max(1.0, stack.shape[1] / stack.shape[2]) ** 0.5, [p for p, _ in pairs], group))
        for stack, (scale, parameters, group) in zip(self._orthogonal(stacks), owners, strict=True):
            for parameter, update in zip(parameters, (stack * scale).chunk(len(parameters)), strict=True):
                kept, far = 1 - group["lr"] * group["weight_decay"], group["lr"]
                if parameter.ndim == 4:
                    kept, far = parameter.shape[0] ** 0.5 / parameter.norm(), FILTERS * far
                parameter.mul_(kept).add_(update.to(parameter).view(parameter.shape), alpha=-far)

    def _orthogonal(self, stacks: list[Tensor]) -> list[Tensor]:
        """Each B M N, made orthogonal: all here, or in the processes that share the work."""
        if self.world is None or self.world.size == 1:
            return [orthogonal(stack, self.half) for stack in stacks]
        shares = shared_out([tuple(stack.shape) for stack in stacks], self.world.size)
        mine = [
            orthogonal(s[a:b], self.half).flatten() for s, (a, b) in zip(stacks, shares[self.world.rank], strict=True)
        ]
        sizes = [sum((b - a) * s[0].numel() for s, (a, b) in zip(stacks, of, strict=True)) for of in shares]
        done = [torch.empty_like(stack) for stack in stacks]
        for flat, of in zip(self.world.gather(torch.cat(mine), sizes), shares, strict=True):
            pieces = flat.split([(b - a) * s[0].numel() for s, (a, b) in zip(stacks, of, strict=True)])
            for whole, piece, (a, b) in zip(done, pieces, of, strict=True):
                whole[a:b] = piece.view(whole[a:b].shape)
        return done


def shared_out(shapes: Sequence[tuple[int, ...]], processes: int) -> list[list[tuple[int, int]]]:
    """Of stacks B M N, the range of matrices of each that a process takes: about equal work, by process and stack.

    Stacks in the order of their cost, each spread evenly; the process that has least to do is served first.
    """
    shares = [[(0, 0)] * len(shapes) for _ in range(processes)]
    work = [0] * processes
    cost = [max(m, n) * min(m, n) ** 2 for _, m, n in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -cost[i]):
        whole, rest = divmod(shapes[i][0], processes)
        first = 0
        for turn, process in enumerate(sorted(range(processes), key=lambda p: work[p])):
            count = whole + (turn < rest)
            shares[process][i] = (first, first + count)
            work[process] += count * cost[i]
            first += count
    return shares


def orthogonal(matrices: Tensor, half: bool = False, steps: int = 5) -> Tensor:
    """B M N -> the nearest matrices with singular values near 1, by five Newton-Schulz steps.

    Long rows (filters) are only met at the start and the end: the steps multiply M x M matrices, in fp32. Sharded ones
    have their diagonal in several places, and take all steps.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(torch.bfloat16 if half or matrices.device.type != "cpu" else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if x.shape[-1] < LONG * x.shape[-2] or isinstance(x, DTensor):
        for _ in range(steps):
            s = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    else:
        x = x.float()
        s = x @ x.mT  # in every step q s q, where x is q x
        product = torch.eye(s.shape[-1], device=s.device).expand_as(s)
        for _ in range(steps):
            q = torch.baddbmm(s, s, s, beta=b, alpha=c)
            q.diagonal(dim1=-2, dim2=-1).add_(a)
            product, s = q @ product, q @ s @ q
        x = product @ x
    return (x.mT if tall else x).to(matrices.dtype)


OPTIMIZERS: dict[str, Kind] = {
    "adamw": Kind(adamw, lr=1e-3, batch=64, power=0.5, decay=0.05),
    "muon": Kind(muon, lr=0.015, batch=64, power=0.5, decay=0.05, matrices=True),
    "lamb": Kind(lamb, lr=3e-3, batch=2048, power=1.0, decay=0.02),
    "sgd": Kind(sgd, lr=0.03, batch=512, power=1.0, decay=0.0),
}


SCHEDULES: dict[str, Callable[[float], float]] = {  # after the warm-up: from 1 at 0 down to 0 at 1
    "cosine": lambda rest: 0.5 * (1 + math.cos(math.pi * rest)),
    "linear": lambda rest: 1 - rest,
}


def rate(progress: float, warmup: float, kind: str, end: float = 0.0) -> float:
    """The share of the peak learning rate: up linearly during `warmup`, then down to `end`."""
    if progress < warmup:
        return max(progress / warmup, 1e-3)  # the very first step moves a little too
    return end + (1 - end) * SCHEDULES[kind](min(1.0, (progress - warmup) / (1 - warmup)))


def grown_size(progress: float, start: float, size: int, patch: int) -> int:
    """Progressive images: from `start` of the size, in whole patches, to all of it at 70% of the run."""
    share = min(1.0, start + (1 - start) * progress / 0.7)
    return min(size, max(patch, round(size * share / patch) * patch))


class Average:
    """An average of the weights over time, which is often the better model."""

    def __init__(self, model: Model, decay: float) -> None:
        self.decay = decay
        self.model: Model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Early on the average follows closely: it must not remember the random start."""
        decay = min(self.decay, (1 + step) / (10 + step))
        ours, theirs = ([p.detach() for p in m.parameters()] for m in (self.model, model))
        torch._foreach_lerp_(ours, theirs, 1 - decay)
        for mine, other in zip(self.model.buffers(), model.buffers(), strict=True):
            mine.copy_(other)
