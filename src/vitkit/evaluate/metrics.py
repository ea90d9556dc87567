"""What the numbers mean: pure functions on numpy arrays.

Shapes: N samples, C classes, K bins. Fractions are 0..1, never percent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BINS = 15  # as in Guo et al. 2017, "On Calibration of Modern Neural Networks"


# --- one class per picture ---------------------------------------------------------------------------


def place_of_label(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(N, C), (N,) -> how many classes stand before the right one: 0 is a hit at once.

    Equal scores stand in the order of the classes, so a model that always says the same thing has the
    accuracy of chance and not of luck. A score that is no number stands before everything.
    """
    own = np.take_along_axis(scores, labels[:, None], axis=1)  # N 1
    earlier = np.arange(scores.shape[1]) < labels[:, None]  # N C
    before = ~(scores <= own) | ((scores == own) & earlier)  # not <=: true for nan as well
    before[np.arange(len(labels)), labels] = False
    return np.where(np.isnan(own[:, 0]), scores.shape[1], before.sum(axis=1))


def top_k(scores: np.ndarray, labels: np.ndarray, k: int = 1) -> float:
    """The share of samples whose class is among the k highest scores."""
    return _mean(place_of_label(scores, labels) < k)


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(N, C), (N,) -> -log of the probability of the right class, (N,)."""
    logits = np.asarray(logits, dtype=np.float64)
    highest = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - highest).sum(axis=1)) + highest[:, 0]
    return total - np.take_along_axis(logits, labels[:, None], axis=1)[:, 0]


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
    hits, said, truly = np.diag(matrix), matrix.sum(axis=0), matrix.sum(axis=1)
    return _rates(hits, said, truly)


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


def ece(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> float:
    return reliability(confidence, correct, bins).ece


# --- several classes per picture ---------------------------------------------------------------------


def binary_cross_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(N, C) logits, (N, C) zeros and ones -> the loss of every single question, (N, C)."""
    logits = np.asarray(logits, dtype=np.float64)
    return np.maximum(logits, 0) - logits * labels + np.log1p(np.exp(-abs(logits)))


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
    return _mean(found[~np.isnan(found)])


def per_label(labels: np.ndarray, scores: np.ndarray, threshold: float = 0.0) -> PerClass:
    """(N, C), (N, C) -> precision, recall and F1 of saying yes above the threshold, and average precision."""
    said = scores > threshold
    ap = average_precisions(labels, scores)
    return _rates((said & (labels > 0)).sum(axis=0), said.sum(axis=0), (labels > 0).sum(axis=0), ap)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
