"""What the numbers mean: pure functions on arrays.

Shapes: N samples, C classes, K bins. Fractions are 0..1, never percent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BINS = 15  # as in Guo et al. 2017, "On Calibration of Modern Neural Networks"


# --- one class per image ---------------------------------------------------------------------------


def place_of_label(scores: Tensor, labels: Tensor) -> Tensor:
    """(N, C), (N,) -> how many classes stand before the right one: 0 is a hit at once.

    Equal scores stand in the order of the classes, so a model that always says the same thing has the
    accuracy of chance and not of luck. A score that is no number stands before everything.
    """
    own = scores.gather(1, labels[:, None])  # N 1
    earlier = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]  # N C
    before = ~(scores <= own) | ((scores == own) & earlier)  # not >: true for nan as well
    return torch.where(own[:, 0].isnan(), scores.shape[1], before.sum(dim=1))


def top_k(scores: Tensor, labels: Tensor, k: int = 1) -> float:
    """The share of samples whose class is among the k highest scores."""
    return mean((place_of_label(scores, labels) < k).numpy())


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval of a share of `count` samples (Wilson 1927): of chance in sampling, nothing else."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def confusion(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """(C, C) counts: the row is the true class, the column is what was said."""
    return np.bincount(labels * classes + predicted, minlength=classes * classes).reshape(classes, classes)


@dataclass(frozen=True)
class PerClass:
    """Arrays (C,). What cannot be said (the precision of a class that is never predicted) is 0."""

    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    support: np.ndarray  # samples that truly are of the class
    ap: np.ndarray | None = None  # average precision, with several labels; nan for a class without samples


def per_class(matrix: np.ndarray) -> PerClass:
    return _rates(np.diag(matrix), matrix.sum(axis=0), matrix.sum(axis=1))


def _rates(hits: np.ndarray, said: np.ndarray, truly: np.ndarray, ap: np.ndarray | None = None) -> PerClass:
    precision, recall = hits / np.maximum(said, 1), hits / np.maximum(truly, 1)
    return PerClass(precision, recall, 2 * hits / np.maximum(said + truly, 1), truly, ap)


# --- calibration -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bins:
    """Samples sorted by how sure the model was, in K bins of equal width; empty bins hold zeros."""

    edges: np.ndarray  # (K + 1,), from 0 to 1; a bin holds its upper edge, the first also 0
    count: np.ndarray  # (K,)
    confidence: np.ndarray  # (K,) mean of what the model claimed
    accuracy: np.ndarray  # (K,) mean of what was true

    @property
    def ece(self) -> float:
        """Expected calibration error: the mean gap between claim and truth, weighted by samples."""
        return float((self.count * abs(self.accuracy - self.confidence)).sum() / max(1, self.count.sum()))


def reliability(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> Bins:
    """(N,) claimed probabilities, (N,) zeros and ones -> how often the claims came true."""
    edges = np.linspace(0, 1, bins + 1)
    place = np.clip(np.digitize(confidence, edges, right=True) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    claimed, true = (np.bincount(place, weights=w, minlength=bins) for w in (confidence, correct))
    return Bins(edges, count, claimed / np.maximum(count, 1), true / np.maximum(count, 1))


# --- several classes per image ---------------------------------------------------------------------


def average_precision(labels: np.ndarray, scores: np.ndarray) -> float:
    """(N,) zeros and ones, (N,) scores -> area under precision over recall; nan when nothing is true.

    Precision is taken at every different score, not interpolated, so equal scores count as one step.
    """
    total = int(np.sum(labels))
    if not total:
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(labels[order])
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # where a run of equal scores ends
    precision = hits[last] / (last + 1)
    return float((np.diff(hits[last], prepend=0) * precision).sum() / total)


def average_precisions(labels: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(N, C), (N, C) -> (C,). Their mean over the classes that occur is the mAP."""
    return np.array([average_precision(y, s) for y, s in zip(labels.T, scores.T, strict=True)])


def mean_average_precision(labels: np.ndarray, scores: np.ndarray) -> float:
    found = average_precisions(labels, scores)
    return mean(found[~np.isnan(found)])


def per_label(labels: np.ndarray, scores: np.ndarray) -> PerClass:
    """(N, C), (N, C) -> precision, recall and F1 of saying yes above 0, and average precision."""
    said, true = scores > 0, labels > 0
    hits, ap = (said & true).sum(axis=0), average_precisions(labels, scores)
    return _rates(hits, said.sum(axis=0), true.sum(axis=0), ap)


# --- numbers -----------------------------------------------------------------------------------------


def r2(labels: np.ndarray, values: np.ndarray) -> float:
    """(N,), (N,) -> the share of the labels' variance that is predicted: 1 at best, 0 for always saying their mean."""
    variance = float(((labels - labels.mean()) ** 2).sum())
    return 1 - float(((labels - values) ** 2).sum()) / variance if variance else 0.0


def spearman(labels: np.ndarray, values: np.ndarray) -> float:
    """(N,), (N,) -> correlation of the ranks, equals sharing the middle of theirs; 0 when all are equal."""

    def ranks(values: np.ndarray) -> np.ndarray:
        """Around 0."""
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        return np.asarray((np.cumsum(counts) - counts / 2)[inverse]) - len(values) / 2

    a, b = ranks(labels), ranks(values)
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale else 0.0


def mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
