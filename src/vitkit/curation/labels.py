"""Wrong labels: what a classifier that never saw an image says about it, ranked by confident learning.

Probabilities come from logistic regression on the features, fitted without the fold that is asked about. Confident
learning (Northcutt et al. 2021) counts, with a threshold of its own for each class, how many of class i seem to be of
class j, and takes so many of those with the largest margin. The rules are those of cleanlab's default.

Shapes: N images, D width, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from vitkit.curation.search import nearest
from vitkit.errors import DataError
from vitkit.progress import SILENT, Progress

_FOLDS = 5
_L2 = 0.05  # of the weights, on standardised features; held-out likelihood is best near it
_ITERATIONS = 60
_NEIGHBOURS = 5


@dataclass(frozen=True)
class LabelError:
    row: int
    label: int
    suggestion: int
    score: float  # probability of the label that it has: the lower, the surer
    neighbours: list[int]  # the nearest images of the suggested class
    path: str = ""
    label_name: str = ""
    suggested_name: str = ""


def find_label_errors(
    features: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], progress: Progress = SILENT
) -> list[LabelError]:
    """The surest first."""
    if len(classes) < 2 or (labels < 0).any():
        raise DataError("label errors need one class per image and at least two classes; this set has none such")
    if 2 * len(classes) > len(labels):
        many = f"there are {len(classes):,} classes for {len(labels):,} images, such as {classes[0]!r}"
        raise DataError(
            f"{many}: a column of names or values rather than classes; index the set with its column of classes"
        )
    probabilities = cross_validated(features, labels, len(classes), progress)
    found = confident_learning(probabilities, labels)
    wanted = probabilities.argmax(axis=1)
    near = nearest(features, np.asarray(features[found]), 50)[0]
    errors = []
    for row, others in zip(found.tolist(), near, strict=True):
        speaking = [int(o) for o in others if o != row and labels[o] == wanted[row]][:_NEIGHBOURS]
        errors.append(
            LabelError(row, int(labels[row]), int(wanted[row]), float(probabilities[row, labels[row]]), speaking)
        )
    return errors


def cross_validated(features: np.ndarray, labels: np.ndarray, classes: int, progress: Progress = SILENT) -> np.ndarray:
    """N D, N -> N C: probabilities by a classifier that did not learn from the image; folds by class."""
    order = np.random.default_rng(0).permutation(len(labels))
    fold = np.zeros(len(labels), dtype=np.int64)
    for c in range(classes):
        mine = order[labels[order] == c]
        fold[mine] = (np.arange(len(mine)) + c) % _FOLDS
    x = torch.from_numpy(np.array(features, dtype=np.float32))
    y = torch.from_numpy(labels)
    found = np.zeros((len(labels), classes), dtype=np.float32)
    for n in range(_FOLDS):
        asked = torch.from_numpy(fold == n)
        if asked.any():
            found[fold == n] = _probabilities(x[~asked], y[~asked], x[asked], classes)
        progress.update("cross-validation", n + 1, _FOLDS)
    return found


def _probabilities(known: torch.Tensor, labels: torch.Tensor, asked: torch.Tensor, classes: int) -> np.ndarray:
    mean, std = known.mean(dim=0), known.std(dim=0) + 1e-4
    known, asked = (F.pad((x - mean) / std, (0, 1), value=1.0) for x in (known, asked))
    weight = torch.zeros(known.shape[1], classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(known @ weight, labels) + _L2 * weight[:-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        return np.asarray((asked @ weight).softmax(dim=1).numpy())


def confident_learning(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """N C, N -> rows whose label seems wrong, the least probable label first."""
    joint = confident_joint(probabilities, labels)
    wrong = np.zeros(len(labels), dtype=bool)
    for i, counts in enumerate(joint):
        mine = np.flatnonzero(labels == i)
        if len(mine) <= 1:
            continue
        for j in np.flatnonzero(counts):
            if j != i:
                margin = probabilities[mine, j] - probabilities[mine, i]
                wrong[mine[np.argsort(-margin)[: counts[j]]]] = True
    wrong &= probabilities.argmax(axis=1) != labels
    rows = np.flatnonzero(wrong)
    return rows[np.argsort(probabilities[rows, labels[rows]], kind="stable")]


def confident_joint(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """C C: how many images labelled i are of class j, estimated; rows add up to the images of a class."""
    classes = probabilities.shape[1]
    counts = np.bincount(labels, minlength=classes)
    of_class = [probabilities[labels == c, c] for c in range(classes)]
    thresholds = np.array([p.mean() if len(p) else np.inf for p in of_class])
    sure = probabilities >= thresholds - 1e-6  # N C
    guess = np.where(sure.sum(axis=1) > 1, probabilities.argmax(axis=1), sure.argmax(axis=1))
    joint = np.zeros((classes, classes))
    np.add.at(joint, (labels[sure.any(axis=1)], guess[sure.any(axis=1)]), 1)
    np.fill_diagonal(joint, np.diagonal(joint).clip(min=1))
    joint = joint / joint.sum(axis=1, keepdims=True) * counts[:, None]
    return np.array([_rounded(row) for row in joint])


def _rounded(row: np.ndarray) -> np.ndarray:
    """Whole numbers with the same sum: what rounding lost goes to where it lost most."""
    whole = row.round()
    order, lost = np.argsort(row - whole), int(row.sum().round() - whole.sum())
    whole[order[-lost:] if lost > 0 else order[:-lost]] += np.sign(lost)
    return whole.astype(np.int64)
