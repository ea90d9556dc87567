"""Regression: one or several numbers per image.

The model's outputs are standardised, (value - mean) / std of the training split, so that one learning rate
suits any unit; mean and std are kept in `model.outputs`, and everything people read is in their own units.

The score is R2: it has no unit, so it compares across targets and sets, 0 is what the mean of the training
data would reach and 1 is perfect. MAE and RMSE, in the target's unit, stand beside it; the rank correlation
says whether the order is right where the scale is not.

Shapes: B images, N samples of a set, T values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data import Source, mix
from vitkit.data.keys import Keys
from vitkit.errors import ConfigError
from vitkit.model.base import OutputKind, Outputs
from vitkit.model.build import Model
from vitkit.progress import SILENT, Progress
from vitkit.tasks import metrics
from vitkit.tasks.base import Columns, Metric, Row, Settings, Task, at_least_single
from vitkit.tasks.result import WORST, Evaluation, Recorded, Records

DIGITS = 6  # significant ones of a value
_TAKEN = ("path", "error")  # columns that every table has


class Regress(Task):
    name = "regress"
    kind: ClassVar[OutputKind] = "values"
    losses = ("mse", "huber")
    augmentation = "none"
    why_augmentation = ": a crop, a mirror image or another brightness may change the value (else: --augment light)"
    score = Metric("r2", "R2", percent=False)

    @classmethod
    def of_data(cls, source: Source, settings: Settings) -> Regress:
        if settings.class_weights:
            raise ConfigError(f"class_weights counts classes, and {source.name} has values; leave it out")
        values, names = np.asarray(source.labels, dtype=np.float64), source.targets  # N T
        mean, std = values.mean(axis=0), values.std(axis=0)
        for bad, what in ((std == 0, "the same"), (~np.isfinite(std), "not a finite number")):
            if bad.any():
                problem = f"{names[bad.argmax()]!r} of {source.name} is {what} for every image"
                raise ConfigError(f"{problem}; choose another --target")
        return cls(Outputs("values", names, tuple(mean.tolist()), tuple(std.tolist())), len(names), settings)

    def describe(self) -> str:
        return f"{self.count} {'value' if self.count == 1 else 'values'} each: {', '.join(self.names)}"

    def _units(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std, each (T,)."""
        mean, std = self.outputs.mean or (0.0,) * self.count, self.outputs.std or (1.0,) * self.count
        return like.new_tensor(mean), like.new_tensor(std)

    # --- training ------------------------------------------------------------------------------------

    def targets(self, images: Tensor, labels: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """Mixup blends values as it blends images; cutmix and smoothing mean nothing here."""
        mean, std = self._units(labels.double())  # in double precision: a value may be large and vary little
        wanted = ((labels.double() - mean) / std).float().to(images.device)
        augment = replace(self.settings.augment, cutmix=0.0, smoothing=0.0)
        return mix(images, wanted, keys, augment, self.count) if augment.mixup else (images, wanted)

    def prepare(self, model: Model) -> None:
        """A head that already predicts these values keeps doing so, in the new units."""
        old = model.outputs
        super().prepare(model)
        if (old.kind, old.names) != ("values", self.outputs.names) or old == self.outputs:
            return
        for part in model.classifiers:
            (m0, s0), (m1, s1) = Regress(old, self.count)._units(part.weight), self._units(part.weight)
            part.weight.data.mul_((s0 / s1)[:, None])
            part.bias.data.mul_(s0).add_(m0 - m1).div_(s1)

    def criterion(self, output: Tensor, targets: Tensor) -> Tensor:
        return (F.mse_loss if self.loss_name == "mse" else F.huber_loss)(at_least_single(output), targets)

    def distillation(self, output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        return self.criterion(output, teacher.float())

    # --- evaluation ----------------------------------------------------------------------------------

    def align(self, model: nn.Module, source: Source, progress: Progress = SILENT) -> np.ndarray | None:
        """By name: the data must hold the values that the model predicts."""
        if not self.outputs.names or self.outputs.names == source.targets:
            return None
        if set(self.outputs.names) != set(source.targets):
            has = f"{source.name} has {', '.join(source.targets) or source.label_kind}"
            wanted = " ".join(f"--target {name}" for name in self.names)
            raise ConfigError(f"the model predicts {', '.join(self.names)}, and {has}; open it with {wanted}")
        order = [self.outputs.names.index(name) for name in source.targets]
        mean, std = (tuple(units[i] for i in order) for units in (self.outputs.mean, self.outputs.std))
        self.outputs = Outputs("values", source.targets, mean, std)  # the units follow the outputs
        return np.array(order)

    def record(self, outputs: Tensor, labels: Tensor) -> Recorded:
        """`labels` and `values` in their own units; `loss`: squared error in standard deviations."""
        values = self.activate(outputs)
        labels, std = labels.to(values), self._units(values)[1]
        return {"labels": labels, "loss": ((values - labels) / std).square().mean(dim=1), "values": values}

    def measure(self, records: Records) -> dict[str, float]:
        """With several values, MAE and RMSE by name: their units differ."""
        each = per_value(records)
        found = {key: float(np.mean([m[key] for m in each])) for key in ("r2", "spearman")}
        for name, m in zip(self.names, each, strict=True):
            after = f"_{name}" if self.count > 1 else ""
            found |= {f"mae{after}": m["mae"], f"rmse{after}": m["rmse"]}
        return {**found, "loss": records.mean_loss}

    def evaluation(self, records: Records, source: Source) -> ValueEvaluation:
        names, worst = source.targets, []
        for row in records.worst_first(np.arange(len(records)))[:WORST]:
            index = int(records.indices[row])
            label, predicted = (dict(zip(names, records[c][row].tolist(), strict=True)) for c in ("labels", "values"))
            worst.append(Miss(index, source.where(index), label, predicted))
        each = dict(zip(names, per_value(records), strict=True))
        return ValueEvaluation.of(records, source, self.measure(records), targets=each, worst=tuple(worst))

    # --- what people read ----------------------------------------------------------------------------

    def activate(self, outputs: Tensor) -> Tensor:
        values = (outputs.cpu() if outputs.device.type == "mps" else outputs).double()  # Apple's GPUs have none
        mean, std = self._units(values)
        return values * std + mean

    def columns(self, top: int = 5) -> Columns:
        return {f"value_{name}" if name in _TAKEN else name: float for name in self.names}

    def rows(self, outputs: Tensor, top: int = 5) -> list[Row]:
        rows = [[float(f"{value:.{DIGITS}g}") for value in row] for row in self.activate(outputs).tolist()]
        return [dict(zip(self.columns(), row, strict=True)) for row in rows]

    def answers(self, outputs: Tensor, top: int = 5) -> list[dict[str, object]]:
        rows = [zip(self.names, row.values(), strict=True) for row in self.rows(outputs)]
        return [{"classes": [], "values": [{"name": n, "value": v} for n, v in row]} for row in rows]


def per_value(records: Records) -> list[dict[str, float]]:
    """The metrics of each target."""
    found = []
    for y, v in zip(records["labels"].T, records["values"].T, strict=True):
        errors = {"mae": float(abs(y - v).mean()), "rmse": float(np.sqrt(((y - v) ** 2).mean()))}
        found.append({**errors, "r2": metrics.r2(y, v), "spearman": metrics.spearman(y, v)})
    return found


@dataclass(frozen=True)
class Miss:
    """A sample whose prediction is far off: `label` and `predicted` by target, in its unit."""

    index: int
    where: str
    label: dict[str, float]
    predicted: dict[str, float]


@dataclass(frozen=True)
class ValueEvaluation(Evaluation):
    """targets: name -> mae, rmse, r2, spearman; worst: the largest errors first."""

    targets: dict[str, dict[str, float]]
    worst: tuple[Miss, ...]

    def details(self) -> dict[str, object]:
        targets = [{"target": name, **found} for name, found in self.targets.items()]
        return {**self.metrics, "targets": targets, "worst": [vars(m) for m in self.worst]}

    def table(self) -> list[list[str]]:
        rows = [[name, *(f"{m[k]:.4g}" for k in ("mae", "rmse", "r2", "spearman"))] for name, m in self.targets.items()]
        return [["target", "MAE", "RMSE", "R2", "rank correlation"], *rows]

    def summary(self) -> str:
        ranked = f"rank correlation {self.metrics['spearman']:.4f}"
        return f"R2 {self.metrics['r2']:.4f}   {ranked}   loss {self.loss:.4f}   {self.about}"
