"""How long a training step takes.

On a GPU two things take time one after the other: matrix products, at `GEMM_SHARE` of the data sheet's
compute, and everything else, which reads and writes memory: `PASSES` times the activations that the
backward pass needs, at the full bandwidth. The two shares were fitted to timm's published training speeds on
an RTX 3090 (results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv: ViT-Ti/16, S/16, B/16, B/32, L/32),
which they give within 15%, but for Ti/16, which is really a fifth slower. A model too small to keep the GPU
busy waits for its kernels to be started. Then the optimiser, which reads and
writes its state once, and the part of the exchange of gradients that the backward pass cannot hide.

A CPU is measured: two shallow copies of the model (one and three blocks) are trained for a few steps, and the
time of the other blocks follows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vitkit.model.build import build
from vitkit.model.config import AnyConfig, ViTConfig
from vitkit.model.summary import summarize
from vitkit.model.vit import ViT
from vitkit.plan.devices import Device
from vitkit.plan.memory import Memory, training_memory
from vitkit.train import optim
from vitkit.train.config import TrainConfig
from vitkit.train.objective import Trainee, loss_of

GEMM_SHARE = 0.85
PASSES = 12
LAUNCH = 3e-4  # seconds to start the kernels of one block, forward and backward, from Python
BACKWARD = 2 / 3  # of a step; exchange of gradients hides behind it
PROBE_FLOPS = 1.5e11  # a measured step should not take longer than a few seconds


@dataclass(frozen=True)
class StepTime:
    """Seconds."""

    passes: float  # forward and backward of one process's part of the batch
    update: float
    exchange: float  # what the backward pass does not hide

    @property
    def total(self) -> float:
        return self.passes + self.update + self.exchange


def macs_per_picture(config: AnyConfig) -> float:
    """Multiply-adds of a forward pass as it is run: the last block computes only what the head reads."""
    macs = float(sum(row["macs"] for row in summarize(config)["layers"]))
    if not isinstance(config, ViTConfig) or config.pooling != "cls":
        return macs
    unread = config.tokens - 1 - int(config.distillation_token)
    up = 2 * config.mlp_width if config.activation == "swiglu" else config.mlp_width
    per_token = config.width * (config.width + up + config.mlp_width) + 2 * config.tokens * config.width
    return macs - unread * per_token


def flops_per_picture(config: AnyConfig, checkpointing: bool) -> float:
    """A multiply-add is two; the backward pass costs twice the forward; checkpointing repeats the forward."""
    return 2 * macs_per_picture(config) * (4 if checkpointing else 3)


def gpu_step(
    config: AnyConfig,
    train: TrainConfig,
    device: Device,
    memory: Memory,
    pictures: int,
    processes: int,
    per_machine: int,
    mfu: float | None = None,
) -> StepTime:
    """`pictures`: of one process and step. `mfu`: share of the device's compute, in place of the two terms."""
    compute = 1e12 * (device.tflops_fp32 if train.precision == "fp32" else device.tflops)
    flops = pictures * flops_per_picture(config, train.gradient_checkpointing)
    if mfu is not None:
        passes = flops / (mfu * compute)
    else:
        written: float = memory.activations * train.accumulate
        if train.gradient_checkpointing:  # more is written than kept, and the forward pass writes it twice
            written = 4 / 3 * train.accumulate * _activations(config, train, math.ceil(pictures / train.accumulate))
        passes = flops / (GEMM_SHARE * compute) + PASSES * written / device.bandwidth
        blocks = config.depth if isinstance(config, ViTConfig) else sum(config.stem.layers)
        passes = max(passes, LAUNCH * blocks * train.accumulate)
    held = memory.parameters + memory.gradients + memory.optimizer
    return StepTime(
        passes, 2 * held / device.bandwidth, _exchange(train, device, memory, processes, per_machine, passes)
    )


def _activations(config: AnyConfig, train: TrainConfig, pictures: int) -> float:
    """Bytes without checkpointing."""
    plain = train.replace(gradient_checkpointing=False, shard=False, accumulate=1)
    return training_memory(config, plain, pictures).activations


def _exchange(
    train: TrainConfig, device: Device, memory: Memory, processes: int, per_machine: int, passes: float
) -> float:
    """Rings: DDP sums gradients (2 x their size), FSDP gathers parameters twice and scatters gradients (3 x)."""
    if processes == 1:
        return 0.0
    whole = memory.parameters * (processes if train.shard else 1)
    speed = device.link if processes <= per_machine else device.network
    seconds = (3 if train.shard else 2) * (processes - 1) / processes * whole / speed
    return max(0.0, seconds - BACKWARD * passes / train.accumulate)


def measured_step(config: AnyConfig, train: TrainConfig, pictures: int, seconds: float = 6.0) -> StepTime:
    """One process on this machine's CPU with PyTorch's present number of threads."""
    part = math.ceil(pictures / train.accumulate)
    if not isinstance(config, ViTConfig) or config.depth <= 3:
        passes, update = _timed([config], train, _probe_batch(config, train, part), seconds)[0]
        return StepTime(passes / _probe_batch(config, train, part) * pictures, update, 0.0)
    shallow = [config.replace(depth=depth) for depth in (1, 3)]
    batch = _probe_batch(shallow[1], train, part)
    (passes1, update1), (passes3, update3) = _timed(shallow, train, batch, seconds)
    more = (config.depth - 1) / 2
    passes = passes1 + more * (passes3 - passes1)
    return StepTime(passes / batch * pictures, update1 + more * (update3 - update1), 0.0)


def _probe_batch(config: AnyConfig, train: TrainConfig, wanted: int) -> int:
    return max(1, min(wanted, round(PROBE_FLOPS / flops_per_picture(config, train.gradient_checkpointing))))


def _timed(configs: Sequence[AnyConfig], train: TrainConfig, batch: int, seconds: float) -> list[tuple[float, float]]:
    """Seconds of (forward and backward, update) of each; interleaved, the best of several rounds."""
    steps = [make_step(config, train, batch) for config in configs]
    best = [(math.inf, math.inf)] * len(steps)
    start, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - start < seconds:
        for i, step in enumerate(steps):
            passes, update = step()
            if rounds:  # the first allocates
                best[i] = (min(best[i][0], passes), min(best[i][1], update))
        rounds += 1
    return best


def make_step(config: AnyConfig, train: TrainConfig, batch: int) -> Callable[[], tuple[float, float]]:
    """A training step of a model with fresh weights; it returns its seconds of (forward and backward, update)."""
    model = build(config)
    if isinstance(model, ViT):
        model.gradient_checkpointing = train.gradient_checkpointing
    trainee = Trainee(model, train.patch_dropout).train()
    optimizers = optim.build(model, train)
    images = torch.randn(batch, config.channels, *config.image_size)
    labels = torch.zeros(batch, dtype=torch.long)
    learning = list(model.parameters())

    def step() -> tuple[float, float]:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        start = time.perf_counter()
        output = trainee(images)
        parts = output.unbind(1) if output.ndim == 3 else (output,)
        torch.stack([loss_of(part, labels, train.loss) for part in parts]).mean().backward()
        middle = time.perf_counter()
        if train.clip:
            nn.utils.clip_grad_norm_(learning, train.clip, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
        return middle - start, time.perf_counter() - middle

    return step
