"""What is remembered of every evaluated sample, and everything that an evaluation found.

`Records` are a few numbers of each sample, from which every metric follows. Ranks evaluate different samples; `merge`
puts their records together, each sample once, in the order of the set, so the result does not depend on how many
ranks took part. An `Evaluation` is one frozen value that goes to JSON and to a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from vitkit.data import BadFile, Source
from vitkit.display import Grid, Part, Shown
from vitkit.errors import as_text
from vitkit.tasks.metrics import mean

WORST = 64  # samples that are listed by name
E = TypeVar("E", bound="Evaluation")
Recorded = dict[str, Tensor]  # of one batch: column -> a row per sample


@dataclass(frozen=True)
class Records:
    """One row per sample that could be read."""

    indices: np.ndarray  # (N,) number in the set
    columns: Mapping[str, np.ndarray]  # name -> (N, ...); every task has "loss" among them
    bad: tuple[BadFile, ...] = ()  # files that could not be read, and therefore have no row

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, column: str) -> np.ndarray:
        return self.columns[column]

    @property
    def mean_loss(self) -> float:
        return mean(self["loss"].astype(np.float64))  # so that their order matters little

    def worst_first(self, rows: np.ndarray) -> np.ndarray:
        """The given rows, the highest loss first; one that is no number stands before everything."""
        return rows[np.argsort(-np.nan_to_num(self["loss"][rows], nan=np.inf), kind="stable")]


def collect(indices: Sequence[Tensor], batches: Sequence[Recorded], bad: Sequence[BadFile] = ()) -> Records:
    """The batches of one rank -> its records."""
    columns = {name: torch.cat([b[name] for b in batches]).cpu().numpy() for name in batches[0]}
    return Records(torch.cat(list(indices)).numpy(), columns, tuple(bad))


def merge(parts: Sequence[Records]) -> Records:
    """The records of all ranks, each sample once, in the order of the set."""
    indices, order = np.unique(np.concatenate([p.indices for p in parts]), return_index=True)
    columns = {name: np.concatenate([p[name] for p in parts])[order] for name in parts[0].columns}
    bad = {b.path: b for p in parts for b in p.bad}
    return Records(indices, columns, tuple(bad[path] for path in sorted(bad)))


@dataclass(frozen=True)
class Evaluation(Shown):
    """What every task's evaluation has; tasks that know more have a class of their own."""

    name: str  # of the set
    split: str
    samples: int  # images that were evaluated
    metrics: Mapping[str, float]  # by key
    bad_files: tuple[BadFile, ...]  # images that could not be read and are not counted
    not_finite: int  # samples whose loss is no finite number: a broken model
    records: Records = field(repr=False)  # the few numbers kept of every sample; not in the JSON

    @classmethod
    def of(cls: type[E], records: Records, source: Source, metrics: Mapping[str, float], **more: object) -> E:
        not_finite = int((~np.isfinite(records["loss"])).sum())
        common = (source.name, source.split, len(records), metrics, records.bad, not_finite, records)
        return cls(*common, **more)  # type: ignore[arg-type]

    @property
    def loss(self) -> float:
        return self.metrics["loss"]

    def details(self) -> dict[str, object]:
        """The task's own part of the JSON."""
        return dict(self.metrics)

    def to_dict(self) -> dict[str, object]:
        """JSON: numbers that are not finite become null."""
        about = {"data": self.name, "split": self.split, "samples": self.samples, **self.details()}
        return as_json({**about, "bad_files": self.bad_files, "not_finite": self.not_finite})

    def table(self) -> list[list[str]]:
        """Rows for people, the heads first; none when there is nothing beyond the summary."""
        return []

    def parts(self) -> Iterable[Part]:
        """What a notebook shows: the summary, the table, and a warning where there is something to warn of."""
        yield self.summary()
        if table := self.table():
            yield Grid(table)
        if self.not_finite:
            yield f"warning: the model's output is no finite number for {self.not_finite:,} images"
        if self.bad_files:
            yield f"{len(self.bad_files):,} images could not be read and are not counted"

    def summary(self) -> str:
        """The metrics in a line."""
        return "   ".join([*(f"{key} {value:.4g}" for key, value in self.metrics.items()), self.about])

    @property
    def about(self) -> str:
        return f"({self.samples:,} images of {self.name}, split {self.split})"


def as_json(found: Mapping[str, object]) -> dict[str, object]:
    """What JSON can hold: arrays become lists, numbers that are not finite null, and text is text."""

    def plain(value: object) -> object:
        if isinstance(value, BadFile):
            value = {"path": value.path, "class": value.label, "reason": value.reason}
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        if isinstance(value, str):
            return as_text(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {key: plain(value) for key, value in found.items()}


def percent(share: float | None) -> str:
    return "-" if share is None or math.isnan(share) else f"{share:.2%}"
