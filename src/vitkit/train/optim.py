"""Optimisers: which weights decay, how fast each layer learns, AdamW, SGD and Muon."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.model.vit import ViT
from vitkit.train.config import TrainConfig

# Weights that are tables or gains and not maps: decaying them only makes the model forget.
_NO_DECAY = ("class_token", "distillation_token", "registers", "positions.", ".relative.", "probe", "scale1", "scale2")


def layer_of(name: str, depth: int) -> int:
    """0 for the embedding, 1..depth for the blocks, depth + 1 for what follows."""
    if name.startswith("encoder.blocks."):
        return 1 + int(name.split(".")[2])
    return depth + 1 if name.startswith(("norm.", "head.")) else 0


def groups(model: nn.Module, config: TrainConfig, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters that learn, by (kind of optimiser, decay, learning-rate factor)."""
    depth = len(model.encoder.blocks) if isinstance(model, ViT) else 0
    found: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        table = parameter.ndim < 2 or any(word in name for word in _NO_DECAY)
        matrix = not table and name.startswith("encoder.blocks.") and parameter.ndim == 2
        factor = config.layer_decay ** (depth + 1 - layer_of(name, depth)) if depth else 1.0
        key = (config.optimizer == "muon" and matrix, 0.0 if table else weight_decay, factor)
        found.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "factor": factor, "muon": muon}
        for (muon, decay, factor), parameters in found.items()
    ]


def build(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """One optimiser, or two with Muon: it takes the matrices of the blocks, AdamW the rest."""
    by_kind = groups(model, config, config.weight_decay)
    matrices = [g for g in by_kind if g["muon"]]
    rest = [g for g in by_kind if not g["muon"]]
    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer == "sgd":
        return [torch.optim.SGD(rest, lr=config.lr, momentum=config.momentum, foreach=True)]
    if matrices:
        optimizers.append(Muon(matrices, lr=config.lr))
    if rest:
        fused = all(p.device.type in ("cpu", "cuda") for g in rest for p in g["params"]) and not config.shard
        adam_lr = config.lr * (MUON_ADAM_SHARE if matrices else 1.0)
        optimizers.append(
            torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, config.beta2), fused=fused, foreach=not fused)
        )
    return optimizers


# Muon's update has a fixed size per weight; AdamW's tables, norms and head want smaller steps beside it.
MUON_ADAM_SHARE = 0.15


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Jordan et al. 2024), for matrices of hidden layers.

    The Newton-Schulz steps run in bf16 on a GPU and in fp32 on a CPU, where bf16 is slow. Matrices of
    one shape are treated as one batch. The fused qkv is three maps and is treated as three.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
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
                by_shape.setdefault(parameter.shape, []).append((parameter, update))
            for shape, pairs in by_shape.items():
                parts = 3 if shape[0] == 3 * shape[1] else 1
                stack = torch.stack([u for _, u in pairs]).unflatten(1, (parts, -1)).flatten(0, 1)
                rows, columns = stack.shape[-2:]
                stack = orthogonal(stack) * max(1.0, rows / columns) ** 0.5
                for (parameter, _), update in zip(pairs, stack.unflatten(0, (-1, parts)).flatten(1, 2), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update.to(parameter), alpha=-group["lr"])


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """B M N -> the nearest matrices with singular values near 1, by five Newton-Schulz steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return (x.mT if tall else x).to(matrices.dtype)
