"""Everything about a training run that can be chosen, in one frozen dataclass.

Zero, "" and None mean "choose for me": `recipe.complete` fills them in from the data, the checkpoint
and the machine, and says why. What a run was really made with stands in its config.json.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

from vitkit.data.augment import Augment, preset
from vitkit.errors import ConfigError, check_one_of, did_you_mean
from vitkit.io import parse_json
from vitkit.model.config import Size, as_size
from vitkit.model.jsonable import Json, Jsonable
from vitkit.tasks.table import TASKS
from vitkit.training.optim import OPTIMIZERS, SCHEDULES


@dataclass(frozen=True)
class TrainConfig(Jsonable):
    data: str = ""
    task: str = ""  # a name of `TASKS`; "": what the labels of the data ask for
    target: tuple[str, ...] = ()  # columns of the data whose numbers are predicted
    classes_from: str = "auto"  # which of nested folders are the classes: auto, top, leaf or a level
    options: dict[str, Json] = field(default_factory=dict)  # of the task: --set task.NAME=VALUE
    model: str = ""  # a name of the zoo; "": chosen, or the checkpoint's own with `init`
    init: str | None = None  # fine-tune this checkpoint
    out: str = "runs/train"
    changes: dict[str, Json] = field(default_factory=dict)  # fields of the model's configuration
    image_size: Size | None = None
    seed: int = 0

    # how long: one of the three
    epochs: float = 0.0
    steps: int = 0
    budget: float = 0.0  # seconds on the clock, evaluation and saving included

    # one step
    batch_size: int = 0  # over all processes
    accumulate: int = 1  # parts that a batch is computed in, to save memory
    recipe: str = ""  # a published one, for what is left open here: a name of `published.RECIPES`
    optimizer: str = ""  # a name of `OPTIMIZERS`
    lr: float = 0.0
    weight_decay: float = -1.0  # negative: the recipe's
    momentum: float = 0.9  # of sgd
    muon_momentum: float = 0.0  # of muon; 0: chosen, and 0.95 where nothing chooses
    beta2: float = 0.99
    clip: float = 1.0  # largest norm of the gradient; 0: no limit
    schedule: str = ""  # a name of `SCHEDULES`; "": chosen
    warmup: float = -1.0  # share of the run in which the learning rate rises; negative: chosen
    end: float = 0.0  # share of the peak learning rate that is left at the end
    layer_decay: float = 1.0  # each layer below the head learns this much slower
    ema: float = 0.0  # decay of the averaged weights; 0: off
    loss: str = ""  # one of the task's
    class_weights: bool = False
    balanced: bool = False
    augment: Augment | None = None  # None: the recipe's
    patch_dropout: float = 0.0  # share of the patches left out in training
    progressive: float = 1.0  # the images start at this share of their size and grow to all of it
    freeze: str = ""  # "backbone", or the number of blocks (and the embedding below them)
    # how a head on a frozen backbone learns: to convergence on features that are computed once, or by steps (also "")
    head: Literal["", "converge", "steps"] = ""
    # what frozen blocks make of the images, kept from one pass over them or computed in each step; "": as it fits
    states: Literal["", "once", "each"] = ""
    views: int = 0  # augmented ones of every image, one after the other; 0: a new one in every epoch
    lora: int = 0  # rank of the low-rank updates of the attention; 0: off

    # a teacher
    teacher: str | None = None
    teacher_share: float = -1.0  # of the loss, for its outputs; negative: a half, or none with its features
    teacher_features: float = 0.0  # weight of the loss that draws our features towards its own; 0: off
    teacher_patches: float = 0.0  # weight of the loss that does so patch by patch, beside its features; 0: off
    temperature: float = 0.0  # of soft labels; 0: the teacher's hard decision, as in DeiT

    # the machine
    device: str = ""
    threads: int = 0  # of each process on a CPU; 0: measured, where there is one process
    processes: int = 0  # of this machine that share every batch; 0 or 1: one, or as many as torchrun starts
    precision: Literal["", "fp32", "bf16", "fp16"] = ""  # of the passes; "": bf16 where that is faster, else fp32
    compile: Literal["auto", "yes", "no"] = "auto"
    gradient_checkpointing: bool = False
    shard: bool = False  # FSDP instead of DDP
    workers: int = -1  # loading processes; negative: chosen
    cache: bool = False
    max_bad: str = "5%"

    # how many images, by class in equal shares: 0 all, or what a budget allows
    train_images: int = 0
    validation_images: int = 0
    test_images: int = 0
    baseline: Literal["yes", "no"] = "yes"  # a linear model on edges and colours, before the run, to compare with
    costs: dict[str, Json] = field(default_factory=dict)  # seconds that were measured: for a budget, for threads

    # how often
    evaluations: int = 0  # while training, evenly spread; 0: a few, or one for each epoch, as time allows
    log_every: int = 10  # steps
    save_every: float = 60.0  # seconds between checkpoints
    hang_limit: float = 600.0  # seconds without a step after which many processes dump their stacks and end; 0: never
    track: tuple[str, ...] = ()  # experiment trackers that are fed besides the log: names of `TRACKERS`

    def __post_init__(self) -> None:
        if self.image_size is not None:
            self._set("image_size", as_size(self.image_size))
        if isinstance(self.augment, str):
            self._set("augment", preset(self.augment))
        elif isinstance(self.augment, dict):
            self._set("augment", _augment(self.augment))
        for name in ("data", "out", "init"):  # a Path is as good as its text
            if isinstance(getattr(self, name), Path):
                self._set(name, str(getattr(self, name)))
        for name in ("target", "track"):
            given = getattr(self, name)
            self._set(name, (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given)
        self.check_fields()
        for name, table in TABLES.items():
            if word := getattr(self, name):
                check_one_of(word, table, f"{name}={word!r} is not known")
        for names, fits, rule in _RANGES:
            for name in names:
                if not fits(getattr(self, name)):
                    raise ConfigError(f"{name}={getattr(self, name)} must {rule}")
        if sum(bool(x) for x in (self.epochs, self.steps, self.budget)) > 1:
            raise ConfigError("give one of epochs, steps and budget: they all say how long to train")
        if self.freeze not in ("", "backbone") and not str(self.freeze).isdigit():
            raise ConfigError(f"freeze={self.freeze!r} must be 'backbone' or a number of blocks")
        if self.lora and self.freeze:
            raise ConfigError("lora already freezes all but its own weights and the classifier; leave out freeze")

        if self.head == "converge" and self.freeze != "backbone":
            raise ConfigError("head=converge is for a frozen backbone; add --freeze backbone")
        if self.states == "once" and not (self.freeze.isdigit() and int(self.freeze)):
            raise ConfigError("states=once is for blocks that are frozen; add --freeze with their number")

    def replace(self, **changes: object) -> TrainConfig:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _augment(knobs: dict[str, object]) -> Augment:
    try:
        return Augment(**knobs)  # type: ignore[arg-type]  # it checks its fields
    except (TypeError, OverflowError) as e:
        raise ConfigError(f"augment={knobs} cannot be used ({e}); see `vitkit config schema`") from e


TABLES: dict[str, Mapping[str, object]] = {"task": TASKS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}
_COUNTS = (
    *("epochs", "steps", "budget", "batch_size", "lr", "clip", "lora", "views", "evaluations", "save_every"),
    *("hang_limit", "threads", "processes", "teacher_features", "teacher_patches"),
    *("train_images", "validation_images", "test_images"),
)
_RANGES: list[tuple[tuple[str, ...], Callable[[float], bool], str]] = [
    (_COUNTS, lambda x: x >= 0, "not be negative"),
    (("ema", "patch_dropout", "muon_momentum", "end"), lambda x: 0 <= x < 1, "be at least 0 and below 1"),
    (("warmup",), lambda x: x < 1, "be below 1"),
    (("layer_decay", "progressive"), lambda x: 0 < x <= 1, "be above 0 and at most 1"),
    (("teacher_share",), lambda x: x <= 1, "be at most 1"),
    (("accumulate", "log_every"), lambda x: x >= 1, "be at least 1"),
]


def free_folder(data: str) -> str:
    """runs/DATA-1, or the first number that is free."""
    folders = (Path("runs") / f"{Path(data).stem or 'run'}-{number}" for number in count(1))
    return str(next(folder for folder in folders if not folder.exists()))


def parse_duration(text: str) -> float:
    """ "90", "90s", "5m", "1h30m" -> seconds."""
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip().lower())
    if not match or not any(match.groups()):
        raise ConfigError(f"{text!r} is not a time; write 90s, 5m or 1h30m")
    hours, minutes, seconds = (float(g or 0) for g in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def assign(config: TrainConfig, settings: list[str]) -> TrainConfig:
    """Apply `key=value` settings; `augment.mixup=0.2`, `model.dropout=0.1` and `task.NAME=...` reach inside."""
    for setting in settings:
        key, given, text = setting.partition("=")
        if not given:
            raise ConfigError(f"--set {setting!r} wants key=value, such as --set weight_decay=0.05")
        try:
            value = parse_json(text)
        except ValueError:
            value = text
        config = _assign_one(config, key.strip(), value)
    return config


def _assign_one(config: TrainConfig, key: str, value: object) -> TrainConfig:
    types = {f.name: f.type for f in dataclasses.fields(config)}
    part, _, inner = key.partition(".")
    if inner and (within := {"model": "changes", "task": "options"}.get(part)):
        return config.replace(**{within: {**getattr(config, within), inner: value}})
    if part == "augment" and inner:
        knobs = [f.name for f in dataclasses.fields(Augment)]
        if inner not in knobs:
            raise ConfigError(f"augment has no knob {inner!r}.{did_you_mean(inner, knobs)}")
        turned = dataclasses.replace(config.augment or Augment(), **{inner: value})  # type: ignore[arg-type]
        return config.replace(augment=turned)
    if key not in types:
        raise ConfigError(f"training has no setting {key!r}.{did_you_mean(key, types)} Known: {', '.join(types)}")
    return config.replace(**{key: str(value) if types[key] == "str" else value})
