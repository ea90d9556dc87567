"""`vitkit data check`: everything worth knowing about a set before training on it.

Every image is decoded completely. Exact duplicates are found by the SHA-256 of their content; those
that lie in two splits leak the answers of a test into training, and those with two labels contradict.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from vitkit.data.badfiles import BadFile
from vitkit.data.dataset import Dataset
from vitkit.data.decode import BadImage, Header, decode, header, read_bytes
from vitkit.data.loader import in_order
from vitkit.data.source import Source
from vitkit.errors import shell_word
from vitkit.io import sha256
from vitkit.progress import SILENT, Progress

_CHEAP = 50_000  # images in files: more are not compared before a run


class Seen(NamedTuple):
    digest: str  # of its content
    header: Header
    reason: str = ""  # why it cannot be read


@dataclass(frozen=True)
class Duplicate:
    paths: list[str]
    splits: list[str]
    classes: list[str]

    @property
    def leaks(self) -> bool:
        return len(set(self.splits)) > 1

    @property
    def contradicts(self) -> bool:
        return len(set(self.classes)) > 1


@dataclass(frozen=True)
class Report:
    name: str
    multi_label: bool
    splits: dict[str, int]
    classes: dict[str, dict[str, int]]  # class -> split -> images
    empty_classes: list[str]
    sizes: dict[str, list[int]]  # smallest, median, largest: width, height
    formats: dict[str, int]
    modes: dict[str, int]
    bad: list[BadFile]
    duplicates: list[Duplicate]
    notes: list[str]  # what was understood
    lost: list[str]  # what the set holds and cannot give; `notes` have it too

    def to_dict(self) -> dict[str, object]:
        said = [{**asdict(d), "leaks": d.leaks, "contradicts": d.contradicts} for d in self.duplicates]
        return {**asdict(self), "duplicates": said}


def check(dataset: Dataset, workers: int = 0, progress: Progress = SILENT) -> Report:
    """Read and decode every image of every split."""
    source = dataset.split("all")
    seen = list(in_order(partial(_look, source), len(source), workers, "decoding every image", progress))
    good = [s.header for s in seen if not s.reason]
    by_area = sorted(good, key=lambda h: h.width * h.height)
    places = {"smallest": 0, "median": len(good) // 2, "largest": -1} if good else {}
    counted = {}
    if dataset.label_kind != "values":
        counted = {split: dataset.samples.take(rows).counts for split, rows in dataset.rows.items()}
    return Report(
        name=source.name,
        multi_label=source.multi_label,
        splits=source.splits,
        classes={c: {s: int(n[i]) for s, n in counted.items()} for i, c in enumerate(dataset.classes)},
        empty_classes=list(dataset.empty_classes),
        sizes={word: list(by_area[place][:2]) for word, place in places.items()},
        formats=dict(Counter(h.format for h in good).most_common()),
        modes=dict(Counter(h.mode for h in good).most_common()),
        bad=[BadFile(source.where(i), source.label_name(i), s.reason) for i, s in enumerate(seen) if s.reason],
        duplicates=_duplicates(source, seen),
        notes=list(dataset.notes),
        lost=list(dataset.lost),
    )


def _look(source: Source, index: int) -> Seen:
    if source.pixels is not None:
        pixels = source.pixels[index].numpy()
        channels, height, width = pixels.shape
        about = Header(width, height, "array", f"{channels} channel{'s' * (channels > 1)}")
        return Seen(sha256(pixels.tobytes()), about)
    try:
        encoded = source.encoded(index)
        image = decode(encoded)
        raw = encoded if isinstance(encoded, bytes) else read_bytes(encoded)
    except BadImage as e:
        return Seen("", Header(0, 0, "", ""), e.reason)
    return Seen(sha256(raw), Header(*image.size, *header(raw)[2:]))


def _duplicates(source: Source, seen: list[Seen]) -> list[Duplicate]:
    splits = np.repeat(list(source.splits), list(source.splits.values())).tolist()
    same = defaultdict(list)
    for index, s in enumerate(seen):
        if not s.reason:
            same[s.digest].append(index)
    return [
        Duplicate([source.where(i) for i in g], [splits[i] for i in g], [source.label_name(i) for i in g])
        for g in same.values()
        if len(g) > 1
    ]


def leakage(dataset: Dataset) -> str:
    """A warning when images of other splits are in train too, byte for byte; "" when none is. Cheap: before a run.

    Read are only images that train and another split have of one length, and of those the ends first.
    """
    if not (found := leaked_images(dataset)):
        return ""
    many = f"{len(found):,} images that are evaluated are in train too, such as {found[0]}"
    return f"warning: {many}: accuracy will look too high. `vitkit data check {shell_word(dataset.name)}` lists them"


def leaked_images(dataset: Dataset) -> list[str]:
    """Names of the images outside train that are in train too, byte for byte; of a large set of files none."""
    if dataset.split_by_content or "train" not in dataset.splits or len(dataset.splits) < 2:
        return []
    source = dataset.split("all")
    if source.pixels is None and len(source) > _CHEAP:
        return []
    trained = np.repeat([split == "train" for split in dataset.splits], list(dataset.splits.values()))
    rows = np.arange(len(source))
    for key in (source.length, source.share, partial(_digest, source)):
        rows = rows[_on_both_sides([key(int(i)) for i in rows], trained[rows])]
        if not len(rows):
            return []
    return [source.where(int(row)) for row in rows[~trained[rows]]]


def _on_both_sides(keys: Sequence[str | float], trained: np.ndarray) -> np.ndarray:
    """Which of the samples have a key that occurs both in train and outside."""
    _, group = np.unique(np.array(keys), return_inverse=True)
    return np.isin(group, np.intersect1d(group[trained], group[~trained]))


def _digest(source: Source, index: int) -> str:
    seen = _look(source, index)
    return seen.digest or f"unreadable {index}"
