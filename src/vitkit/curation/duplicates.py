"""Exact and near duplicates: candidates by features, each pair then verified pixel by pixel; groups, leaks first.

The features of an image and of its mirror image differ, and those of a crop too. So each image asks with several
views of its thumbnail (windows of it, as they are and mirrored); what answers is registered onto it (`alignment`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from vitkit.curation.alignment import agreement
from vitkit.curation.looks import SIDE, Looks
from vitkit.curation.search import nearest
from vitkit.data.descriptor import describe
from vitkit.progress import SILENT, Progress

_NEAR = 0.65  # share of cells that must agree
_TOP = 4  # neighbours of each view
_WIDTH = 128  # of the descriptions in which candidates are looked for
_AT_ONCE = 1024
_CORNER = 0.14

Candidates = tuple[np.ndarray, ...]  # rows, other rows, numbers of views


class View(NamedTuple):
    """A window: its centre and half its side in coordinates from -1 to 1; and whether it is mirrored."""

    x: float = 0.0
    y: float = 0.0
    half: float = 1.0
    across: bool = False
    down: bool = False


_WINDOWS = [View(), View(half=0.88)]
_WINDOWS += [View(x, y, 1 - _CORNER) for x in (-_CORNER, _CORNER) for y in (-_CORNER, _CORNER)]
VIEWS = [*_WINDOWS, *(view._replace(across=True) for view in _WINDOWS), View(down=True)]


@dataclass(frozen=True)
class Pair:
    first: int
    second: int
    score: float  # 1: the same bytes; else the share of the image that agrees


@dataclass(frozen=True)
class Group:
    """Images that show the same; `leaks` when they are in several splits."""

    rows: list[int]
    exact: bool
    score: float  # of the weakest link
    leaks: bool


def find_duplicates(
    features: np.ndarray, splits: list[str], looks: Looks, progress: Progress = SILENT, near: float = _NEAR
) -> list[Group]:
    """Groups of two and more, those across splits first, then exact ones, then by score."""
    exact = exact_pairs(looks["digest"])
    found = near_pairs(features, looks, progress, near)
    groups = grouped(exact + found, splits, looks["digest"])
    return sorted(groups, key=lambda g: (not g.leaks, not g.exact, -g.score, g.rows))


def exact_pairs(digests: np.ndarray) -> list[Pair]:
    """Each image with the first one of the same content."""
    first: dict[bytes, int] = {}
    pairs = ((first.setdefault(digest, row), row) for row, digest in enumerate(digests.tolist()) if digest)
    return [Pair(one, row, 1.0) for one, row in pairs if one != row]


def near_pairs(features: np.ndarray, looks: Looks, progress: Progress = SILENT, near: float = _NEAR) -> list[Pair]:
    best: dict[tuple[int, int], float] = {}
    for rows, others, views in _candidates(features, looks, progress):
        for low in range(0, len(rows), _AT_ONCE):
            some = slice(low, low + _AT_ONCE)
            scores = agreement(*_thumbnails(looks, rows[some], others[some], views[some]))
            for row, other, score in zip(rows[some].tolist(), others[some].tolist(), scores.tolist(), strict=True):
                if score >= near:
                    pair = min(row, other), max(row, other)
                    best[pair] = max(best.get(pair, 0.0), score)
    return [Pair(*pair, min(score, 0.999)) for pair, score in sorted(best.items())]


def _thumbnails(
    looks: Looks, rows: np.ndarray, others: np.ndarray, views: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    images = looks.thumbnails(rows)
    across, down = (np.array([getattr(VIEWS[v], way) for v in views]) for way in ("across", "down"))
    images[across] = images[across][:, :, ::-1]
    images[down] = images[down][:, ::-1]
    start = np.array([[[v.half, 0, v.x], [0, v.half, v.y]] for v in (VIEWS[n] for n in views)])
    return images, looks.thumbnails(others), start


def _candidates(features: np.ndarray, looks: Looks, progress: Progress) -> Iterator[Candidates]:
    """Rows, other rows and numbers of views of what may be the same, some images at a time."""
    count = len(features)
    described = _Described(looks, count, progress)
    for low in range(0, count, _AT_ONCE):
        rows = np.arange(low, min(count, low + _AT_ONCE))
        hits = [(0, nearest(features, np.asarray(features[rows]), _TOP + 1))]  # by the features themselves
        hits += [(n, nearest(described.base, described.views(rows, n), _TOP + 1)) for n in range(len(VIEWS))]
        best: dict[tuple[int, int, bool], tuple[float, int]] = {}
        for view, (others, scores) in hits:
            for row, near, score in zip(rows.tolist(), others.tolist(), scores.tolist(), strict=True):
                for other, value in zip(near, score, strict=True):
                    key = row, other, VIEWS[view].across
                    if other != row and best.get(key, (-1.0, 0))[0] < value:
                        best[key] = value, view
        pairs = np.array([(row, other, view) for (row, other, _), (_, view) in sorted(best.items())], dtype=np.int64)
        yield tuple(pairs.reshape(-1, 3).T)
        progress.update("comparing images", low + len(rows), count)


class _Described:
    """Descriptions of all thumbnails, in few dimensions: a random rotation would do, principal ones keep more."""

    def __init__(self, looks: Looks, count: int, progress: Progress) -> None:
        self.looks = looks
        sample = np.linspace(0, count - 1, min(count, 4096)).astype(np.int64)
        self.basis, self.mean = None, np.float32(0)
        known = self.views(sample, 0)
        self.mean = known.mean(axis=0)
        _, _, directions = np.linalg.svd(known - self.mean, full_matrices=False)
        self.basis = directions[:_WIDTH].T
        parts = []
        for low in range(0, count, _AT_ONCE):
            parts.append(self.views(np.arange(low, min(count, low + _AT_ONCE)), 0))
            progress.update("describing images", low, count)
        self.base = np.concatenate(parts)

    def views(self, rows: np.ndarray, number: int) -> np.ndarray:
        """M D of one view of some images."""
        view = VIEWS[number]
        x = torch.from_numpy(self.looks.thumbnails(rows)).permute(0, 3, 1, 2)  # M 3 S S
        x = x.flip(3) if view.across else x.flip(2) if view.down else x
        low_x, low_y, side = (
            round(n * SIDE / 2) for n in (1 + view.x - view.half, 1 + view.y - view.half, 2 * view.half)
        )
        values = describe(x[:, :, low_y : low_y + side, low_x : low_x + side].contiguous()).numpy()
        if self.basis is not None:
            values = (values - self.mean) @ self.basis
        return np.asarray(F.normalize(torch.from_numpy(values), dim=1).numpy())


def grouped(pairs: list[Pair], splits: list[str], digests: np.ndarray) -> list[Group]:
    """Connected images."""
    parent: dict[int, int] = {}

    def root(row: int) -> int:
        while parent.setdefault(row, row) != row:
            parent[row] = row = parent[parent[row]]
        return row

    for pair in pairs:
        parent[max(root(pair.first), root(pair.second))] = min(root(pair.first), root(pair.second))
    members: dict[int, list[int]] = {}
    for row in sorted(parent):
        members.setdefault(root(row), []).append(row)
    weakest: dict[int, float] = {}
    for pair in pairs:
        weakest[root(pair.first)] = min(weakest.get(root(pair.first), 1.0), pair.score)
    return [
        Group(rows, len({digests[r] for r in rows}) == 1, weakest[key], len({splits[r] for r in rows}) > 1)
        for key, rows in members.items()
    ]
