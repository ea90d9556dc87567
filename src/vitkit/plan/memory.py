"""How much memory a training step holds at its peak: the real step, run on tensors that have no numbers.

PyTorch's fake tensors know shapes, types and when they are let go, but hold nothing, so forward, backward,
clipping and the optimiser of ViT-H/14 can be run anywhere in seconds while every byte is counted. Nothing
is assumed about what autograd keeps: a new layer, gradient checkpointing or another optimiser counts itself.

In a step the gradients come while the activations go, so the peak is not the sum of the parts:

    peak = parameters + optimiser + the larger of (forward and backward, update)

Gradients are there from the start, and add to the first, when a batch is computed in several parts or when
DDP keeps its buckets. FSDP keeps one part in `gpus` of parameters, gradients and optimiser, plus what is
gathered: the embedding and the head, two blocks with their gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitkit.errors import ConfigError
from vitkit.model.build import Model, outline
from vitkit.model.config import AnyConfig
from vitkit.model.vit import ViT
from vitkit.train import optim
from vitkit.train.config import TrainConfig
from vitkit.train.objective import Trainee, loss_of


@dataclass(frozen=True)
class Memory:
    """Bytes on each device."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  # what the forward pass leaves for the backward pass, with the pictures
    workspace: int  # above the activations at the worst moment of forward and backward
    gathered: int  # parts of other processes, with FSDP; buckets, with DDP
    peak: int


def training_memory(model: AnyConfig, train: TrainConfig, pictures: int, processes: int = 1) -> Memory:
    """One process that computes `pictures` at a time, of a run with `train`'s settings."""
    if pictures < 1:
        raise ConfigError("a step needs at least one picture for each process; make the batch larger")
    shards = processes if train.shard else 1
    step = _Step(model, train)
    fresh = step.forward_backward(pictures, keep_gradients=shards == 1)
    update, state = step.update()
    parameters, gradients = step.parameters // shards, step.parameters // shards
    early, gathered = 0, 0  # gradients that are there before the backward pass; what processes share
    if shards > 1:
        gathered, early = step.gathered(), gradients
    elif processes > 1:
        gathered = step.parameters  # DDP's buckets
    if shards == 1 and train.accumulate > 1:
        early = gradients
    passes, updating = fresh.peak + early, gradients + update // shards
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=state // shards,
        activations=fresh.kept,
        workspace=max(0, fresh.peak - fresh.kept),
        gathered=gathered,
        peak=parameters + state // shards + gathered + max(passes, updating),
    )


@dataclass(frozen=True)
class _Passes:
    kept: int  # between forward and backward
    peak: int


class _Step:
    """A training step on fake tensors. All figures are bytes above the parameters."""

    def __init__(self, config: AnyConfig, train: TrainConfig) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.train, self.fake, self.ledger = train, FakeTensorMode(), _Ledger()
        self.model = outline(config)
        with self.fake, self.ledger:
            give_storage(self.model)
        if isinstance(self.model, ViT):
            self.model.gradient_checkpointing = train.gradient_checkpointing
        self.trainee = Trainee(self.model, train.patch_dropout).train()
        self.parameters = sum(p.numel() * p.element_size() for p in self.model.parameters())

    def forward_backward(self, pictures: int, keep_gradients: bool) -> _Passes:
        config = self.model.config
        hooks = [] if keep_gradients else [p.register_post_accumulate_grad_hook(_drop) for p in self.model.parameters()]
        with self.fake, self.ledger as ledger:
            before = ledger.now
            ledger.peak = ledger.now
            images = torch.empty(pictures, config.channels, *config.image_size)
            labels = torch.empty(pictures, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16) if self.train.precision != "fp32" else nullcontext():
                output = self.trainee(images)
            parts = output.unbind(1) if output.ndim == 3 else (output,)
            loss = torch.stack([loss_of(part, labels, self.train.loss) for part in parts]).mean()
            del output, parts
            kept = ledger.now - before
            loss.backward()
            peak = ledger.peak - before
            del images, labels, loss
        for hook in hooks:
            hook.remove()
        return _Passes(kept, peak)

    def update(self) -> tuple[int, int]:
        """Bytes at the worst moment of clipping and updating above gradients and state, and of the state."""
        learning = [p for p in self.model.parameters() if p.requires_grad]
        with self.fake, self.ledger as ledger:
            for p in learning:
                p.grad = torch.empty_like(p) if p.grad is None else p.grad
            optimizers = optim.build(self.model, self.train)
            before = ledger.peak = ledger.now
            if self.train.clip:
                nn.utils.clip_grad_norm_(learning, self.train.clip, foreach=True)
            for optimizer in optimizers:
                optimizer.step()
            state = ledger.now - before
            return max(0, ledger.peak - before - state), state

    def gathered(self) -> int:
        """FSDP: what is outside the blocks stays whole; of the blocks one is used and one is on its way."""
        blocks = list(self.model.encoder.blocks) if isinstance(self.model, ViT) else []
        each = [_bytes(block.parameters()) for block in blocks]
        return self.parameters - sum(each) + 4 * max(each, default=0)  # parameters and gradients of two


def give_storage(model: Model) -> None:
    """Tensors without numbers in place of those on the meta device, which has no fused attention."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


class _Ledger(TorchDispatchMode):
    """Counts the bytes of every storage from the operation that makes it until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.enter(leaf.untyped_storage())
        return out

    def enter(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.now += self.sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.leave, key)

    def leave(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
