"""A setup -> its plan: memory of each device, steps, hours, money, and the data that must flow."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from vitkit.checkpoints.load import find_config
from vitkit.errors import ConfigError, did_you_mean
from vitkit.model.config import AnyConfig, as_size
from vitkit.plan.devices import DEVICES, Device
from vitkit.plan.memory import Memory, training_memory
from vitkit.plan.speed import StepTime, gpu_step, macs_per_picture, measured_step
from vitkit.train.config import TrainConfig

USABLE = 0.92  # of a GPU's memory: the rest goes to its context, libraries and fragments
SHARD_BYTES = 1e9
DECODED_PER_CORE = 250.0  # pictures of ImageNet's size a second, decoded and augmented; docs/data.md says more


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
    precision: str = ""  # bf16 on GPUs, fp32 on a CPU
    per_machine: int = 8
    price: float | None = None  # dollars for an hour of one device
    mfu: float | None = None
    picture_bytes: float = 110_000.0  # ImageNet's mean


@dataclass(frozen=True)
class Plan:
    setup: Setup  # with nothing left open
    device: Device
    parameters: int
    gmacs: float  # of one picture, as it is run
    pictures: int  # that each device computes at a time
    memory: Memory
    steps: int
    step: StepTime
    advice: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.device.memory or self.memory.peak <= USABLE * self.device.memory

    @property
    def machines(self) -> int:
        return math.ceil(self.setup.gpus / self.setup.per_machine)

    @property
    def images_per_second(self) -> float:
        return self.setup.batch_size / self.step.total

    @property
    def hours(self) -> float:
        return self.steps * self.step.total / 3600

    @property
    def cost(self) -> float:
        return self.hours * self.setup.gpus * (self.setup.price or 0.0)

    @property
    def shards(self) -> int:
        """Files of about a gigabyte, at least four for each device, as many for each."""
        wanted = max(self.setup.images * self.setup.picture_bytes / SHARD_BYTES, 4 * self.setup.gpus)
        return math.ceil(wanted / self.setup.gpus) * self.setup.gpus

    @property
    def cores(self) -> int:
        """Processor cores of each machine that keep its devices fed from JPEG."""
        return math.ceil(self.images_per_second / self.machines / DECODED_PER_CORE)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.setup),
            "parameters": self.parameters,
            "gmacs": round(self.gmacs, 3),
            "pictures_at_a_time": self.pictures,
            "memory": asdict(self.memory),
            "memory_available": round(self.device.memory),
            "fits": self.fits,
            "steps": self.steps,
            "step_seconds": asdict(self.step) | {"total": self.step.total},
            "images_per_second": self.images_per_second,
            "machines": self.machines,
            "hours": self.hours,
            "cost": self.cost,
            "data_bytes": self.setup.images * self.setup.picture_bytes,
            "shards": self.shards,
            "decoding_cores_per_machine": self.cores,
            "advice": list(self.advice),
        }


def plan(setup: Setup) -> Plan:
    setup = complete(setup)
    config = model_of(setup)
    device = DEVICES[setup.device]
    pictures = setup.batch_size // setup.gpus
    train = train_config(setup)
    at_once = math.ceil(pictures / setup.accumulate)
    memory = training_memory(config, train, at_once, setup.gpus)
    if device.tflops:
        step = gpu_step(config, train, device, memory, pictures, setup.gpus, setup.per_machine, setup.mfu)
    else:
        step = measured_step(config, train, pictures)
    made = Plan(
        setup=setup,
        device=device,
        parameters=_parameters(config),
        gmacs=macs_per_picture(config) / 1e9,
        pictures=at_once,
        memory=memory,
        steps=max(1, round(setup.epochs * max(1, setup.images // setup.batch_size))),
        step=step,
        advice=(),
    )
    return replace(made, advice=tuple(advise(made, config)))


def complete(setup: Setup) -> Setup:
    """Nothing left open, nothing impossible."""
    setup = replace(setup, device=setup.device.lower())
    if setup.device not in DEVICES:
        known = ", ".join(DEVICES)
        raise ConfigError(f"no device {setup.device!r}.{did_you_mean(setup.device, DEVICES)} Choose from: {known}")
    for name in ("images", "gpus", "accumulate", "per_machine", "epochs"):
        if getattr(setup, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(setup, name)} must be above 0")
    for name in ("batch_size", "price"):
        if (getattr(setup, name) or 0) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(setup, name)} must not be negative")
    gpu = DEVICES[setup.device].tflops > 0
    batch = setup.batch_size or max(setup.gpus, (1024 if gpu else 64) // setup.gpus * setup.gpus)
    if batch % setup.gpus:
        raise ConfigError(f"--batch-size {batch} must be divided by the {setup.gpus} devices; it counts all of them")
    if batch // setup.gpus < setup.accumulate:
        raise ConfigError(
            f"--accumulate {setup.accumulate} is more than the {batch // setup.gpus} pictures of a device"
        )
    if setup.mfu is not None and not 0 < setup.mfu <= 1:
        raise ConfigError(f"--mfu {setup.mfu} is a share of the device's compute, above 0 and at most 1")
    if not gpu and setup.gpus > 1:
        raise ConfigError("--device cpu is this machine alone; leave --gpus out")
    price = DEVICES[setup.device].price if setup.price is None else setup.price
    return replace(setup, batch_size=batch, precision=setup.precision or ("bf16" if gpu else "fp32"), price=price)


def model_of(setup: Setup) -> AnyConfig:
    config = find_config(setup.model)
    changes: dict[str, Any] = {}
    if setup.image_size is not None:
        changes["image_size"] = as_size(setup.image_size, "--image-size")
    if setup.classes is not None:
        changes["classes"] = setup.classes
    return config.replace(**changes) if changes else config


def train_config(setup: Setup) -> TrainConfig:
    """What `vitkit train` would be given."""
    settings: dict[str, Any] = {"optimizer": setup.optimizer, "precision": setup.precision, "shard": setup.shard}
    settings |= {"accumulate": setup.accumulate, "gradient_checkpointing": setup.checkpointing}
    return TrainConfig(lr=1e-3, weight_decay=0.05, batch_size=setup.batch_size, **settings)


def _parameters(config: AnyConfig) -> int:
    from vitkit.model.build import outline

    return sum(p.numel() for p in outline(config).parameters())


def advise(made: Plan, config: AnyConfig) -> list[str]:
    """What to change when it does not fit, and what to watch when it does."""
    setup, lines = made.setup, []
    if not made.fits:
        lines.append(_to_fit(made, config))
    if setup.shard and setup.gpus == 1:
        lines.append("--shard does nothing on one device")
    if made.step.exchange > 0.1 * made.step.total:
        share = made.step.exchange / made.step.total
        lines.append(f"{share:.0%} of each step waits for the network: make the batch larger or use fewer devices")
    if setup.device == "cpu" and made.hours > 24 * 30:
        lines.append("more than a month on this CPU: fine-tune a pretrained checkpoint instead, or plan for a GPU")
    if setup.device == "cpu" and setup.checkpointing:
        lines.append("glibc may keep what checkpointing frees: set MALLOC_MMAP_THRESHOLD_=65536 to see it go")
    have = os.cpu_count() or 1
    if setup.device == "cpu" and made.cores > have:
        lines.append(f"reading from JPEG wants {made.cores} cores and this machine has {have}: train with --cache")
    return lines


def _to_fit(made: Plan, config: AnyConfig) -> str:
    """The first of ever stronger measures that brings the peak below what the device has."""
    setup = made.setup
    measures: list[dict[str, Any]] = [{"accumulate": n} for n in (2, 4, 8)]
    measures += [{"checkpointing": True, "accumulate": n} for n in (1, 4, 16)]
    if setup.gpus > 1:
        measures += [{"checkpointing": True, "shard": True, "accumulate": n} for n in (1, 4, 16)]
    for measure in measures:
        other = replace(setup, **measure)
        if other.batch_size // other.gpus < other.accumulate or measure["accumulate"] < setup.accumulate:
            continue
        at_once = math.ceil(other.batch_size / other.gpus / other.accumulate)
        peak = training_memory(config, train_config(other), at_once, other.gpus).peak
        if peak <= USABLE * made.device.memory:
            options = " ".join(
                f"--{k}" if v is True else f"--{k} {v}" for k, v in measure.items() if v != 1 or v is True
            )
            return f"does not fit; with {options} it takes {peak / 1e9:.1f} GB"
    return "does not fit, and neither checkpointing, parts nor shards are enough: take a smaller model or batch"
