"""The same images through a model and through what was made of it: how far apart are the outputs?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitkit.data import ImageBatches, Source, normalise
from vitkit.data.preprocess import prepare_pixels
from vitkit.errors import ConfigError, DataError
from vitkit.model.base import VisionModel
from vitkit.model.config import AnyConfig
from vitkit.runtime.base import Calibration, Runtime, grid_of, made_up
from vitkit.runtime.eager import Eager
from vitkit.tasks import Metric, task_of

TOLERANCE = 1e-4  # of a probability, in fp32
_ROUNDING = 0.5  # of what the outputs vary by: more than that is no rounding


@dataclass(frozen=True)
class Images:
    """What is compared on: uint8 (N, C, H, W) as prepared, with labels where they are known."""

    pixels: Tensor
    labels: Tensor | None = None
    name: str = "made-up images"

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, rows: slice | Tensor) -> Images:
        return replace(self, pixels=self.pixels[rows], labels=None if self.labels is None else self.labels[rows])

    def batches(self, config: AnyConfig, size: int) -> Iterator[Tensor]:
        for part in self.pixels.split(size):
            yield normalise(part, config.preprocessing)


def images_of(model: VisionModel, source: Source | None, count: int, raw: bool = False) -> Images:
    """Up to `count` readable images spread evenly over a set; made-up ones when there is no set."""
    config = model.config
    if source is None:
        height, width = config.preprocessing.size
        return Images(made_up(config, count, (height * 5 // 4, width * 3 // 2) if raw else None))
    numbers = torch.linspace(0, len(source) - 1, min(count, len(source))).long().tolist()
    (read,) = ImageBatches(source, config).batches([numbers])
    if not read.indices:
        raise DataError(f"no image of {source.name} can be read; `vitkit data check` says why")
    return Images(read.images, _labels(model, source, read.indices), source.name)


def _labels(model: VisionModel, source: Source, rows: list[int]) -> Tensor | None:
    """Labels in the order of the model's outputs; None where the set is not about these classes or values."""
    kind, labels = source.label_kind, source.labels[rows]
    if (model.outputs.kind == "values") != (kind == "values"):
        return None
    names = list(model.class_names or ())
    try:
        if kind == "classes" and set(source.classes) < set(names):  # a part of the model's classes
            order: np.ndarray | None = np.array([names.index(name) for name in source.classes])
        else:
            order = task_of(model, kind).align(model, source)
    except ConfigError:
        return None
    if order is not None:  # of every label of the set, the model's output
        labels = order[labels] if kind == "classes" else labels[:, order.argsort()]
    return torch.from_numpy(labels)


def calibration_of(model: VisionModel, source: Source, count: int) -> Calibration:
    return list(images_of(model, source, count).batches(model.config, 8))


def outputs_of(runtime: Runtime, images: Images, config: AnyConfig, batch_size: int) -> Tensor:
    return torch.cat([runtime.run(batch) for batch in images.batches(config, batch_size)])


@dataclass(frozen=True)
class Check:
    """How a runtime compares with the model on so many images.

    difference       the largest: of a probability, of a value in standard deviations, or of a feature
    spread           root mean square difference of the outputs, over that of the outputs themselves
    agreement        share of images with the same first class (labels: of the same decisions; values: R2 to the model)
    accuracy         of the runtime, where labels are known: the task's score, whose name is in `metric`
    accuracy_before  of the model
    """

    images: int
    name: str
    difference: float
    spread: float
    agreement: float
    accuracy: float | None = None
    accuracy_before: float | None = None
    exact: bool = True
    metric: Metric | None = None  # None: features

    @property
    def classifies(self) -> bool:
        return self.metric is not None and self.metric.percent

    @property
    def score(self) -> float:
        """Accuracy where labels are known, else agreement with the model."""
        return self.agreement if self.accuracy is None else self.accuracy

    @property
    def drop(self) -> float:
        """What was lost of the score."""
        return (1.0 if self.accuracy_before is None else self.accuracy_before) - self.score

    def text(self, value: float) -> str:
        return f"{value:.2%}" if self.metric is None else self.metric.text(value)

    def to_dict(self) -> dict[str, object]:  # the keys of version 0.1
        words = {"exact": self.exact, "classifies": self.classifies, "metric": self.metric and self.metric.key}
        numbers = {key: value for key, value in vars(self).items() if key not in ("images", "exact", "metric")}
        return {"pictures": self.images, **numbers, **words}

    def summary(self) -> str:
        unit = f"a probability, the same first class for {self.agreement:.2%}" if self.classifies else "an output"
        text = f"compared on {self.images} images ({self.name}): largest difference {self.difference:.1e} in {unit}"
        if self.metric is None or self.accuracy is None or self.accuracy_before is None:
            return text
        before, after = self.text(self.accuracy_before), self.text(self.accuracy)
        return f"{text}\n{self.metric.words} {before} before, {after} after"

    def insist(self, what: Path | str) -> None:
        """An error when the difference cannot be rounding."""
        if self.exact and (self.difference > TOLERANCE or (self.classifies and self.agreement < 1)):
            unit = "a probability" if self.classifies else "an output"
            off, advice = f"{self.difference:.1e} in {unit}", "Choose another format"
        elif not self.exact and not self.spread < _ROUNDING:
            off = f"{self.spread:.0%} of what its outputs vary by"
            advice = "Try --calibrate DATA, a smaller --merge, or fp32"
        else:
            return
        raise ConfigError(
            f"{what} differs from the model by {off}, agreement {self.text(self.agreement)} on {self.images} images; "
            f"nothing was kept. {advice}"
        )


