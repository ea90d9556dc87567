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
from vitkit.errors import ConfigError, did_you_mean
from vitkit.model.build import Model, build, outline
from vitkit.model.config import AnyConfig, ViTConfig, as_size
from vitkit.model.summary import layer_table
from vitkit.plan.memory import Memory, Step, training_memory
from vitkit.training import threads
from vitkit.training.config import TrainConfig
from vitkit.training.recipe import precision_for

GB = 1e9
GEMM_SHARE = 0.85
PASSES = 12
LAUNCH = 3e-4  # seconds to start the kernels of one block, forward and backward, from Python
BACKWARD = 2 / 3  # of a step; exchange of gradients hides behind it
PROBE_FLOPS = 1.5e11  # a measured step should not take longer than a few seconds
USABLE = 0.92  # of a GPU's memory: the rest goes to its context, libraries and fragments
SHARD_BYTES = 1e9
DECODED_PER_CORE = 250.0  # images of ImageNet's size a second, decoded and augmented; docs/data.md says more


@dataclass(frozen=True)
class Device:
    """Figures of the makers' data sheets: compute is dense, with fp32 accumulation; links per device and direction."""

    name: str
    memory: float  # bytes; 0: not known
    tflops: float  # bf16 or fp16; 0: measured when planning
    tflops_fp32: float  # with TF32 where there is one
    bandwidth: float  # bytes per second of its own memory
    link: float  # bytes per second to its neighbours in one machine
    network: float  # bytes per second that one device gets of its machine's network
    price: float  # dollars for an hour on demand, a round figure to start from


DEVICES: dict[str, Device] = {
    "h100": Device("H100 SXM 80 GB", 80 * GB, 989, 495, 3350 * GB, 450 * GB, 50 * GB, 3.0),
    "a100": Device("A100 SXM 80 GB", 80 * GB, 312, 156, 2039 * GB, 300 * GB, 25 * GB, 1.8),
    "l4": Device("L4 24 GB", 24 * GB, 121, 60, 300 * GB, 16 * GB, 3 * GB, 0.7),
    "rtx3090": Device("RTX 3090 24 GB", 24 * GB, 71, 35.5, 936 * GB, 16 * GB, 3 * GB, 0.3),
    "cpu": Device("this CPU", 0, 0, 0, 0, 5 * GB, 1 * GB, 0.0),
}


@dataclass(frozen=True)
class Setup:
    model: str
    images: int = 1_281_167
    gpus: int = 1
    device: str = "cpu"
    epochs: float = 90.0
    batch_size: int = 0  # over all devices; 0: 1024 on GPUs, 64 on a CPU
    image_size: str | None = None
    classes: int | None = None
    accumulate: int = 1
    checkpointing: bool = False
    shard: bool = False
    optimizer: str = "adamw"
    precision: str = ""  # bf16 on GPUs; on a CPU as `vitkit train` chooses
    per_machine: int = 8
    price: float | None = None  # dollars for an hour of one device
    mfu: float | None = None  # share of a device's compute, in place of an estimate
    image_bytes: float = 110_000.0  # ImageNet's mean

    @property
    def per_device(self) -> int:
        return self.batch_size // self.gpus

    @property
    def at_once(self) -> int:
        """Images that each device computes at a time."""
        return math.ceil(self.per_device / self.accumulate)

    @property
    def train(self) -> TrainConfig:
        """The settings of `vitkit train`."""
        same = {name: getattr(self, name) for name in ("batch_size", "optimizer", "precision", "shard", "accumulate")}
        same["device"] = "cuda" if DEVICES[self.device].tflops else "cpu"
        return TrainConfig(lr=1e-3, weight_decay=0.05, gradient_checkpointing=self.checkpointing, **same)


