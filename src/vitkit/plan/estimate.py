"""A setup -> its plan: memory of each device, steps, hours, money, and the data that must flow.

On a GPU two things take time one after the other: matrix products, at `GEMM_SHARE` of the data sheet's compute, and
everything else, which reads and writes memory: `PASSES` times the activations that the backward pass needs, at the full
bandwidth. The two shares were fitted to timm's published training speeds on an RTX 3090
(results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv: ViT-Ti/16, S/16, B/16, B/32, L/32), which they give within
15%, but for Ti/16, which is really a fifth slower. A model too small to keep the GPU busy waits for its kernels to be
started. Then the optimiser, which reads and writes its state once, and the part of the exchange of gradients that the
backward pass cannot hide.

A CPU is measured: two shallow copies of the model (one and three blocks) are trained for a few steps, and the
time of the other blocks follows.

A frozen part costs a forward pass, with a third of the memory traffic: once for every image where `vitkit train` keeps
features or states, else in each step. A frozen map above something that learns still hands its gradient down.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product

import torch

from vitkit.checkpoints.load import find_config
from vitkit.evaluation.linear import FOLDS, MOST_WORK
from vitkit.model.build import Model, build, outline
from vitkit.model.config import AnyConfig, ViTConfig, as_size
from vitkit.model.summary import layer_table
from vitkit.plan.memory import Memory, Step, training_memory
from vitkit.plan.setup import DEVICES, Device, Setup, complete, settle
from vitkit.tasks.trainee import feature_width
from vitkit.training import threads
from vitkit.training.config import TrainConfig
from vitkit.training.costs import HEAD_WORK
from vitkit.training.parts import add_lora, freeze
from vitkit.training.recipe import precision_for
from vitkit.training.states import frozen_blocks, images_seen

GEMM_SHARE = 0.85
PASSES = 12
LAUNCH = 3e-4  # seconds to start the kernels of one block, forward and backward, from Python
BACKWARD = 2 / 3  # of a step; exchange of gradients hides behind it
PROBE_FLOPS = 1.5e11  # a measured step should not take longer than a few seconds
USABLE = 0.92  # of a GPU's memory: the rest goes to its context, libraries and fragments
SHARD_BYTES = 1e9
HEAD_FLOPS = 2e10  # a second, of a host's processor in double precision: a guess
DECODED_PER_CORE = 250.0  # images of ImageNet's size a second, decoded and augmented; docs/data.md says more


@dataclass(frozen=True)
class StepTime:
    """Seconds."""

    passes: float  # forward and backward of one process's part of the batch
    update: float
    exchange: float  # what the backward pass does not hide

    @property
    def total(self) -> float:
        return self.passes + self.update + self.exchange


def macs_per_image(config: AnyConfig) -> float:
    """Multiply-adds of a forward pass as it is run: the last block computes only what the head reads."""
    return float(sum(row["macs"] for row in layer_table(outline(config).eval(), as_run=True)))


def flops_per_image(config: AnyConfig, train: TrainConfig) -> tuple[float, float]:
    """Of the forward pass below all that learns; of forward and backward from there on.

    Two for each multiply-add, and twice that in the backward pass, or once where the weights are frozen;
    checkpointing repeats the forward.
    """
    model, below, above = outline(config).eval(), 0.0, 0.0
    freeze(model, train.freeze)
    add_lora(model, train.lora)
    for row in layer_table(model, as_run=True):
        learns = any(p.requires_grad for p in model.get_submodule(row["name"]).parameters())
        if learns or above:
            above += 2 * row["macs"] * (2 + learns + train.gradient_checkpointing)
        else:
            below += 2 * row["macs"]
    return below, above


def gpu_step(config: AnyConfig, setup: Setup, memory: Memory) -> StepTime:
    """Without what `gpu_forward` says."""
    device, train = DEVICES[setup.device], setup.train
    written: float = memory.activations * setup.accumulate
    if setup.checkpointing:  # more is written than kept, and the forward pass writes it twice
        plain = train.replace(gradient_checkpointing=False, shard=False, accumulate=1)
        written = 4 / 3 * setup.accumulate * training_memory(config, plain, setup.at_once).activations
    blocks = 0 if train.freeze == "backbone" else _blocks(config) - frozen_blocks(train)
    flops = setup.per_device * flops_per_image(config, train)[1]
    passes = _gpu_passes(setup, flops, written, blocks * setup.accumulate)
    held = 2 * memory.gradients + memory.optimizer  # of what learns: weights, gradients, state
    # Rings: DDP sums gradients (2 x their size), FSDP gathers parameters twice and scatters gradients.
    sent = (2 * memory.parameters + memory.gradients) * setup.gpus if setup.shard else 2 * memory.gradients
    speed = device.link if setup.gpus <= setup.per_machine else device.network
    exchange = (setup.gpus - 1) / setup.gpus * sent / speed - BACKWARD * passes / setup.accumulate
    return StepTime(passes, 2 * held / device.bandwidth, max(0.0, exchange))


def gpu_forward(config: AnyConfig, setup: Setup) -> float:
    """Seconds for an image, below all that learns: a third of the traffic and of the kernels of a step."""
    train, below = setup.train, flops_per_image(config, setup.train)[0]
    share = below / (2 * macs_per_image(config)) / 3
    if not share:
        return 0.0
    whole = TrainConfig(optimizer="sgd", precision=train.precision, device=train.device)
    written = share * training_memory(config, whole, setup.at_once).activations
    return _gpu_passes(setup, setup.at_once * below, written, share * _blocks(config)) / setup.at_once


def _gpu_passes(setup: Setup, flops: float, written: float, blocks: float) -> float:
    device = DEVICES[setup.device]
    compute = 1e12 * (device.tflops_fp32 if setup.precision == "fp32" else device.tflops)
    if setup.mfu is not None:
        return flops / (setup.mfu * compute)
    return max(flops / (GEMM_SHARE * compute) + PASSES * written / device.bandwidth, LAUNCH * blocks)


def _blocks(config: AnyConfig) -> int:
    return config.depth if isinstance(config, ViTConfig) else config.stem.blocks


def measured_step(config: AnyConfig, setup: Setup, seconds: float = 6.0, forward: bool = False) -> StepTime:
    """One process on this machine's CPU, with the number of threads that `vitkit train` would take.

    Without the frozen blocks of `--freeze N`; `forward`: all of `config`, by inference alone.
    """
    train, below = setup.train, 0
    if forward:
        train = train.replace(head="converge", freeze="backbone", states="", gradient_checkpointing=False)
    elif frozen_blocks(train) and isinstance(config, ViTConfig):  # of a frozen block, which does not run, come states
        config, below = config.replace(depth=config.depth - frozen_blocks(train) + 1), 1
        train = train.replace(freeze="1", states="once")
    deep = isinstance(config, ViTConfig) and config.depth > 3 + below
    shallow = [config.replace(depth=depth + below) for depth in (1, 3)] if deep else [config]
    batch = max(1, min(round(PROBE_FLOPS / sum(flops_per_image(shallow[-1], train))), setup.at_once))
    steps = [timed_step(build(each), train, batch) for each in shallow]
    choices, before = threads.numbers(), torch.get_num_threads()
    best = {number: [(math.inf, math.inf)] * len(steps) for number in choices}
    start, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - start < seconds:  # in turns; the best of each
        for number, i in product(choices, range(len(steps))):
            torch.set_num_threads(number)
            passes, update = steps[i]()
            if rounds:  # the first allocates
                best[number][i] = (min(best[number][i][0], passes), min(best[number][i][1], update))
        rounds += 1
    torch.set_num_threads(before)
    more = (config.depth - below - 1) / 2 if deep else 0.0
    found = {n: [a + more * (b - a) for a, b in zip(each[0], each[-1], strict=True)] for n, each in best.items()}
    passes, update = found[threads.fastest({number: sum(both) for number, both in found.items()})]
    return StepTime(passes / batch * setup.per_device, update, 0.0)


def timed_step(model: Model, train: TrainConfig, batch: int) -> Callable[[], tuple[float, float]]:
    """A function that runs a training step and gives the seconds of (forward and backward, update)."""
    step = Step(model, train)
    images, labels = step.batch(batch)
    images.normal_()

    def run() -> tuple[float, float]:
        for optimizer in step.optimizers:
            optimizer.zero_grad(set_to_none=True)
        start = time.perf_counter()
        step.features(images) if train.head == "converge" else step.loss(images, labels).backward()
        middle = time.perf_counter()
        step.update()
        return middle - start, time.perf_counter() - middle

    return run


@dataclass(frozen=True)
class Once:
    """What a frozen part makes of every image, each view for itself: computed once and kept on disk."""

    images: int
    seconds: float
    bytes: int
    head: float = 0.0  # seconds on the host's processor until a head on features is found; 0: there are steps


@dataclass(frozen=True)
class Plan:
    setup: Setup  # with nothing left open
    parameters: int
    learning: int  # parameters that do, and those of low-rank updates
    gmacs: float  # of one image, as it is run
    memory: Memory
    fits: bool
    steps: int  # of features: batches
    step: StepTime
    once: Once | None
    images_per_second: float
    machines: int
    hours: float
    cost: float
    shards: int  # files of about a gigabyte, at least four for each device, as many for each
    cores: int  # of each machine's processors that keep its devices fed from JPEG
    advice: tuple[str, ...] = ()

    @property
    def device(self) -> Device:
        return DEVICES[self.setup.device]

    def to_dict(self) -> dict[str, object]:
        found = asdict(self)
        return found.pop("setup") | {
            "images_at_a_time": self.setup.at_once,
            "memory_available": round(self.device.memory),
            "step_seconds": found.pop("step") | {"total": self.step.total},
            "data_bytes": self.setup.images * self.setup.image_bytes,
            "decoding_cores_per_machine": found.pop("cores"),
            **found,
            "gmacs": round(self.gmacs, 3),
            "advice": list(self.advice),
        }


def timed(config: AnyConfig, setup: Setup, memory: Memory) -> tuple[StepTime, Once | None]:
    """A step, with what is frozen below it, unless that is computed once."""
    train, gpu, each = setup.train, bool(DEVICES[setup.device].tflops), 0.0
    blocks, seen = frozen_blocks(train), images_seen({"train": setup.images}, train)
    if gpu:
        each = gpu_forward(config, setup)
    elif blocks or train.head == "converge":
        below = config.replace(depth=blocks) if isinstance(config, ViTConfig) and blocks else config
        each = measured_step(below, setup, forward=True).passes / setup.per_device
    if train.head == "converge":
        width = feature_width(outline(config))
        size = seen * width * config.classes
        head = HEAD_WORK * 4 * size / HEAD_FLOPS * (1.5 / FOLDS if size > MOST_WORK else 1.0)  # one fold: as a budget
        return StepTime(each * setup.per_device, 0.0, 0.0), Once(seen, seen * each, 4 * seen * width, head)
    step = gpu_step(config, setup, memory) if gpu else measured_step(config, setup)
    if train.states == "once":
        return step, Once(seen, seen * each, 4 * seen * config.tokens * config.width)
    return replace(step, passes=step.passes + setup.per_device * each), None


def plan(setup: Setup) -> Plan:
    setup = complete(setup)
    config, gpus = find_config(setup.model), setup.gpus
    size = config.image_size if setup.image_size is None else as_size(setup.image_size, "--image-size")
    config = config.replace(image_size=size, classes=config.classes if setup.classes is None else setup.classes)
    setup = replace(setup, precision=setup.precision or precision_for(config, torch.device("cpu")))
    setup, notes = settle(setup, config)
    memory = training_memory(config, setup.train, setup.at_once, gpus)
    step, once = timed(config, setup, memory)
    passes = math.ceil(once.images / setup.batch_size) if once and setup.head == "converge" else 0
    seconds = (0.0 if passes else setup.steps * step.total) + (once.seconds + once.head if once else 0.0)
    machines, speed = math.ceil(gpus / setup.per_machine), setup.batch_size / step.total
    hours, learner = seconds / 3600, outline(config)
    parameters = sum(p.numel() for p in learner.parameters())
    freeze(learner, setup.freeze)
    add_lora(learner, setup.lora)
    made = Plan(
        setup=setup,
        parameters=parameters,
        learning=sum(p.numel() for p in learner.parameters() if p.requires_grad),
        gmacs=macs_per_image(config) / 1e9,
        memory=memory,
        fits=memory.peak <= USABLE * (DEVICES[setup.device].memory or math.inf),
        steps=passes or setup.steps,
        step=step,
        once=once,
        images_per_second=speed,
        machines=machines,
        hours=hours,
        cost=hours * gpus * (setup.price or 0.0),
        shards=math.ceil(max(setup.images * setup.image_bytes / SHARD_BYTES, 4 * gpus) / gpus) * gpus,
        cores=math.ceil(speed / machines / DECODED_PER_CORE),
    )
    return replace(made, advice=(*notes, *advise(made, config)))


def advise(made: Plan, config: AnyConfig) -> list[str]:
    """What to change when it does not fit, and what to watch when it does."""
    setup, cpu, have = made.setup, made.setup.device == "cpu", os.cpu_count() or 1
    waits = made.step.exchange / made.step.total
    watch = [
        (setup.shard and setup.gpus == 1, "--shard does nothing on one device"),
        (waits > 0.1, f"{waits:.0%} of each step waits for the network: make the batch larger or use fewer devices"),
        (cpu and made.hours > 720, "more than a month on this CPU: fine-tune a checkpoint instead, or plan for a GPU"),
        (cpu and setup.checkpointing, "set MALLOC_MMAP_THRESHOLD_=65536: glibc may keep what checkpointing frees"),
        (cpu and made.cores > have, f"JPEG wants {made.cores} cores and this machine has {have}: train with --cache"),
    ]
    return ([] if made.fits else [_to_fit(made, config)]) + [line for holds, line in watch if holds]


def _to_fit(made: Plan, config: AnyConfig) -> str:
    """The first of ever stronger measures that brings the peak below what the device has."""
    setup = made.setup
    others = [replace(setup, accumulate=n) for n in (2, 4, 8)]
    others += [replace(setup, checkpointing=True, accumulate=n) for n in (1, 4, 16)]
    if setup.gpus > 1:
        others += [replace(setup, checkpointing=True, shard=True, accumulate=n) for n in (1, 4, 16)]
    for other in others:
        if setup.head == "converge" or not setup.accumulate <= other.accumulate <= other.per_device:
            continue
        peak = training_memory(config, other.train, other.at_once, other.gpus).peak
        if peak <= USABLE * made.device.memory:
            options = [f"--{name}" for name in ("checkpointing", "shard") if getattr(other, name)]
            options += [f"--accumulate {other.accumulate}"] if other.accumulate > 1 else []
            return f"does not fit; with {' '.join(options)} it takes {peak / 1e9:.1f} GB"
    return "does not fit, and neither checkpointing, parts nor shards are enough: take a smaller model or batch"