def compare(model: VisionModel, runtime: Runtime, images: Images, raw: bool = False, exact: bool = True) -> Check:
    """With `raw` the images are taken as they would come from a file, and prepared on both sides."""
    pre, eager = model.config.preprocessing, Eager(model)
    theirs, ours = [], []
    for pixels in images.pixels.split(7):  # odd, and the last one smaller: a batch size that was baked in shows
        inputs = normalise(prepare_pixels(pixels, pre) if raw else pixels, pre)
        ours.append(eager.run(inputs))
        theirs.append(runtime.run(pixels.permute(0, 2, 3, 1).contiguous() if raw else inputs))
    outputs, found = model.outputs, torch.cat(theirs)
    if raw and outputs.kind == "values" and outputs.mean:  # finished inside the file
        found = (found - found.new_tensor(outputs.mean)) / found.new_tensor(outputs.std)
    return compare_outputs(model, torch.cat(ours), found, images, exact)


def compare_sizes(model: VisionModel, runtime: Runtime, check: Check) -> Check:
    """The worst of `check` and of images of several sizes, in batches of several sizes."""
    config = model.config
    (h, w), (p, q) = grid_of(config), config.patch_size
    grids = [(h + 1, w), (h, w + 3), (max(2, h // 2), w + 1), (h + 2, max(2, w // 2)), (max(2, h - 1), max(2, w - 1))]
    found = [check]
    for count, (rows, columns) in zip((1, 2, 5, 1, 3), grids, strict=True):
        images = Images(made_up(config, count, (rows * p, columns * q), seed=rows))
        found.append(compare(model, runtime, images, exact=check.exact))
    worst = {name: max(getattr(one, name) for one in found) for name in ("difference", "spread")}
    count, where = sum(one.images for one in found), f"{check.name}; {len(grids)} other sizes, batches of 1, 2, 3 and 5"
    return replace(check, images=count, name=where, agreement=min(one.agreement for one in found), **worst)


def check_top(runtime: Runtime, images: Images, model: VisionModel, raw: bool) -> None:
    """An error when the classes that a file names are not those of its own logits."""
    pixels, config = images.pixels[:5], model.config
    given = pixels.permute(0, 2, 3, 1).contiguous() if raw else normalise(pixels, config.preprocessing)
    logits, values, numbers = runtime.all_outputs(given)
    all_of_them = task_of(model).activate(logits)
    best = all_of_them.topk(values.shape[-1], dim=-1).values
    far = max((best - values).abs().max(), (all_of_them.gather(-1, numbers.long()) - values).abs().max())
    if not far < TOLERANCE:
        words = f"the probabilities in the file differ from those of its logits by {far:.1e}; nothing was kept"
        raise ConfigError(f"{words}. Choose another format, or leave --top out")


def compare_outputs(model: VisionModel, ours: Tensor, theirs: Tensor, images: Images, exact: bool) -> Check:
    """Outputs of the model and of a runtime -> their comparison."""
    labels = images.labels
    several = labels is not None and labels.ndim == 2  # files of version 0.1 do not tell classes from labels
    task = task_of(model, "labels" if several else None) if model.config.classes else None
    values = task is not None and task.kind == "values"
    # Probabilities; values in standard deviations; features as they are.
    a, b = (ours, theirs) if task is None or values else (task.activate(ours), task.activate(theirs))
    level = (ours - ours.mean(dim=0 if values else -1, keepdim=True)).square().mean().sqrt().clamp(min=1e-12)

    def score(outputs: Tensor, labels: Tensor | None) -> float | None:
        return None if task is None or labels is None else task.metrics(outputs, labels)[task.score.key]

    difference, spread = (a - b).abs().max(), (ours - theirs).square().mean().sqrt() / level
    agreement = score(theirs, task.activate(ours)) if task is not None and values else None
    if agreement is None:
        agreement = _agreement(a, b, task is not None and task.kind == "labels", TOLERANCE if exact else 0.0)
    accuracies, metric = (score(theirs, labels), score(ours, labels)), None if task is None else task.score
    return Check(len(images), images.name, float(difference), float(spread), agreement, *accuracies, exact, metric)


def _agreement(a: Tensor, b: Tensor, many: bool, tie: float) -> float:
    """The share of equal decisions; two whose probabilities differ by less than `tie` have no order."""
    if many:
        return float((((a > 0.5) == (b > 0.5)) | ((a - 0.5).abs() < tie)).double().mean())
    first = b.argmax(-1, keepdim=True)
    same = (a.argmax(-1) == first[..., 0]) | (a.max(dim=-1).values - a.gather(-1, first)[..., 0] < tie)
    return float(same.double().mean())