def complete(setup: Setup) -> Setup:
    """Nothing left open, nothing impossible."""
    setup = replace(setup, device=setup.device.lower())
    if setup.device not in DEVICES:
        near, known = did_you_mean(setup.device, DEVICES), ", ".join(DEVICES)
        raise ConfigError(f"no device {setup.device!r}.{near} Choose from: {known}")
    _check_ranges(setup)
    device = DEVICES[setup.device]
    batch, precision = (1024, "bf16") if device.tflops else (64, "")
    setup = replace(
        setup,
        batch_size=setup.batch_size or max(setup.gpus, batch // setup.gpus * setup.gpus),
        precision=setup.precision or precision,
        price=device.price if setup.price is None else setup.price,
    )
    if setup.batch_size % setup.gpus:
        wrong = f"--batch-size {setup.batch_size} must be divided by the {setup.gpus} devices"
        raise ConfigError(f"{wrong}; it counts all of them")
    if setup.per_device < setup.accumulate:
        raise ConfigError(f"--accumulate {setup.accumulate} is more than the {setup.per_device} images of a device")
    return setup


def _check_ranges(setup: Setup) -> None:
    for name in ("images", "gpus", "accumulate", "per_machine", "epochs", "batch_size", "price"):
        value, may_be_zero = getattr(setup, name) or 0, name in ("batch_size", "price")
        if value < 0 or (value == 0 and not may_be_zero):
            needs = "not be negative" if may_be_zero else "be above 0"
            raise ConfigError(f"--{name.replace('_', '-')} {value} must {needs}")
    if setup.mfu is not None and not 0 < setup.mfu <= 1:
        raise ConfigError(f"--mfu {setup.mfu} is a share of the device's compute, above 0 and at most 1")
    if not DEVICES[setup.device].tflops and setup.gpus > 1:
        raise ConfigError("--device cpu is this machine alone; leave --gpus out")


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


def flops_per_image(config: AnyConfig, checkpointing: bool) -> float:
    """Two for each multiply-add; the backward pass costs twice the forward; checkpointing repeats the forward."""
    return 2 * macs_per_image(config) * (4 if checkpointing else 3)


def gpu_step(config: AnyConfig, setup: Setup, memory: Memory) -> StepTime:
    device, images, train = DEVICES[setup.device], setup.per_device, setup.train
    compute = 1e12 * (device.tflops_fp32 if setup.precision == "fp32" else device.tflops)
    flops = images * flops_per_image(config, setup.checkpointing)
    if setup.mfu is not None:
        passes = flops / (setup.mfu * compute)
    else:
        written: float = memory.activations * setup.accumulate
        if setup.checkpointing:  # more is written than kept, and the forward pass writes it twice
            plain = train.replace(gradient_checkpointing=False, shard=False, accumulate=1)
            written = 4 / 3 * setup.accumulate * training_memory(config, plain, setup.at_once).activations
        passes = flops / (GEMM_SHARE * compute) + PASSES * written / device.bandwidth
        blocks = config.depth if isinstance(config, ViTConfig) else config.stem.blocks
        passes = max(passes, LAUNCH * blocks * setup.accumulate)
    held = memory.parameters + memory.gradients + memory.optimizer
    # Rings: DDP sums gradients (2 x their size), FSDP gathers parameters twice and scatters gradients (3 x).
    times, whole = (3, memory.parameters * setup.gpus) if setup.shard else (2, memory.parameters)
    speed = device.link if setup.gpus <= setup.per_machine else device.network
    exchange = times * (setup.gpus - 1) / setup.gpus * whole / speed - BACKWARD * passes / setup.accumulate
    return StepTime(passes, 2 * held / device.bandwidth, max(0.0, exchange))


def measured_step(config: AnyConfig, setup: Setup, seconds: float = 6.0) -> StepTime:
    """One process on this machine's CPU, with the number of threads that `vitkit train` would take."""
    deep = isinstance(config, ViTConfig) and config.depth > 3
    shallow = [config.replace(depth=depth) for depth in (1, 3)] if deep else [config]
    batch = max(1, min(round(PROBE_FLOPS / flops_per_image(shallow[-1], setup.checkpointing)), setup.at_once))
    steps = [timed_step(build(each), setup.train, batch) for each in shallow]
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
    more = (config.depth - 1) / 2 if deep else 0.0
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
        step.loss(images, labels).backward()
        middle = time.perf_counter()
        step.update()
        return middle - start, time.perf_counter() - middle

    return run


@dataclass(frozen=True)
class Plan:
    setup: Setup  # with nothing left open
    parameters: int
    gmacs: float  # of one image, as it is run
    memory: Memory
    fits: bool
    steps: int
    step: StepTime
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


def plan(setup: Setup) -> Plan:
    setup = complete(setup)
    config, gpus = find_config(setup.model), setup.gpus
    size = config.image_size if setup.image_size is None else as_size(setup.image_size, "--image-size")
    config = config.replace(image_size=size, classes=config.classes if setup.classes is None else setup.classes)
    setup = replace(setup, precision=setup.precision or precision_for(config, torch.device("cpu")))
    memory = training_memory(config, setup.train, setup.at_once, gpus)
    step = gpu_step(config, setup, memory) if DEVICES[setup.device].tflops else measured_step(config, setup)
    steps = max(1, round(setup.epochs * max(1, setup.images // setup.batch_size)))
    machines, speed = math.ceil(gpus / setup.per_machine), setup.batch_size / step.total
    hours = steps * step.total / 3600
    made = Plan(
        setup=setup,
        parameters=sum(p.numel() for p in outline(config).parameters()),
        gmacs=macs_per_image(config) / 1e9,
        memory=memory,
        fits=memory.peak <= USABLE * (DEVICES[setup.device].memory or math.inf),
        steps=steps,
        step=step,
        images_per_second=speed,
        machines=machines,
        hours=hours,
        cost=hours * gpus * (setup.price or 0.0),
        shards=math.ceil(max(setup.images * setup.image_bytes / SHARD_BYTES, 4 * gpus) / gpus) * gpus,
        cores=math.ceil(speed / machines / DECODED_PER_CORE),
    )
    return replace(made, advice=tuple(advise(made, config)))


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
        if not setup.accumulate <= other.accumulate <= other.per_device:
            continue
        peak = training_memory(config, other.train, other.at_once, other.gpus).peak
        if peak <= USABLE * made.device.memory:
            options = [f"--{name}" for name in ("checkpointing", "shard") if getattr(other, name)]
            options += [f"--accumulate {other.accumulate}"] if other.accumulate > 1 else []
            return f"does not fit; with {' '.join(options)} it takes {peak / 1e9:.1f} GB"
    return "does not fit, and neither checkpointing, parts nor shards are enough: take a smaller model or batch"
