"""Exact and near duplicates: candidates by features and by views of thumbnails, each pair verified.

What looks alike at a glance (`views`) is registered, one thumbnail onto the other, and compared (`alignment`); of what
agrees in outline the images themselves are read and compared (`verification`). Registering is what costs: only pairs
whose signatures are alike get that far, and a few of each image, so that a set in which all images look alike takes no
longer than others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vitkit.curation import letters
from vitkit.curation.alignment import agreement, correlation
from vitkit.curation.letters import are_paper, say_the_same
from vitkit.curation.looks import Looks
from vitkit.curation.search import nearest
from vitkit.curation.verification import COPY, SIDE, verified
from vitkit.curation.views import PLACES, VIEWS, Signatures
from vitkit.progress import SILENT, Progress

_OUTLINE = 0.4  # share of cells of thumbnails that must agree
_STRONG = 0.75  # share of cells of images with which one pair is enough to join two groups
_ALIKE = 0.6  # cosine of signatures below which nothing is registered
_TOP = 3  # candidates of each view, at most
_MOST = 6  # candidates of each image, at most: the most alike
_AT_ONCE = 256
_VERIFIED_AT_ONCE = 64
_TINY = 32  # pixels of the shorter side: in fewer, such as digits, different things are alike once registered
_SAME = 0.99  # correlation of tiny images that show the same

Candidates = tuple[np.ndarray, np.ndarray, np.ndarray]  # rows, other rows, numbers of views


@dataclass(frozen=True)
class Pair:
    first: int
    second: int
    score: float  # 1: the same bytes; else the share of the image whose detail agrees


@dataclass(frozen=True)
class Group:
    """Images that show the same; `leaks` when they are in several splits."""

    rows: list[int]
    exact: bool
    score: float  # of the weakest link
    leaks: bool
    paths: tuple[str, ...] = ()


def find_duplicates(
    features: np.ndarray, splits: list[str], looks: Looks, progress: Progress = SILENT, near: float = COPY
) -> list[Group]:
    """Groups of two and more, those across splits first, then exact ones, then by score."""
    digests = looks["digest"]
    found = near_pairs(features, looks, progress, near)
    found = [pair for pair in found if not digests[pair.first] or digests[pair.first] != digests[pair.second]]
    groups = grouped(exact_pairs(digests) + found, splits, digests)
    return sorted(groups, key=lambda g: (not g.leaks, not g.exact, -g.score, g.rows))


def exact_pairs(digests: np.ndarray) -> list[Pair]:
    """Each image with the first one of the same content."""
    first: dict[bytes, int] = {}
    pairs = ((first.setdefault(digest, row), row) for row, digest in enumerate(digests.tolist()) if digest)
    return [Pair(one, row, 1.0) for one, row in pairs if one != row]


def near_pairs(features: np.ndarray, looks: Looks, progress: Progress = SILENT, near: float = COPY) -> list[Pair]:
    best: dict[tuple[int, int], float] = {}
    tiny, done = np.minimum(looks["width"], looks["height"]) < _TINY, 0
    for some in candidates(features, looks, progress):
        sure = [
            best.get((min(pair), max(pair)), 0.0) >= _STRONG
            for pair in zip(*(x.tolist() for x in some[:2]), strict=True)
        ]
        rows, others, views = (x[~np.array(sure, dtype=bool)] for x in some)  # without those found the other way round
        for low in range(0, len(rows), _AT_ONCE):
            now = slice(low, low + _AT_ONCE)
            scores = _scores(rows[now], others[now], PLACES[views[now]], tiny, looks, near)
            for row, other, score in zip(rows[now].tolist(), others[now].tolist(), scores.tolist(), strict=True):
                if score >= near:
                    pair = min(row, other), max(row, other)
                    best[pair] = max(best.get(pair, 0.0), score)
            done += len(rows[now])
            progress.update(f"comparing pairs, {len(best):,} alike", done)
    return [Pair(*pair, min(score, 0.999)) for pair, score in sorted(best.items())]


def _scores(
    rows: np.ndarray, others: np.ndarray, start: np.ndarray, tiny: np.ndarray, looks: Looks, near: float
) -> np.ndarray:
    """Of each pair, from 0 to 1."""
    scores, small = np.zeros(len(rows), np.float32), tiny[rows] | tiny[others]
    same = correlation(looks.thumbnails(rows[small]), looks.thumbnails(others[small]))
    scores[small] = np.where(same >= _SAME, same, 0)
    scores[~small] = _compared(rows[~small], others[~small], start[~small], looks, near)
    return scores


def _compared(rows: np.ndarray, others: np.ndarray, start: np.ndarray, looks: Looks, near: float) -> np.ndarray:
    """How far images agree in detail, where their thumbnails agree in outline; documents that say the same only."""
    outline, maps = agreement(looks.thumbnails(rows), looks.thumbnails(others), start)
    scores, left = np.zeros_like(outline), np.flatnonzero(outline >= _OUTLINE)
    for low in range(0, len(left), _VERIFIED_AT_ONCE):
        some = left[low : low + _VERIFIED_AT_ONCE]
        images, copies = (looks.images(mine[some], SIDE) for mine in (rows, others))
        scores[some] = verified(images, copies, maps[some])
        for n in some[(scores[some] >= near) & are_paper(images) & are_paper(copies)].tolist():
            a, b = looks.images(np.array([rows[n], others[n]]), letters.SIDE)
            scores[n] *= say_the_same(a, b, maps[n])
    return scores


def candidates(features: np.ndarray, looks: Looks, progress: Progress = SILENT) -> Iterator[Candidates]:
    """Rows, other rows and numbers of views of what may be the same, some images at a time."""
    signatures = Signatures(looks, len(features), progress)
    for low in range(0, len(features), _AT_ONCE):
        rows = np.arange(low, min(len(features), low + _AT_ONCE))
        found: dict[tuple[int, int, bool], tuple[float, int]] = {}
        pixels = signatures.pixels(rows)
        for view in range(len(VIEWS)):
            asked = signatures.of(pixels, view)
            for row, other, score in _alike(asked, rows, signatures.whole):
                _keep_best(found, row, other, view, score)
        for row, others in zip(
            rows.tolist(), nearest(features, np.asarray(features[rows]), 2)[0].tolist(), strict=True
        ):
            for other in others:  # the nearest by the features themselves, whatever its signature
                if other != row:
                    _keep_best(found, row, other, 0, _ALIKE)
        yield _most_alike(found)
        progress.update("looking for pairs", low + len(rows), len(features))


def _alike(asked: torch.Tensor, rows: np.ndarray, whole: torch.Tensor) -> Iterator[tuple[int, int, float]]:
    """Each row with the few others that are most like it, where they are alike at all."""
    scores = asked @ whole.mT  # M N
    scores[torch.arange(len(rows)), torch.from_numpy(rows)] = -1
    busy = torch.nonzero(scores.amax(dim=1) > _ALIKE)[:, 0]
    best, others = scores[busy].topk(min(_TOP, scores.shape[1]), dim=1)
    for n, values, near in zip(busy.tolist(), best.tolist(), others.tolist(), strict=True):
        for value, other in zip(values, near, strict=True):
            if value > _ALIKE:
                yield int(rows[n]), other, value


def _keep_best(
    found: dict[tuple[int, int, bool], tuple[float, int]], row: int, other: int, view: int, score: float
) -> None:
    key = row, other, VIEWS[view].across
    if found.get(key, (-1.0, 0))[0] < score:
        found[key] = score, view


def _most_alike(found: dict[tuple[int, int, bool], tuple[float, int]]) -> Candidates:
    """The most alike of each image, in order."""
    of_row: dict[int, list[tuple[float, int, int]]] = {}
    for (row, other, _), (score, view) in sorted(found.items()):
        of_row.setdefault(row, []).append((-score, other, view))
    table = [(row, other, view) for row, others in of_row.items() for _, other, view in sorted(others)[:_MOST]]
    rows, others, views = np.array(table, dtype=np.int64).reshape(-1, 3).T
    return rows, others, views


def grouped(pairs: list[Pair], splits: list[str], digests: np.ndarray) -> list[Group]:
    """Connected images, strongest pairs first; what only a weak pair connects stays apart (`_belong`)."""
    linked: dict[int, set[int]] = {}
    for pair in pairs:
        linked.setdefault(pair.first, set()).add(pair.second)
        linked.setdefault(pair.second, set()).add(pair.first)
    member_of = {row: [row] for row in sorted(linked)}
    for pair in sorted(pairs, key=lambda pair: -pair.score):
        few, many = sorted((member_of[pair.first], member_of[pair.second]), key=len)
        if few is not many and (pair.score >= _STRONG or _belong(few, many, linked)):
            many += few
            member_of |= dict.fromkeys(few, many)
    weakest: dict[int, float] = {}
    for pair in pairs:
        if member_of[pair.first] is member_of[pair.second]:
            key = min(member_of[pair.first])
            weakest[key] = min(weakest.get(key, 1.0), pair.score)
    groups = {key: sorted(member_of[key]) for key in sorted(weakest)}
    return [
        Group(rows, len({digests[r] for r in rows}) == 1, weakest[key], len({splits[r] for r in rows}) > 1)
        for key, rows in groups.items()
    ]


def _belong(few: list[int], many: list[int], linked: dict[int, set[int]]) -> bool:
    """Two pairs between them, or half of all there could be: else different images would be chained one by one."""
    others = set(many)
    links = sum(len(linked[row] & others) for row in few)
    return links >= 2 or 2 * links >= len(few) * len(many)
