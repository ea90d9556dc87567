"""The evaluation of a classifier: accuracy, per class, calibration, and its worst mistakes.

Shapes: N samples, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitkit.data import Source
from vitkit.tasks.metrics import Bins, PerClass, wilson
from vitkit.tasks.result import Evaluation, Records, percent


@dataclass(frozen=True)
class Mistake:
    """A sample that the model got wrong."""

    index: int  # number in the set
    where: str  # its file, or where it is inside a larger one
    label: str  # the class it has; several are joined with "|"
    predicted: str  # the class the model gave it; with several labels, those it gave more than one half
    probability: float  # of what it predicted; with several labels, of the class it was most wrong about

    @classmethod
    def of(cls, records: Records, source: Source, row: int, predicted: str, probability: float) -> Mistake:
        index = int(records.indices[row])
        return cls(index, source.where(index), source.label_name(index), predicted, float(probability))


@dataclass(frozen=True)
class ClassEvaluation(Evaluation):
    """Fractions are 0..1."""

    classes: tuple[str, ...]  # names, in the order of the set
    per_class: PerClass
    confusion: np.ndarray | None  # (C, C) counts, a row per true class; None with several labels
    reliability: Bins  # behind `ece`, the expected calibration error
    worst: tuple[Mistake, ...]  # the mistakes with the highest loss, worst first

    @property
    def top1(self) -> float | None:
        return self.metrics.get("top1")

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of `top1`, for so many images; of chance alone, not of other seeds or other data."""
        return None if self.top1 is None or not self.samples else wilson(self.top1, self.samples)

    @property
    def top5(self) -> float | None:
        return self.metrics.get("top5")

    @property
    def map(self) -> float | None:
        """Mean average precision over the labels that occur."""
        return self.metrics.get("map")

    @property
    def ece(self) -> float:
        return self.reliability.ece

    def details(self) -> dict[str, object]:
        rates = {k: v for k, v in vars(self.per_class).items() if v is not None}
        bins = dict(vars(self.reliability))
        edges = bins.pop("edges")
        return {
            **{key: self.metrics.get(key) for key in ("top1", "top5", "loss")},
            "top1_interval": self.interval,
            "ece": self.ece,
            "map": self.map,
            "classes": self.classes,
            "per_class": _rows({"class": np.array(self.classes, dtype=object), **rates}),
            "confusion": self.confusion,
            "reliability": _rows({"low": edges[:-1], "high": edges[1:], **bins}),
            "worst": [vars(m) for m in self.worst],
        }

    def table(self) -> list[list[str]]:
        rates = self.per_class
        columns = {"precision": rates.precision, "recall": rates.recall, "F1": rates.f1}
        if rates.ap is not None:
            columns["AP"] = rates.ap
        shares = [[percent(share) for share in row] for row in zip(*columns.values(), strict=True)]
        rows = zip(self.classes, shares, rates.support, strict=True)
        return [["class", *columns, "images"], *([name, *row, f"{images:,}"] for name, row, images in rows)]

    def summary(self) -> str:
        several = self.top5 if len(self.classes) > 5 else None  # of five classes or fewer it is always 100%
        metrics = (("top-1", self.top1), ("top-5", several), ("mAP", self.map))
        found = [f"{word} {percent(value)}" for word, value in metrics if value is not None]
        if self.interval:
            found[0] += f" (95% interval {' to '.join(map(percent, self.interval))})"
        return "   ".join([*found, f"loss {self.loss:.4f}", f"calibration error {percent(self.ece)}", self.about])


def _rows(columns: dict[str, np.ndarray]) -> list[dict[str, object]]:
    """Arrays of equal length -> one dict per row, in plain Python numbers."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]


def wrong(records: Records) -> np.ndarray:
    """Rows that are wrong, the highest loss first; with several labels, wrong about any of them."""
    if "place" in records.columns:
        return records.worst_first(np.flatnonzero(records["place"]))
    return records.worst_first(np.flatnonzero(((records["scores"] > 0) != (records["labels"] > 0)).any(axis=1)))
