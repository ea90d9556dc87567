"""The metrics of an evaluation without the images that are in train too: what a model that remembers cannot gain by."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from torch import nn

from vitkit.data import Source
from vitkit.errors import as_text
from vitkit.tasks.result import Evaluation, Records, as_json
from vitkit.tasks.table import task_of


@dataclass(frozen=True)
class WithoutLeaks:
    leaked: int  # evaluated images that are in train too
    rest: Evaluation  # of the others

    def to_dict(self) -> dict[str, object]:
        return as_json({"leaked": self.leaked, "samples": self.rest.samples, **self.rest.metrics})

    def summary(self) -> str:
        are = "image that is" if self.leaked == 1 else "images that are"
        return f"without {self.leaked:,} {are} in train too: {self.rest.summary()}"


def without_leaks(model: nn.Module, result: Evaluation, source: Source, leaked: Collection[str]) -> WithoutLeaks | None:
    """`leaked` are names as `source.where` gives them, relative or not; None where no evaluated image is among them,
    or all are."""
    names, records = set(map(_place, leaked)), result.records
    kept = np.array([_place(source.where(int(i))) not in names for i in records.indices], dtype=bool)
    if kept.all() or not kept.any():
        return None
    rest = Records(records.indices[kept], {name: rows[kept] for name, rows in records.columns.items()}, records.bad)
    task = task_of(model, source.label_kind)
    return WithoutLeaks(int((~kept).sum()), task.evaluation(rest, source))


def _place(name: str) -> str:
    return os.path.abspath(as_text(name))
