"""A baseline before the model: what a linear map of simple features reaches, in seconds, on the same validation images.

The features are those of `data/descriptor.py` (edges, colours, layout), and with a checkpoint to start from also its
own. The map is least squares in closed form, to ones and zeros for classes, its strength chosen on a fifth of the
images that was held out. From the same features: what half of the images would reach, and labels that seem wrong.

It is a function of the images and the seed; only how many of them are looked at depends on the clock.

Shapes: N images, D width of the features, C outputs of the task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.curation.embedding import open_embedder
from vitkit.curation.labels import confident_learning, cross_validated
from vitkit.data import ImageBatches, Source
from vitkit.data.descriptor import describe, width
from vitkit.data.order import stratified_order
from vitkit.errors import DataError
from vitkit.evaluation.features import features
from vitkit.evaluation.linear import FOLDS, Ridge, stratified
from vitkit.tasks import Task
from vitkit.training.parts import Parts

LEARNED, EVALUATED = 2000, 1000  # images, at most
LEAST = 32  # of each
STRENGTHS = (1.0, 0.1, 0.01, 1e-3, 1e-4)
HALVES = 3  # points of the learning curve
_AT_ONCE = 64
_LABEL_WORK = 4e6  # N D C of the labels that are checked: about a second
READING = 0.6  # of the time is for the features

Describe = Callable[[Source, np.ndarray], tuple[Tensor, np.ndarray]]  # rows -> features of those that can be read


@dataclass(frozen=True)
class Baseline:
    features: str
    key: str  # of the task's score
    score: float  # on validation images
    learned_from: int
    evaluated: int
    seconds: float
    curve: tuple[tuple[int, float], ...]  # images learned from, score; fewest first
    doubtful: int = 0  # labels that seem wrong,
    checked: int = 0  # of so many
    agreed: float = 0.0  # share of the labels that cross-validation agreed with

    def to_dict(self) -> dict[str, object]:
        return dict(vars(self))

    @classmethod
    def of(cls, kept: Mapping[str, object]) -> Baseline:
        """What `to_dict` became in a file."""
        found = cls(**kept)  # type: ignore[arg-type]
        return replace(found, curve=tuple((int(count), float(score)) for count, score in found.curve))


def baselines(parts: Parts, seconds: float) -> list[Baseline]:
    """By the descriptor, and by the checkpoint's features where there is one and time; none without labels or time."""
    task, loader, validation = parts.task, parts.loader, parts.validation
    if task.kind is None or validation is None or seconds <= 0:
        return []
    splits, seed = (loader.source, validation.source), parts.config.seed
    ways: list[tuple[str, Describe]] = [("edges and colours", _described)]
    if parts.config.init and parts.config.head != "converge":  # a frozen run is that itself
        ways.append(("features of the checkpoint", lambda source, rows: _of_model(parts, source, rows)))
    found = []
    for name, way in ways:
        if (one := baseline(task, *splits, way, name, seconds / len(ways), seed)) is not None:
            found.append(one)
    return found


def baseline(
    task: Task, train: Source, validation: Source, way: Describe, name: str, seconds: float, seed: int = 0
) -> Baseline | None:
    """None where too few images can be read in the time."""
    started = time.monotonic()
    known, asked = (stratified_order(s.groups, seed) for s in (train, validation))
    known, asked = known[:LEARNED], asked[:EVALUATED]
    first, rows = way(train, known[:_AT_ONCE])
    each = (time.monotonic() - started) / max(1, min(_AT_ONCE, len(known)))
    share = 1.0  # halved until it fits: then few different numbers of images are possible
    while (share * (len(known) + len(asked)) - _AT_ONCE) * each > READING * seconds:
        share /= 2
    known, asked = known[: int(share * len(known))], asked[: int(share * len(asked))]
    if min(len(known), len(asked)) < min(LEAST, len(train), len(validation)) or len(known) < 2 * FOLDS:
        return None
    try:
        more, others = way(train, known[_AT_ONCE:])
        x, rows = torch.cat([first, more]), np.concatenate([rows, others])
        v, seen = way(validation, asked)
    except DataError:
        return None
    y, wanted = torch.from_numpy(train.labels[rows]), torch.from_numpy(validation.labels[seen])
    return compare(task, name, x, y, train.groups[rows], v, wanted, seed, started)


