"""`vitkit data clean`: everything that is wrong with a set, as rows that a person can go through.

Nothing is changed. A row's `suggestion` says what `vitkit data apply` would do: `drop` leaves the image out, a class
(of an issue `label`) is its new label, and without one nothing happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from vitkit.curation.balance import Overlap, Unbalanced, overlaps, unbalanced
from vitkit.curation.duplicates import Group, find_duplicates
from vitkit.curation.index import Index
from vitkit.curation.labels import find_label_errors
from vitkit.curation.leaks import keep_leaks
from vitkit.curation.looks import Looks
from vitkit.curation.search import nearest, nearest_others
from vitkit.errors import DataError
from vitkit.progress import SILENT, Progress

DROP = "drop"
COLUMNS = ("path", "issue", "split", "label", "suggestion", "score", "group")
ISSUES = ("leak", "exact-duplicate", "near-duplicate", "label", "junk", "outlier", "small-class", "drift")
_MANY = 0.1  # of all labels: seldom are so many wrong
_RARE, _FEW_ODD = 0.05, 3  # what a larger share of images has, and more of them, is the nature of the set, not junk
_OUTLIER = 5.0  # deviations (of the median kind) below the usual nearness of neighbours
_FEW = 5  # images of a class, in train
_DRIFT = 0.35  # share of images that a classifier tells by their split beyond chance
_NEIGHBOURS = 10
_HELD_OUT = {"train": 0, "test": 2}  # of other splits 1; the more, the less may be known of it


@dataclass(frozen=True)
class Issue:
    path: str
    issue: str
    split: str = ""
    label: str = ""
    suggestion: str = ""
    score: float = 0.0
    group: str = ""

    def row(self) -> list[str]:
        return [f"{v:.4f}" if isinstance(v, float) else str(v) for v in asdict(self).values()]


@dataclass(frozen=True)
class Cleaning:
    """What was found; `notes` say what could not be looked for, and why."""

    data: str
    index: str
    images: int
    issues: list[Issue]
    notes: list[str]
    neighbours: dict[str, list[str]]  # path of a label error -> images of the suggested class that are near
    overlaps: list[Overlap]  # classes that lie in each other
    unbalanced: list[Unbalanced]  # classes whose share differs between splits

    def counts(self) -> dict[str, int]:
        return {kind: n for kind in ISSUES if (n := sum(issue.issue == kind for issue in self.issues))}


def clean(index: Index, looks: Looks, progress: Progress = SILENT) -> Cleaning:
    """Look for every kind of issue; leaks first."""
    groups = find_duplicates(index.features, index.splits, looks, progress)
    notes: list[str] = []
    issues = [*_duplicates(index, groups)]
    keep_leaks(index, groups)
    label_issues, neighbours = _labels(index, notes, progress)
    issues += [*label_issues, *_unreadable(index), *_junk(index, looks, notes), *_outliers(index)]
    issues += [*_small_classes(index), *_drift(index)]
    issues.sort(key=lambda issue: ISSUES.index(issue.issue))
    about = str(index.about["data"]), str(index.path), len(index)
    return Cleaning(*about, issues, notes, neighbours, overlaps(index), unbalanced(index))


def _issue(index: Index, row: int, issue: str, suggestion: str, score: float, group: str = "") -> Issue:
    return Issue(index.paths[row], issue, index.splits[row], index.label_name(row), suggestion, score, group)


def _duplicates(index: Index, groups: list[Group]) -> Iterator[Issue]:
    """Of a leak only the images of one split stay, of test rather than of val, never of train; else only the first."""
    for number, group in enumerate(groups, start=1):
        kind = "leak" if group.leaks else "exact-duplicate" if group.exact else "near-duplicate"
        last = max((index.splits[row] for row in group.rows), key=lambda split: _HELD_OUT.get(split, 1))
        kept = [row for row in group.rows if index.splits[row] == last] if group.leaks else group.rows[:1]
        for row in group.rows:
            yield _issue(index, row, kind, "" if row in kept else DROP, group.score, str(number))


def _labels(index: Index, notes: list[str], progress: Progress) -> tuple[list[Issue], dict[str, list[str]]]:
    try:
        errors = find_label_errors(index.features, index.labels, index.classes, progress)
    except DataError as e:
        notes.append(f"labels were not checked: {e}")
        return [], {}
    if len(errors) > _MANY * len(index):
        model, share = index.about["model"], len(errors) / len(index)
        weak = f"{len(errors):,} of {len(index):,} labels ({share:.0%}) disagree with the features by {model}"
        notes.append(f"{weak}: more likely the features are too weak for these classes. Check every row before you")
        notes[-1] += " apply it, or compute better features: vitkit index DATA --model CHECKPOINT"
    found = [_issue(index, e.row, "label", index.classes[e.suggestion], 1 - e.score) for e in errors]
    return found, {index.paths[e.row]: [index.paths[n] for n in e.neighbours] for e in errors}


def _unreadable(index: Index) -> Iterator[Issue]:
    for bad in index.about["bad"]:
        yield Issue(bad["path"], "junk", suggestion=DROP, score=1.0, group=f"unreadable: {bad['reason']}")


def _junk(index: Index, looks: Looks, notes: list[str]) -> Iterator[Issue]:
    width, height, contrast = (looks[name].astype(np.float64) for name in ("width", "height", "contrast"))
    long, short = np.maximum(width, height), np.minimum(width, height)
    modes = looks["mode"]
    common = max(np.unique(modes).tolist(), key=lambda mode: int((modes == mode).sum()))
    usual = float(np.median(looks["sharpness"]))
    signs = {
        "blank": (contrast < 4, DROP),
        "blurred": ((looks["sharpness"] < max(1.0, 0.1 * usual)) & (contrast >= 4), ""),
        "extreme shape": (long > 5 * np.maximum(short, 1), ""),
        "other channels": (modes != common, ""),
        "text or a drawing": ((looks["extremes"] > 0.85) & (contrast >= 4), ""),
    }
    for why, (found, suggestion) in signs.items():
        if found.sum() > max(_FEW_ODD, _RARE * len(index)) and why != "blank":
            notes.append(f"{why}: {found.mean():.0%} of the set, which is its nature rather than junk")
            continue
        for row in np.flatnonzero(found).tolist():
            yield _issue(index, row, "junk", suggestion, 1.0, why)


def _outliers(index: Index) -> Iterator[Issue]:
    """Images whose neighbours are far: the mean similarity of the nearest, against the median of the set."""
    if len(index) <= 2 * _NEIGHBOURS:
        return
    scores = nearest_others(index.features, _NEIGHBOURS)[1].mean(axis=1)
    middle = np.median(scores)
    spread = 1.4826 * np.median(np.abs(scores - middle)) + 1e-6
    far = (middle - scores) / spread
    for row in np.argsort(-far)[: int((far > _OUTLIER).sum())].tolist():
        yield _issue(index, row, "outlier", "", float(1 - scores[row]))


def _small_classes(index: Index) -> Iterator[Issue]:
    train = np.array([split in ("train", "all") for split in index.splits])
    counts = np.bincount(index.labels[train & (index.labels >= 0)], minlength=len(index.classes))
    if 2 * len(index.classes) > len(index):  # no classes at all, which a note says
        return
    for name, count in zip(index.classes, counts.tolist(), strict=True):
        if count < _FEW:
            yield Issue("", "small-class", "train", name, score=float(count), group=f"{count} images to learn from")


def _drift(index: Index) -> Iterator[Issue]:
    """Splits that are not of one kind: neighbours lie in the own split more often than its size explains."""
    splits = np.array(index.splits)
    names, numbers = np.unique(splits, return_inverse=True)
    if len(names) < 2 or len(index) <= 2 * _NEIGHBOURS:
        return
    rows = np.random.default_rng(0).permutation(len(index))[:4000]
    near = nearest(index.features, np.asarray(index.features[rows]), _NEIGHBOURS + 1)[0][:, 1:]
    for n, name in enumerate(names.tolist()):
        mine = numbers[rows] == n
        if name == "train" or mine.sum() < _NEIGHBOURS:
            continue
        expected = float((numbers == n).mean())
        excess = (float((numbers[near[mine]] == n).mean()) - expected) / max(1e-9, 1 - expected)
        if excess > _DRIFT:
            yield Issue("", "drift", name, score=excess, group="its images are nearer to each other than to train")
