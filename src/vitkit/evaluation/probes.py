"""Evaluate a representation: nearest neighbours, few-shot least squares, and logistic regression.

All learn from the split `train`, with nothing left to choose, and are evaluated on another. The representation is what
the classifier sees; with a distillation token, the mean of the two.

Shapes: N samples, D width of the representation, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data import BadFile, Source
from vitkit.errors import ConfigError
from vitkit.evaluation.features import Features, features
from vitkit.evaluation.linear import fit
from vitkit.evaluation.run import How
from vitkit.model.base import Outputs
from vitkit.progress import SILENT, Progress
from vitkit.tasks.classify import Classify
from vitkit.tasks.metrics import top_k
from vitkit.tasks.result import as_json, percent

if TYPE_CHECKING:
    from typing_extensions import Unpack

NEIGHBOURS, TEMPERATURE = 20, 0.07  # DINO
SHOTS, SEEDS = (5, 10), 3
L2 = 2.0**10  # big_vision: one strength for every set, and a constant feature for the bias that is so
BIAS = 100.0  # large that it is hardly held back
_SIMILARITIES_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Probe:
    """`accuracy` maps what was tried to a fraction: top1 and top5, or the number of shots for fewshot."""

    probe: str
    data: str
    split: str
    samples: int
    learned_from: int  # samples of the split train
    accuracy: dict[str, float]
    settings: Mapping[str, object]
    bad_files: tuple[BadFile, ...] = ()
    not_finite: ClassVar[int] = 0

    def to_dict(self) -> dict[str, object]:
        return as_json(vars(self))

    def table(self) -> list[list[str]]:
        return []

    def summary(self) -> str:
        after = " per class" if self.probe == "fewshot" else ""
        lines = [f"{tried}{after}: {percent(share)}" for tried, share in self.accuracy.items()]
        how = ", ".join(f"{k} {v}" for k, v in self.settings.items() if k != "shots")
        learned = f"learned from {self.learned_from:,} images of train"
        lines.append(f"{self.probe} ({how}): {learned}, evaluated on {self.samples:,} of {self.split} of {self.data}")
        return "\n".join(lines)


def features_of(model: nn.Module, source: Source, progress: Progress, **how: Unpack[How]) -> Features:
    if source.label_kind != "classes":
        raise ConfigError(f"a probe needs one class per image, and {source.name} has {source.label_kind}")
    return features(model, source, progress, **how)


def knn(model: nn.Module, train: Source, test: Source, progress: Progress = SILENT, **how: Unpack[How]) -> Probe:
    """Every image gets the class that its nearest neighbours in `train` vote for; `how` as in `evaluate`."""
    known, asked = (features_of(model, source, progress, **how) for source in (train, test))
    neighbours = min(NEIGHBOURS, len(known.values))
    votes = knn_votes(known.values, known.labels, asked.values, len(train.classes), neighbours)
    accuracy = {f"top{k}": top_k(votes, asked.labels, k) for k in (1, 5)}
    settings = {"neighbours": neighbours, "temperature": TEMPERATURE}
    counts = len(asked.labels), len(known.labels)
    return Probe("knn", test.name, test.split, *counts, accuracy, settings, known.bad + asked.bad)


def knn_votes(known: Tensor, labels: Tensor, asked: Tensor, classes: int, neighbours: int) -> Tensor:
    """N D, N, M D -> votes M C: each neighbour votes with exp(cosine / TEMPERATURE)."""
    known, asked = F.normalize(known, dim=1), F.normalize(asked, dim=1)
    votes = torch.zeros(len(asked), classes)
    step = max(1, _SIMILARITIES_AT_ONCE // len(known))
    for low in range(0, len(asked), step):
        similarity, nearest = (asked[low : low + step] @ known.T).topk(neighbours, dim=1)
        votes[low : low + step].scatter_add_(1, labels[nearest], (similarity / TEMPERATURE).exp())
    return votes


def fewshot(
    model: nn.Module,
    train: Source,
    test: Source,
    shots: Sequence[int] = SHOTS,
    progress: Progress = SILENT,
    **how: Unpack[How],
) -> Probe:
    """The paper's probe: ridge regression from a few images per class; `how` as in `evaluate`.

    The mean over a few draws of the images. Only images that are drawn are read.
    """
    asked = features_of(model, test, progress, **how)
    drawn = [draw_shots(train.labels, len(train.classes), max(shots), seed) for seed in range(SEEDS)]
    used = np.unique(np.concatenate([i for of_seed in drawn for i in of_seed]))
    known = features_of(model, train.take(used), progress, **how)
    read = used[known.indices]  # rows of `known.values`
    accuracy = {}
    for n in shots:
        right = []
        for of_seed in drawn:
            chosen = np.intersect1d(np.concatenate([i[:n] for i in of_seed]), read)
            rows = np.searchsorted(read, chosen)
            scores = least_squares(known.values[rows], known.labels[rows], asked.values, len(train.classes))
            right.append(top_k(scores, asked.labels, 1))
        accuracy[str(n)] = float(np.mean(right))
    settings = {"shots": list(shots), "seeds": SEEDS, "l2": L2}
    counts = len(asked.labels), len(read)
    return Probe("fewshot", test.name, test.split, *counts, accuracy, settings, known.bad + asked.bad)


def linear(model: nn.Module, train: Source, test: Source, progress: Progress = SILENT, **how: Unpack[How]) -> Probe:
    """Logistic regression, trained to convergence, its strength by cross-validation; `how` as in `evaluate`."""
    known, asked = (features_of(model, source, progress, **how) for source in (train, test))
    task = Classify(Outputs("classes", train.classes), len(train.classes))
    head = fit(task, known.values, known.labels, known.labels.numpy(), progress=progress)
    accuracy = {f"top{k}": top_k(head(asked.values), asked.labels, k) for k in (1, 5)}
    settings = {"strength": float(f"{head.strength:.3g}"), "folds": head.folds}
    counts = len(asked.labels), len(known.labels)
    return Probe("linear", test.name, test.split, *counts, accuracy, settings, known.bad + asked.bad)


PROBES: dict[str, Callable[..., Probe]] = {"knn": knn, "fewshot": fewshot, "linear": linear}


def draw_shots(labels: np.ndarray, classes: int, shots: int, seed: int) -> list[np.ndarray]:
    """For every class the numbers of a few samples; a class that has fewer gives all it has."""
    random = np.random.default_rng(seed)
    return [random.permutation(np.flatnonzero(labels == c))[:shots] for c in range(classes)]


def least_squares(known: Tensor, labels: Tensor, asked: Tensor, classes: int) -> Tensor:
    """N D, N, M D -> scores M C: ridge regression of standardised features to targets of -1 and 1, in closed form."""
    mean, std = known.double().mean(dim=0), known.double().std(dim=0, correction=0) + 1e-5
    x, z = (F.pad((v.double() - mean) / std, (0, 1), value=BIAS) for v in (known, asked))  # N D+1, M D+1
    y = 2.0 * F.one_hot(labels, classes).double() - 1  # N C
    if len(x) >= x.shape[1]:
        weights = torch.linalg.solve(x.T @ x + L2 * torch.eye(x.shape[1], dtype=x.dtype), x.T @ y)
    else:  # fewer samples than features: the same weights from the smaller system
        weights = x.T @ torch.linalg.solve(x @ x.T + L2 * torch.eye(len(x), dtype=x.dtype), y)
    return z @ weights  # M C
