"""Classification: one class per image, or any number of labels.

Shapes: B images, N samples of a set, C classes.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data import Source, class_weights, mix, soft_targets
from vitkit.data.keys import Keys
from vitkit.errors import ConfigError
from vitkit.model.base import OutputKind, Outputs
from vitkit.progress import SILENT, Progress
from vitkit.tasks import metrics
from vitkit.tasks.base import Columns, Metric, Row, Settings, Task, at_least_single
from vitkit.tasks.classified import ClassEvaluation, Mistake, wrong
from vitkit.tasks.match import matched
from vitkit.tasks.result import WORST, Recorded, Records

DIGITS = 6  # of a probability: what remains the same on another runtime


class Classify(Task):
    """Exactly one class is right."""

    name = "classify"
    kind: ClassVar[OutputKind] = "classes"
    losses: ClassVar[tuple[str, ...]] = ("softmax", "bce")
    score = Metric("top1", "accuracy")
    weights: Tensor | None = None  # of the classes in the loss

    @classmethod
    def of_data(cls, source: Source, settings: Settings) -> Classify:
        if len(source.classes) < 2 and cls is Classify:
            lonely = f"{source.name} has only one class, and there is nothing to tell apart"
            raise ConfigError(f"{lonely}; give it a second one")
        task = cls(Outputs(cls.kind, source.classes), len(source.classes), settings)
        if settings.class_weights:
            task.weights = class_weights(source.counts)
        return task

    # --- training ------------------------------------------------------------------------------------

    def targets(self, images: Tensor, labels: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        if self.settings.augment.soft_targets:
            return mix(images, labels, keys, self.settings.augment, self.count)
        targets = soft_targets(labels, self.count) if self.loss_name == "bce" else labels
        return images, targets.to(images.device, non_blocking=True)

    def criterion(self, output: Tensor, targets: Tensor) -> Tensor:
        weights = None if self.weights is None else self.weights.to(output.device)
        return classification_loss(output, targets, self.loss_name, weights)

    def distillation(self, output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """DeiT's hard decision, or Hinton's soft labels."""
        if not temperature:
            return F.cross_entropy(output.float(), teacher.float().argmax(-1))
        log_p, log_q = (F.log_softmax(x.float() / temperature, dim=-1) for x in (output, teacher))
        return temperature**2 * F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)

    # --- evaluation ----------------------------------------------------------------------------------

    def align(self, model: nn.Module, source: Source, progress: Progress = SILENT) -> np.ndarray | None:
        columns, note = matched(model, source)
        if note:
            progress.note(note)
        return columns

    def record(self, outputs: Tensor, labels: Tensor) -> Recorded:
        """`predicted`: the first of the highest; `probability`: what it got; `place`: 0 is a hit."""
        logits, labels = outputs.float(), labels.to(outputs.device)
        predicted = logits.argmax(dim=1)  # B, the first of equals
        log_p = logits.log_softmax(dim=1)
        return {
            "labels": labels,
            "loss": -log_p.gather(1, labels[:, None])[:, 0],
            "predicted": predicted,
            "probability": log_p.gather(1, predicted[:, None])[:, 0].exp(),
            "place": metrics.place_of_label(logits, labels),
        }

    def measure(self, records: Records) -> dict[str, float]:
        top = {f"top{k}": metrics.mean(records["place"] < k) for k in (1, 5)}
        return {**top, "loss": records.mean_loss}

    def evaluation(self, records: Records, source: Source) -> ClassEvaluation:
        predicted, probability = records["predicted"], records["probability"]
        matrix = metrics.confusion(records["labels"], predicted, len(source.classes))
        sure = np.isfinite(probability)
        bins = metrics.reliability(probability[sure], records["place"][sure] == 0)
        rows, names = wrong(records)[:WORST], source.classes
        worst = tuple(Mistake.of(records, source, r, names[predicted[r]], probability[r]) for r in rows)
        more = {"per_class": metrics.per_class(matrix), "confusion": matrix, "reliability": bins, "worst": worst}
        return ClassEvaluation.of(records, source, self.measure(records), classes=names, **more)

    # --- what people read ----------------------------------------------------------------------------

    def activate(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=-1)

    def columns(self, top: int = 5) -> Columns:
        if not self.count:
            raise ConfigError("the model has no classifier (classes=0), so it names no classes; use `vitkit embed`")
        return {name: kind for pair in self._pairs(top) for name, kind in zip(pair, (str, float), strict=True)}

    def rows(self, outputs: Tensor, top: int = 5) -> list[Row]:
        """The likeliest classes by name, with their probabilities."""
        rows, columns, names = [], self._pairs(top), self.names
        for ranked in self.ranked(outputs, top):
            row: Row = {}
            for (name, probability), (number, share) in zip(columns, ranked, strict=True):
                row |= {name: names[number], probability: round(share, DIGITS)}
            rows.append(row)
        return rows

    def answers(self, outputs: Tensor, top: int = 5) -> list[dict[str, object]]:
        names = self.names
        return [
            {"classes": [{"class": c, "name": names[c], "probability": float(f"{p:.6g}")} for c, p in ranked]}
            for ranked in self.ranked(outputs, top)
        ]

    def ranked(self, outputs: Tensor, top: int) -> list[list[tuple[int, float]]]:
        """Of each image the likeliest classes with their probabilities; none without a classifier."""
        best = self.activate(outputs).topk(min(top, self.count))
        both = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [list(zip(numbers, shares, strict=True)) for numbers, shares in both]

    def _pairs(self, top: int) -> list[tuple[str, str]]:
        """Of the columns: class and probability, class_2 and probability_2, ..."""
        endings = ["", *(f"_{k}" for k in range(2, min(top, self.count) + 1))]
        return [(f"class{after}", f"probability{after}") for after in endings]


class MultiLabel(Classify):
    """Any number of labels may be right: each is a question of its own."""

    name = "multi-label"
    kind = "labels"
    losses = ("bce",)
    score = Metric("map", "mean average precision")

    def record(self, outputs: Tensor, labels: Tensor) -> Recorded:
        logits, labels = outputs.float(), labels.to(outputs.device)
        loss = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(dim=1)
        return {"labels": labels, "loss": loss, "scores": logits}

    def measure(self, records: Records) -> dict[str, float]:
        return {"map": metrics.mean_average_precision(records["labels"], records["scores"]), "loss": records.mean_loss}

    def evaluation(self, records: Records, source: Source) -> ClassEvaluation:
        scores, labels, names, worst = records["scores"], records["labels"], source.classes, []
        probability = np.exp(-np.logaddexp(0, -scores.astype(np.float64)))  # N C
        asked = np.isfinite(probability)
        bins = metrics.reliability(probability[asked], labels[asked])
        for row in wrong(records)[:WORST]:
            said = "|".join(names[c] for c in np.flatnonzero(scores[row] > 0)) or "none"
            most_wrong = abs(probability[row] - labels[row]).argmax()
            worst.append(Mistake.of(records, source, row, said, probability[row, most_wrong]))
        rates = metrics.per_label(labels, scores)
        more = {"per_class": rates, "confusion": None, "reliability": bins, "worst": tuple(worst)}
        return ClassEvaluation.of(records, source, self.measure(records), classes=names, **more)

    def activate(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()


def classification_loss(logits: Tensor, targets: Tensor, kind: str, weights: Tensor | None = None) -> Tensor:
    """Mean loss. `targets`: class numbers (B,) or shares (B, C); `weights`: per class."""
    logits = at_least_single(logits)
    if kind == "bce":
        if targets.ndim == 1:
            targets = F.one_hot(targets, logits.shape[-1])
        return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), pos_weight=weights)
    return F.cross_entropy(logits, targets, weight=weights)
