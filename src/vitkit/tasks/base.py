"""A task: what a model is asked for, and how well it answers. Training and evaluation know nothing else.

The methods in the order an image meets them: `targets` (what a batch's labels ask for), `prepare` (the head),
`trainee` (what is run in training), `loss`; then `record` (what is remembered of an evaluated sample),
`measure` (metrics, one of which is the score) and `evaluation`; at last `columns` and `rows` (what people read).
A new task is one file and one row of `TASKS`.

Shapes: B images, C outputs of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.data import Augment, Source
from vitkit.data.keys import Keys
from vitkit.errors import ConfigError, check_one_of
from vitkit.model.base import OutputKind, Outputs
from vitkit.model.build import Model
from vitkit.progress import SILENT, Progress
from vitkit.tasks.result import Evaluation, Recorded, Records, collect
from vitkit.tasks.trainee import FeatureTrainee, Taught, Teacher, Trainee, apart

Row = dict[str, str | float]
Columns = dict[str, type[str] | type[float]]


@dataclass(frozen=True)
class Metric:
    """A number that a model is evaluated by: its key in logs and JSON, its name, and how it is written."""

    key: str
    words: str
    percent: bool = True
    higher: bool = True  # more is better

    def text(self, value: float) -> str:
        return f"{value:.2%}" if self.percent else f"{value:.4f}"

    def best(self, *values: float) -> float:
        return max(values) if self.higher else min(values)

    def improves(self, value: float, best: float) -> bool:
        """Whether a value is at least as good as the best so far."""
        return value >= best if self.higher else value <= best

    def rivals(self, value: float, best: float, images: int) -> bool:
        """Whether so many images cannot tell it from the best: a share within one standard error of it.

        Of weights that validation cannot tell apart a run keeps the last, which have learned most. With 0 images only
        what is as good is a rival, as of weights from before the first step.
        """
        share = (best * images + 1) / (images + 2)  # never quite none or all
        chance = math.sqrt(share * (1 - share) / images) if self.percent and images else 0.0
        return self.improves(value + chance if self.higher else value - chance, best)


@dataclass(frozen=True)
class Settings:
    """What a user may choose about a task; a task refuses what it cannot use."""

    loss: str = ""  # one of the task's `losses`; "": the first
    class_weights: bool = False  # every class counts the same in the loss
    augment: Augment = field(default_factory=Augment)  # mixup, cutmix and label smoothing change the targets
    options: Mapping[str, object] = field(default_factory=dict)  # of the task alone: --set task.NAME=VALUE


class Task:
    """`outputs` says what the `count` numbers of the model's last layer mean."""

    name: ClassVar[str]
    kind: ClassVar[OutputKind | None]  # of the labels; None: it learns from images alone
    losses: ClassVar[tuple[str, ...]]  # the default first
    augmentation: ClassVar[str] = "light"  # the preset that suits it, and why if that is not plain
    why_augmentation: ClassVar[str] = ""
    why: ClassVar[str] = ""  # of a method of pre-training: what speaks for it
    score: Metric
    pretrains: ClassVar[bool] = False  # the last weights are the result, and compared with those before the first step
    least_batch: ClassVar[int] = 1  # images in a batch, in each process
    teacher: Teacher | None = None

    def __init__(self, outputs: Outputs, count: int, settings: Settings | None = None) -> None:
        self.outputs, self.count, self.settings = outputs, count, settings or Settings()
        self.loss_name = loss = self.settings.loss or self.losses[0]
        check_one_of(loss, self.losses, f"loss={loss!r} is none of the task {self.name}")

    @classmethod
    def of_data(cls, source: Source, settings: Settings) -> Task:
        """The task that the training split sets."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        """Of the outputs; numbers when nobody named them."""
        return self.outputs.names or tuple(map(str, range(self.count)))

    def describe(self) -> str:
        """What the data asks for, for the user: "10 classes"."""
        return f"{self.count} {self.kind or 'outputs'}"

    # --- training ------------------------------------------------------------------------------------

    def targets(self, images: Tensor, labels: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """Normalised images and labels -> what the trainee sees and what the loss compares with, both B first.

        Labels come from the loader, on the CPU; targets go where the images are. Several views of an image go
        into one tensor, B V C H W.
        """
        return images, labels.to(images.device)

    def prepare(self, model: Model) -> None:
        """Make the model's last layer mean this task's outputs. One that meant something else starts at zero."""
        other_kind = (model.outputs.kind == "values") != (self.kind == "values")
        if other_kind or model.class_names != self.outputs.names:
            for part in model.classifiers:
                part.requires_grad_(True)
                nn.init.zeros_(part.weight)
                nn.init.zeros_(part.bias)
        model.outputs = self.outputs

    def trainee(self, model: Model, patch_dropout: float = 0.0) -> Trainee:
        if self.teacher is not None and self.teacher.features:
            return FeatureTrainee(model, self.teacher.width, patch_dropout, self.teacher.patch_width)
        return Trainee(model, patch_dropout)

    def learn_from(self, teacher: Teacher) -> None:
        if self.pretrains or (teacher.share and type(self).distillation is Task.distillation):
            raise ConfigError(f"the task {self.name} cannot learn from a teacher; leave out --set teacher")
        self.teacher = teacher

    def loss(self, trainee: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        """The mean over the images, so that parts of a batch can be added up.

        With a distillation token, its logits learn from the teacher; without a teacher, from the labels too.
        """
        output, features, patches = found if isinstance(found := trainee(images), tuple) else (found, None, None)
        ours, theirs = output.unbind(1) if output.ndim == 3 else (output, output)
        loss, teacher = self.criterion(ours, targets), self.teacher
        said, seen, seen_patches = teacher.taught(images) if teacher is not None else Taught()
        if teacher is not None and said is not None:
            taught = self.distillation(theirs, said, teacher.temperature)
            loss = (1 - teacher.share) * loss + teacher.share * taught
        elif theirs is not ours:
            loss = (loss + self.criterion(theirs, targets)) / 2
        if teacher is None or features is None or seen is None:
            return loss
        loss = loss + teacher.features * apart(features, seen)
        if patches is None or seen_patches is None:
            return loss
        return loss + teacher.patches * apart(patches, seen_patches)

    def criterion(self, output: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the model's output, in single precision."""
        raise NotImplementedError

    def distillation(self, output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """The mean loss of differing from a teacher's output; 0: from its decision."""
        raise NotImplementedError

    # --- evaluation ----------------------------------------------------------------------------------

    def align(self, model: nn.Module, source: Source, progress: Progress = SILENT) -> np.ndarray | None:
        """For every label of the set the model's output that stands for it, for `record`; None: in the same order."""
        return None

    def record(self, outputs: Tensor, labels: Tensor) -> Recorded:
        """What `measure` needs of each sample, "loss" included. Where the outputs are, nothing is waited for."""
        raise NotImplementedError

    def measure(self, records: Records) -> dict[str, float]:
        """The metrics by key, the score among them."""
        raise NotImplementedError

    def metrics(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """`measure` of outputs that somebody else computed."""
        return self.measure(collect([torch.arange(len(labels))], [self.record(outputs, labels)]))

    def evaluation(self, records: Records, source: Source) -> Evaluation:
        """Everything that the records tell."""
        return Evaluation.of(records, source, self.measure(records))

    def verdict(self, start: Mapping[str, float], now: Mapping[str, float]) -> str:
        """In words, from the metrics before the first step and now: that no weights since were as good."""
        before, after = (self.score.text(found[self.score.key]) for found in (start, now))
        figures = f"{self.score.words} {after}, {before} before the first step"
        return f"not better than the checkpoint it began with, which is kept: {figures}. Try a smaller --lr"

    # --- what people read ----------------------------------------------------------------------------

    def activate(self, outputs: Tensor) -> Tensor:
        """The model's outputs -> probabilities, or values in their own units."""
        raise NotImplementedError

    def columns(self, top: int = 5) -> Columns:
        """Of a predicted row: name -> type."""
        raise NotImplementedError

    def rows(self, outputs: Tensor, top: int = 5) -> list[Row]:
        """B C -> a row per image: what `predict` writes."""
        raise NotImplementedError

    def answers(self, outputs: Tensor, top: int = 5) -> list[dict[str, object]]:
        """B C -> the same as JSON: what `serve` answers. "classes" is there for every task."""
        raise NotImplementedError


def at_least_single(output: Tensor) -> Tensor:
    """Losses are never computed in half precision."""
    return output.to(torch.promote_types(output.dtype, torch.float32))
