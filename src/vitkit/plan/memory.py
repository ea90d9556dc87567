"""How much memory a training step holds at its peak: the real step, run on tensors that have no numbers.

PyTorch's fake tensors know shapes, types and when they are let go, but hold nothing, so forward, backward,
clipping and the optimiser of ViT-H/14 can be run anywhere in seconds while every byte is counted. Nothing
is assumed about what autograd keeps: a new layer, gradient checkpointing or another optimiser counts itself.

In a step the gradients come while the activations go, so the peak is not the sum of the parts:

    peak = parameters + optimiser + the larger of (forward and backward, update)

Gradients are there from the start, and add to the first, when a batch is computed in several parts or when
DDP keeps its buckets. FSDP keeps one part in `gpus` of parameters, gradients and optimiser, plus what is
gathered: the embedding and the head, two blocks with their gradients.

Frozen weights and low-rank updates are made by the functions of training. What is frozen has no gradients and no state,
and leaves nothing for a backward pass; `states="once"` begins above it, and `head="converge"` is inference alone.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitkit.errors import ConfigError
from vitkit.evaluation.run import evaluating
from vitkit.model.build import Model, outline
from vitkit.model.config import AnyConfig
from vitkit.tasks import Settings, Task
from vitkit.tasks.classify import Classify
from vitkit.training import optim
from vitkit.training.config import TrainConfig
from vitkit.training.parts import add_lora, freeze
from vitkit.training.states import frozen_blocks


@dataclass(frozen=True)
class Memory:
    """Bytes on each device."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  # what the forward pass leaves for the backward pass, with the images
    workspace: int  # above the activations at the worst moment of forward and backward
    gathered: int  # parts of other processes, with FSDP; buckets, with DDP
    peak: int


def training_memory(model: AnyConfig, train: TrainConfig, images: int, processes: int = 1) -> Memory:
    """One process that computes `images` at a time, of a run with `train`'s settings."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if images < 1:
        raise ConfigError("a step needs at least one image for each process; make the batch larger")
    shards, ledger, outlined = processes if train.shard else 1, _Ledger(), outline(model)
    shapes = outlined.state_dict()
    with FakeTensorMode(), ledger, warnings.catch_warnings():  # not on the meta device, which has no fused attention
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # of positions that are kept
        outlined.load_state_dict({n: torch.empty(t.shape, dtype=t.dtype) for n, t in shapes.items()}, assign=True)
        step = Step(outlined, train)
        if shards > 1:  # a gradient goes as soon as it is scattered
            for p in step.learning:
                p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        start = ledger.peak = ledger.now
        inputs, labels = step.batch(images)
        loss = step.features(inputs) if train.head == "converge" else step.loss(inputs, labels)
        activations = ledger.now - start
        if step.learning:
            loss.backward()
        passes = ledger.peak - start
        del inputs, labels, loss
        for p in step.learning:
            p.grad = torch.empty_like(p) if p.grad is None else p.grad
        start = ledger.peak = ledger.now
        step.update()
        state = ledger.now - start
        update = max(0, ledger.peak - start - state)  # of clipping and updating, above gradients and state
    modules = (step.model, *step.model.blocks)
    whole, *blocks = (sum(p.nbytes for p in m.parameters()) for m in modules)
    learns, *learning = (sum(p.nbytes for p in m.parameters() if p.requires_grad) for m in modules)
    own, optimizer, gathered = whole // shards, state // shards, learns if processes > 1 else 0  # DDP: its buckets
    if shards > 1:  # what is outside the blocks stays whole; of two blocks there are parameters and gradients
        gathered = whole - sum(blocks) + 2 * max(blocks, default=0) + 2 * max(learning, default=0)
    grads = learns // shards
    early = grads if shards > 1 or train.accumulate > 1 else 0  # gradients that are there before the backward pass
    peak = own + optimizer + gathered + max(passes + early, grads + update // shards)
    return Memory(own, grads, optimizer, activations, max(0, passes - activations), gathered, peak)


class Step:
    """A training step of a model with fresh weights, as `vitkit train` computes it: what a plan counts and times."""

    def __init__(self, model: Model, train: TrainConfig, task: Task | None = None) -> None:
        """`task`: default is to tell classes apart."""
        model.gradient_checkpointing = train.gradient_checkpointing
        freeze(model, train.freeze)
        add_lora(model, train.lora)
        self.model, self.train = model, train
        self.task = task or Classify(model.outputs, model.config.classes, Settings(loss=train.loss))
        self.trainee = self.task.trainee(model, train.patch_dropout).train()
        self.trainee.start = frozen_blocks(train) if train.states == "once" else 0
        self.optimizers = optim.build(model, train, self.trainee.added())
        if train.head == "converge":  # on features, once they are there
            model.requires_grad_(False)
        self.learning = [p for p in self.trainee.parameters() if p.requires_grad]

    def batch(self, images: int) -> tuple[Tensor, Tensor]:
        """Images, or the states of frozen blocks, and labels of the right shapes."""
        config = self.model.config
        shape = (config.tokens, config.width) if self.trainee.start else (config.channels, *config.image_size)
        return torch.zeros(images, *shape), torch.zeros(images, dtype=torch.long)

    def features(self, images: Tensor) -> Tensor:
        with evaluating(self.model), self.autocast():
            return self.model.pooled(images)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with self.autocast():
            return self.task.loss(self.trainee, images, labels)

    def autocast(self) -> torch.autocast:
        half = torch.float16 if self.train.device == "cuda" else torch.bfloat16  # only a CPU attends in fp32 then
        return torch.autocast("cpu", half, enabled=self.train.precision in ("bf16", "fp16"))

    def backward(self, images: Tensor, targets: Tensor) -> float:
        """Gradients of the mean loss, in `accumulate` parts."""
        total = 0.0
        for x, y in zip(images.chunk(self.train.accumulate), targets.chunk(self.train.accumulate), strict=True):
            loss = self.loss(x, y) * (len(x) / len(images))
            loss.backward()
            total += float(loss.detach())
        return total

    def update(self) -> None:
        if self.train.clip:
            nn.utils.clip_grad_norm_(self.learning, self.train.clip, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()


class _Ledger(TorchDispatchMode):
    """Counts the bytes of every storage from the operation that makes it until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for storage in [leaf.untyped_storage() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]:
            if (key := storage._cdata) not in self.sizes:
                self.sizes[key] = storage.nbytes()
                self.now += self.sizes[key]
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.leave, key)
        return out

    def leave(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
