"""Everything about a training run that can be chosen, in one frozen dataclass.

Zero, "" and None mean "choose for me": `recipe.complete` fills them in from the data, the checkpoint
and the machine, and says why. What a run was really made with stands in its config.json.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from vitkit.data.augment import Augment, preset
from vitkit.errors import ConfigError, did_you_mean
from vitkit.model.config import Size, as_size
from vitkit.model.jsonable import Jsonable


@dataclass(frozen=True)
class TrainConfig(Jsonable):
    data: str = ""
    model: str = ""  # a name of the zoo; "": chosen, or the checkpoint's own with `init`
    init: str | None = None  # fine-tune this checkpoint
    out: str = "runs/train"
    changes: dict[str, Any] = field(default_factory=dict)  # fields of the model's configuration
    image_size: Size | None = None
    seed: int = 0

    # how long: one of the three
    epochs: float = 0.0
    steps: int = 0
    budget: float = 0.0  # seconds on the clock, evaluation and saving included

    # one step
    batch_size: int = 0  # over all processes
    accumulate: int = 1  # parts that a batch is computed in, to save memory
    optimizer: Literal["", "adamw", "sgd", "muon"] = ""
    lr: float = 0.0
    weight_decay: float = -1.0  # negative: the recipe's
    momentum: float = 0.9  # of sgd; muon uses 0.95
    beta2: float = 0.99
    clip: float = 1.0  # largest norm of the gradient; 0: no limit
    schedule: Literal["cosine", "linear"] = "cosine"
    warmup: float = 0.05  # share of the run in which the learning rate rises
    layer_decay: float = 1.0  # each layer below the head learns this much slower
    ema: float = 0.0  # decay of the averaged weights; 0: off
    loss: Literal["softmax", "bce"] = "softmax"
    class_weights: bool = False
    balanced: bool = False
    augment: Augment | None = None  # None: the recipe's
    patch_dropout: float = 0.0  # share of the patches left out in training
    progressive: float = 1.0  # the pictures start at this share of their size and grow to all of it
    freeze: str = ""  # "backbone", or the number of blocks (and the embedding below them)
    lora: int = 0  # rank of the low-rank updates of the attention; 0: off

    # a teacher
    teacher: str | None = None
    teacher_share: float = 0.5  # of the loss
    temperature: float = 0.0  # of soft labels; 0: the teacher's hard decision, as in DeiT

    # the machine
    device: str = ""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: Literal["auto", "yes", "no"] = "auto"
    gradient_checkpointing: bool = False
    shard: bool = False  # FSDP instead of DDP
    workers: int = -1  # loading processes; negative: chosen
    cache: bool = False
    max_bad: str = "5%"

    # how often
    evaluations: int = 20  # at most so many while training, at the ends of epochs
    log_every: int = 10  # steps
    save_every: float = 60.0  # seconds between checkpoints

    def __post_init__(self) -> None:
        if self.image_size is not None:
            self._set("image_size", as_size(self.image_size))
        if isinstance(self.augment, str):
            self._set("augment", preset(self.augment))
        elif isinstance(self.augment, dict):
            self._set("augment", Augment(**self.augment))
        self.check_fields()
        if sum(bool(x) for x in (self.epochs, self.steps, self.budget)) > 1:
            raise ConfigError("give one of epochs, steps and budget: they all say how long to train")
        for name in ("epochs", "steps", "budget", "batch_size", "lr", "clip", "lora", "evaluations", "save_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("ema", "patch_dropout", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        for name in ("layer_decay", "progressive", "teacher_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0 and at most 1")
        if self.accumulate < 1 or self.log_every < 1:
            raise ConfigError("accumulate and log_every must be at least 1")
        if self.freeze not in ("", "backbone") and not self.freeze.isdigit():
            raise ConfigError(f"freeze={self.freeze!r} must be 'backbone' or a number of blocks")
        if self.lora and self.freeze:
            raise ConfigError("lora already freezes all but its own weights and the head; leave out freeze")

    def replace(self, **changes: Any) -> TrainConfig:
        return dataclasses.replace(self, **changes)


def parse_duration(text: str) -> float:
    """ "90", "90s", "5m", "1h30m" -> seconds."""
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip().lower())
    if not match or not any(match.groups()):
        raise ConfigError(f"{text!r} is not a time; write 90s, 5m or 1h30m")
    hours, minutes, seconds = (float(g or 0) for g in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def assign(config: TrainConfig, settings: list[str]) -> TrainConfig:
    """Apply `key=value` settings; `augment.mixup=0.2` and `model.dropout=0.1` reach inside."""
    for setting in settings:
        key, given, text = setting.partition("=")
        if not given:
            raise ConfigError(f"--set {setting!r} wants key=value, such as --set weight_decay=0.05")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        config = _assign_one(config, key.strip(), value)
    return config


def _assign_one(config: TrainConfig, key: str, value: Any) -> TrainConfig:
    known = [f.name for f in dataclasses.fields(config)]
    part, _, inner = key.partition(".")
    if part == "model" and inner:
        return config.replace(changes={**config.changes, inner: value})
    if part == "augment" and inner:
        knobs = [f.name for f in dataclasses.fields(Augment)]
        if inner not in knobs:
            raise ConfigError(f"augment has no knob {inner!r}.{did_you_mean(inner, knobs)}")
        return config.replace(augment=dataclasses.replace(config.augment or Augment(), **{inner: value}))
    if key not in known:
        raise ConfigError(f"training has no setting {key!r}.{did_you_mean(key, known)} Known: {', '.join(known)}")
    kind = {f.name: f.type for f in dataclasses.fields(config)}[key]
    if kind == "str" and not isinstance(value, str):
        value = str(value)
    return config.replace(**{key: value})
