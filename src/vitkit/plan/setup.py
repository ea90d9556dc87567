"""What a plan is for: the table of devices, a run's settings, and what `vitkit train` makes of frozen parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vitkit.errors import ConfigError, did_you_mean
from vitkit.evaluation.run import suited_batch
from vitkit.model.config import AnyConfig, ViTConfig
from vitkit.training.config import TrainConfig
from vitkit.training.recipe import ONCE, choose_head
from vitkit.training.states import USED, free_disk, free_memory, frozen_blocks, varies
from vitkit.world import World

GB = 1e9


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
    freeze: str = ""  # these as in `vitkit train`
    lora: int = 0
    augment: str = ""  # "": none up to 1.5 epochs and on a frozen backbone, else light
    head: str = ""  # these are chosen
    states: str = ""
    views: int = 0

    @property
    def per_device(self) -> int:
        return self.batch_size // self.gpus

    @property
    def at_once(self) -> int:
        """Images that each device computes at a time."""
        return math.ceil(self.per_device / self.accumulate)

    @property
    def steps(self) -> int:
        return max(1, round(self.epochs * max(1, self.images // self.batch_size)))

    @property
    def train(self) -> TrainConfig:
        """The settings of `vitkit train`."""
        names = ("batch_size", "optimizer", "precision", "shard", "accumulate")
        same = {name: getattr(self, name) for name in (*names, "freeze", "lora", "head", "states", "views")}
        same["augment"] = self.augment or ("none" if self.freeze == "backbone" or self.epochs <= ONCE else "light")
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


def settle(setup: Setup, config: AnyConfig) -> tuple[Setup, list[str]]:
    """What `vitkit train` makes of a frozen part: it is computed once, or a note says why in every step."""
    train, notes = setup.train, list[str]()
    asked = train.replace(optimizer="" if train.optimizer == "adamw" else train.optimizer, epochs=setup.epochs)
    setup = replace(setup, **choose_head(train, asked, World(0, setup.gpus, torch.device("cpu")), notes))  # type: ignore[arg-type]
    if setup.head == "converge":
        return replace(setup, batch_size=suited_batch(config.preprocessing), accumulate=1, precision="fp32"), notes
    if setup.states == "each" or not frozen_blocks(train) or not isinstance(config, ViTConfig):
        return setup, notes
    size = 4 * setup.images * config.tokens * config.width
    free = math.inf if DEVICES[setup.device].tflops else min(free_memory(), free_disk(Path()))
    reasons = {
        "several processes": setup.gpus > 1 or setup.shard,
        "augmentation that is new in every epoch (--augment none makes them worth keeping)": varies(train),
        f"{size / 1e9:.2g} GB that they need, more than half of what is free": size > USED * free,
        "so few steps": setup.steps * setup.batch_size <= setup.images,
    }
    reason = next((words for words, holds in reasons.items() if holds), "")
    if reason:
        notes.append(f"states: the {setup.freeze} frozen blocks run in every step, because of {reason}")
    return replace(setup, states="each" if reason else "once"), notes
