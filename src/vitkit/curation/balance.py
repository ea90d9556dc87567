"""Classes that lie in each other, and splits that hold classes in other shares than train."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitkit.curation.index import Index
from vitkit.curation.search import nearest

_ASKED = 4000  # images whose neighbours are counted, at most
_NEIGHBOURS = 10
_OVERLAP = 0.2  # share of neighbours in the other class, the mean of both ways
_APART = 0.05  # difference of shares that is worth a word
_SIGMAS = 4.0  # and that chance does not explain


@dataclass(frozen=True)
class Overlap:
    """Two classes that are hard to tell apart by the features."""

    first: str
    second: str
    share: float  # of the nearest images of one that are of the other


@dataclass(frozen=True)
class Unbalanced:
    split: str
    label: str
    share: float  # of the split
    share_of_train: float


def overlaps(index: Index) -> list[Overlap]:
    """The most overlapping first."""
    count = len(index.classes)
    labelled = np.flatnonzero(index.labels >= 0)
    if count < 2 or len(labelled) <= 2 * _NEIGHBOURS:
        return []
    rows = np.sort(np.random.default_rng(0).permutation(labelled)[:_ASKED])
    near = nearest(index.features, np.asarray(index.features[rows]), _NEIGHBOURS + 1)[0]
    votes = np.zeros((count, count))
    for row, others in zip(rows.tolist(), near, strict=True):
        others = others[(others != row) & (index.labels[others] >= 0)][:_NEIGHBOURS]
        np.add.at(votes[index.labels[row]], index.labels[others], 1)
    shares = votes / np.maximum(votes.sum(axis=1, keepdims=True), 1)
    both = np.triu((shares + shares.T) / 2, k=1)
    pairs = sorted(zip(*np.nonzero(both > _OVERLAP), strict=True), key=lambda pair: -both[pair])
    return [Overlap(index.classes[a], index.classes[b], float(both[a, b])) for a, b in pairs]


def unbalanced(index: Index) -> list[Unbalanced]:
    """Classes whose share of another split differs from that of train by more than chance explains, the worst first."""
    splits, count = np.array(index.splits), len(index.classes)
    trained = np.bincount(index.labels[(splits == "train") & (index.labels >= 0)], minlength=count)
    if count < 2 or not trained.sum():
        return []
    found = []
    for split in dict.fromkeys(s for s in index.splits if s != "train"):
        here = np.bincount(index.labels[(splits == split) & (index.labels >= 0)], minlength=count)
        if not here.sum():
            continue
        shares, usual = here / here.sum(), trained / trained.sum()
        both = (here + trained) / (here.sum() + trained.sum())
        sigma = np.sqrt(both * (1 - both) * (1 / here.sum() + 1 / trained.sum()))
        for c in np.flatnonzero((np.abs(shares - usual) > _APART) & (np.abs(shares - usual) > _SIGMAS * sigma)):
            found.append(Unbalanced(split, index.classes[c], float(shares[c]), float(usual[c])))
    return sorted(found, key=lambda u: -abs(u.share - u.share_of_train))
