"""The table of tasks: adding one is a file and a row here."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from vitkit.data import Dataset, Source, open_data
from vitkit.errors import ConfigError, check_one_of
from vitkit.model.base import OutputKind, Outputs, VisionModel
from vitkit.progress import SILENT, Progress
from vitkit.tasks.base import Settings, Task
from vitkit.tasks.classify import Classify, MultiLabel
from vitkit.tasks.pretraining.dino import Dino
from vitkit.tasks.pretraining.lejepa import LejepaMethod
from vitkit.tasks.pretraining.mae import Mae
from vitkit.tasks.pretraining.masked_patch import MaskedPatch
from vitkit.tasks.regress import Regress
from vitkit.tasks.trainee import unwrapped

TASKS: dict[str, type[Task]] = {
    t.name: t for t in (Classify, MultiLabel, Regress, Mae, MaskedPatch, Dino, LejepaMethod)
}
METHODS = tuple(name for name, task in TASKS.items() if task.pretrains)  # of `vitkit pretrain`, the default first


def check_method(name: str) -> None:
    check_one_of(name, METHODS, f"there is no method of pre-training called {name!r}")


def task_of(model: nn.Module, labels: OutputKind | None = None) -> Task:
    """The task that a model's outputs are made for.

    labels  of the data it is evaluated on: files of older versions do not tell classes from labels, so the data does
    """
    inner = unwrapped(model)
    foreign = Outputs(names=getattr(inner, "class_names", None) or ())
    return task_for(inner.outputs if isinstance(inner, VisionModel) else foreign, inner.config.classes, labels)


def task_for(outputs: Outputs, count: int, labels: OutputKind | None = None) -> Task:
    """`task_of` where there is no model, only what its `count` outputs mean: an exported file."""
    kind = labels if labels is not None and "values" not in (labels, outputs.kind) else outputs.kind
    return next(task for task in TASKS.values() if task.kind == kind)(outputs, count)


def open_data_for(
    model: VisionModel, data: str | Path, progress: Progress = SILENT, classes_from: str | int = "auto"
) -> Dataset:
    """A data set as this model is evaluated on it: with the columns that it predicts, where it predicts values."""
    values = model.outputs.names if model.outputs.kind == "values" else ()
    return open_data(data, progress, target=values, classes_from=classes_from)


def task_of_data(source: Source, name: str, settings: Settings) -> Task:
    """The task of this name, or the one that the labels of the data ask for."""
    kind = source.label_kind
    if name:
        check_one_of(name, TASKS, f"there is no task {name!r}")
    task = TASKS[name] if name else next(t for t in TASKS.values() if t.kind == kind)
    if task.kind not in (None, kind):
        raise ConfigError(f"the task {name} needs {task.kind}, and {source.name} has {kind}; leave out --task")
    return task.of_data(source, settings)