def compare(
    task: Task,
    name: str,
    x: Tensor,
    labels: Tensor,
    groups: np.ndarray,
    asked: Tensor,
    wanted: Tensor,
    seed: int = 0,
    started: float | None = None,
) -> Baseline | None:
    """From features N D in an order whose every beginning is fair; evaluated on the features `asked`."""
    started = time.monotonic() if started is None else started
    curve = []
    for half in reversed(range(HALVES)):
        count = len(x) >> half
        if count >= max(LEAST, 2 * task.count):
            outputs = fit(task, x[:count], labels[:count], groups[:count], seed)(asked)
            curve.append((count, task.metrics(outputs, wanted)[task.score.key]))
    if not curve:
        return None
    doubts = check_labels(x, labels.numpy(), task)
    counts = len(x), len(asked), time.monotonic() - started
    return Baseline(name, task.score.key, curve[-1][1], *counts, tuple(curve), *doubts)


def fit(task: Task, x: Tensor, labels: Tensor, groups: np.ndarray, seed: int) -> Callable[[Tensor], Tensor]:
    """N D, N ... -> the map with the best score on a fifth that was held out, from all of them."""
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0)
    scale = torch.where(std > 1e-6, std, torch.inf)
    y = _wanted(task, labels)
    held_out = torch.from_numpy(stratified(groups, seed) == 0)
    normal = (x - mean) / scale

    def scored(strength: float) -> float:
        found = task.metrics(_apply(part.at(strength * size), normal[held_out]), labels[held_out])[task.score.key]
        return found if task.score.higher else -found

    size = float(torch.isfinite(scale).sum())  # of standardised features: their squares add up to that
    part = Ridge(task, normal[~held_out], y[~held_out])
    weights = Ridge(task, normal, y).at(max(STRENGTHS, key=scored) * size)
    return lambda asked: _apply(weights, (asked - mean) / scale)


def _apply(weights: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weights[:, :-1].to(x.dtype), weights[:, -1].to(x.dtype))


def _wanted(task: Task, labels: Tensor) -> Tensor:
    """N C: ones and zeros, or standardised values."""
    if task.kind == "classes":
        return F.one_hot(labels, task.count).float()
    if task.kind == "labels":
        return labels.float()
    return task.targets(torch.zeros(len(labels), 1), labels, np.zeros(len(labels), dtype=np.uint64))[1].float()


def check_labels(x: Tensor, labels: np.ndarray, task: Task) -> tuple[int, int, float]:
    """Labels that seem wrong by confident learning; labels checked; the share that cross-validation confirms."""
    count = min(len(x), int(_LABEL_WORK / (x.shape[1] * task.count)))
    x, labels = x[:count], labels[:count]
    if task.kind != "classes" or count < 10 * task.count or np.bincount(labels, minlength=task.count).min() < 2:
        return 0, 0, 0.0
    probabilities = cross_validated(x.numpy(), labels, task.count)
    agreed = float((probabilities.argmax(axis=1) == labels).mean())
    return len(confident_learning(probabilities, labels)), len(labels), agreed


# --- features ----------------------------------------------------------------------------------------


def _described(source: Source, rows: np.ndarray) -> tuple[Tensor, np.ndarray]:
    if source.pixels is not None:
        return describe(source.pixels[torch.from_numpy(rows)]), rows
    config = open_embedder(None).config.replace(channels=source.channels)
    values, kept = [torch.zeros(0, width(source.channels))], list[int]()
    parts = [rows[n : n + _AT_ONCE].tolist() for n in range(0, len(rows), _AT_ONCE)]
    for batch in ImageBatches(source, config).batches(parts):
        values.append(describe(batch.images))
        kept += batch.indices
    return torch.cat(values), np.array(kept, dtype=np.int64)


def _of_model(parts: Parts, source: Source, rows: np.ndarray) -> tuple[Tensor, np.ndarray]:
    if not len(rows):
        return torch.zeros(0, next(iter(parts.model.classifiers)).in_features), rows
    found = features(parts.model, source.take(rows), batch_size=16)
    return found.values, rows[found.indices]
