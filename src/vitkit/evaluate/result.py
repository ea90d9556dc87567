"""Everything an evaluation found, as one frozen value that goes to JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitkit.data import BadFile, Source
from vitkit.evaluate import metrics
from vitkit.evaluate.metrics import Bins, PerClass
from vitkit.evaluate.records import Records

_WORST = 64  # samples that are listed by name


@dataclass(frozen=True)
class Mistake:
    """A sample that the model got wrong.

    index        number in the set
    where        its file, or where it is inside a larger one
    label        the class it has; several are joined with "|"
    predicted    the class the model gave it; with several labels, those it gave more than one half
    probability  of what it predicted; with several labels, of the class it was most wrong about
    """

    index: int
    where: str
    label: str
    predicted: str
    probability: float


@dataclass(frozen=True)
class Evaluation:
    """Fractions are 0..1. With several labels per picture `top1`, `top5` and `confusion` are None and `map` is given.

    name, split    of the set
    classes        names, in the order of the set
    samples        pictures that were judged
    loss           mean cross-entropy; with several labels, of all the yes-or-no questions
    ece            expected calibration error, 15 bins
    map            mean average precision over the classes that occur
    confusion      (C, C) counts, a row per true class
    reliability    the bins behind `ece`
    worst          the mistakes with the highest loss, worst first
    bad_files      pictures that could not be read and are not counted
    not_finite     samples whose loss is no finite number: a broken model
    records        the few numbers kept of every sample; not in the JSON
    """

    name: str
    split: str
    classes: tuple[str, ...]
    samples: int
    top1: float | None
    top5: float | None
    loss: float
    ece: float
    map: float | None
    per_class: PerClass
    confusion: np.ndarray | None
    reliability: Bins
    worst: tuple[Mistake, ...]
    bad_files: tuple[BadFile, ...]
    not_finite: int
    records: Records = dataclasses.field(repr=False)

    @classmethod
    def of(cls, records: Records, source: Source) -> Evaluation:
        found = _several(records, source) if source.multi_label else _one(records, source)
        return cls(
            name=source.name,
            split=source.split,
            classes=source.classes,
            samples=len(records),
            loss=records.mean_loss,
            ece=found["reliability"].ece,
            bad_files=records.bad,
            not_finite=int((~np.isfinite(records.loss)).sum()),
            records=records,
            **found,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON: numbers that are not finite become null."""
        rates = {k: v for k, v in vars(self.per_class).items() if v is not None}
        b = self.reliability
        bins = {"low": b.edges[:-1], "high": b.edges[1:], "count": b.count}
        bins |= {"confidence": b.confidence, "accuracy": b.accuracy}
        return plain(
            {
                "data": self.name,
                "split": self.split,
                "samples": self.samples,
                "top1": self.top1,
                "top5": self.top5,
                "loss": self.loss,
                "ece": self.ece,
                "map": self.map,
                "classes": list(self.classes),
                "per_class": _rows({"class": np.array(self.classes, dtype=object), **rates}),
                "confusion": None if self.confusion is None else self.confusion.tolist(),
                "reliability": _rows(bins),
                "worst": [vars(m) for m in self.worst],
                "bad_files": [{"path": f.path, "class": f.label, "reason": f.reason} for f in self.bad_files],
                "not_finite": self.not_finite,
            }
        )


def _one(records: Records, source: Source) -> dict[str, Any]:
    """The fields that differ when every picture has one class."""
    predicted, probability, place = records.predicted, records.probability, records.place
    assert predicted is not None
    assert probability is not None
    assert place is not None
    matrix = metrics.confusion(records.labels, predicted, len(source.classes))
    sure = np.isfinite(probability)
    order = records.wrong[:_WORST]
    worst = [_mistake(records, source, r, source.classes[predicted[r]], float(probability[r])) for r in order.tolist()]
    return {
        "top1": records.top(1),
        "top5": records.top(5),
        "map": None,
        "per_class": metrics.per_class(matrix),
        "confusion": matrix,
        "reliability": metrics.reliability(probability[sure], place[sure] == 0),
        "worst": tuple(worst),
    }


def _several(records: Records, source: Source) -> dict[str, Any]:
    """The fields that differ when a picture may have several labels: every class is a question of its own."""
    scores = records.scores
    assert scores is not None
    labels = records.labels
    probability = np.exp(-np.logaddexp(0, -scores.astype(np.float64)))  # N C
    asked = np.isfinite(probability)
    worst = []
    for row in records.wrong[:_WORST].tolist():
        said = "|".join(source.classes[c] for c in np.flatnonzero(scores[row] > 0)) or "none"
        most_wrong = int(abs(probability[row] - labels[row]).argmax())
        worst.append(_mistake(records, source, row, said, float(probability[row, most_wrong])))
    rates = metrics.per_label(labels, scores)
    assert rates.ap is not None
    occurs = rates.ap[~np.isnan(rates.ap)]
    return {
        "top1": None,
        "top5": None,
        "map": float(occurs.mean()) if len(occurs) else math.nan,
        "per_class": rates,
        "confusion": None,
        "reliability": metrics.reliability(probability[asked], labels[asked]),
        "worst": tuple(worst),
    }


def _mistake(records: Records, source: Source, row: int, predicted: str, probability: float) -> Mistake:
    index = int(records.indices[row])
    return Mistake(index, source.where(index), source.label_name(index), predicted, probability)


def _rows(columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Arrays of equal length -> one dict per row, in plain Python numbers."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]


def printable(text: str) -> str:
    """File names may hold bytes that are no text; they are shown with backslashes."""
    return text.encode(errors="backslashreplace").decode()


def plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become null, and text is text."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, str):
        return printable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
