"""`vitkit data check`: everything worth knowing about a set before training on it.

Every picture is decoded completely. Exact duplicates are found by the SHA-256 of their content; those
that lie in two splits leak the answers of a test into training, and those with two labels contradict.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitkit.data.badfiles import BadFile
from vitkit.data.decode import BadPicture
from vitkit.data.folder import empty_classes
from vitkit.data.open import open_data
from vitkit.data.parallel import in_order
from vitkit.data.progress import Track, quiet
from vitkit.data.source import FileSource, Source


@dataclass(frozen=True)
class Seen:
    """What one picture turned out to be."""

    digest: bytes
    width: int = 0
    height: int = 0
    format: str = ""
    mode: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Duplicate:
    """Samples with the same content."""

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
    classes: dict[str, dict[str, int]]  # class -> split -> pictures
    empty_classes: list[str]
    sizes: dict[str, list[int]]  # smallest, median, largest: width, height
    formats: dict[str, int]
    modes: dict[str, int]
    bad: list[BadFile]
    duplicates: list[Duplicate]

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        for plain, duplicate in zip(found["duplicates"], self.duplicates, strict=True):
            plain.update(leaks=duplicate.leaks, contradicts=duplicate.contradicts)
        return found


def check(data: str, workers: int = 0, track: Track = quiet) -> Report:
    """Read and decode every picture of every split."""
    source = open_data(data, "all", track)
    look = _Look(source)
    seen = list(in_order(look, len(source), workers, "decoding every picture", track))
    splits = np.repeat(list(source.splits), list(source.splits.values())).tolist()
    good = [s for s in seen if not s.reason]
    return Report(
        name=source.name,
        multi_label=source.multi_label,
        splits=source.splits,
        classes=_by_class(source),
        empty_classes=empty_classes(Path(data).expanduser())
        if isinstance(source, FileSource) and _is_folder(data)
        else [],
        sizes=_sizes(good),
        formats=dict(Counter(s.format for s in good).most_common()),
        modes=dict(Counter(s.mode for s in good).most_common()),
        bad=[BadFile(source.where(i), source.label_name(i), s.reason) for i, s in enumerate(seen) if s.reason],
        duplicates=_duplicates(source, seen, splits),
    )


def _is_folder(data: str) -> bool:
    return Path(data).expanduser().is_dir()


class _Look:
    def __init__(self, source: Source) -> None:
        self.source = source

    def __call__(self, index: int) -> Seen:
        if self.source.pixels is not None:
            pixels = self.source.pixels[index].numpy()
            channels, height, width = pixels.shape
            digest = hashlib.sha256(pixels.tobytes()).digest()
            return Seen(digest, width, height, "array", f"{channels} channel{'s' * (channels > 1)}")
        raw = b""
        try:
            encoded = self.source.encoded(index)
            raw = encoded if isinstance(encoded, bytes) else Path(encoded).read_bytes()
        except (OSError, BadPicture):
            pass  # decoding meets it again, and says why
        digest = hashlib.sha256(raw).digest()
        try:
            picture = self.source.picture(index, 3)
        except BadPicture as e:
            return Seen(digest, reason=e.reason)
        with Image.open(io.BytesIO(raw)) as header:
            return Seen(digest, *picture.size, header.format or "unknown", header.mode)


def _by_class(source: Source) -> dict[str, dict[str, int]]:
    ends = np.cumsum(list(source.splits.values()))[:-1]
    counted = {}
    for split, labels in zip(source.splits, np.split(source.labels, ends), strict=True):
        one_each = np.bincount(labels, minlength=len(source.classes)) if labels.ndim == 1 else labels.sum(axis=0)
        counted[split] = one_each
    return {c: {s: int(counted[s][i]) for s in counted} for i, c in enumerate(source.classes)}


def _sizes(good: list[Seen]) -> dict[str, list[int]]:
    if not good:
        return {}
    by_area = sorted(good, key=lambda s: s.width * s.height)
    chosen = {"smallest": by_area[0], "median": by_area[len(by_area) // 2], "largest": by_area[-1]}
    return {word: [s.width, s.height] for word, s in chosen.items()}


def _duplicates(source: Source, seen: list[Seen], splits: list[str]) -> list[Duplicate]:
    same = defaultdict(list)
    for index, s in enumerate(seen):
        if not s.reason:
            same[s.digest].append(index)
    groups = [rows for rows in same.values() if len(rows) > 1]
    return [
        Duplicate([source.where(i) for i in g], [splits[i] for i in g], [source.label_name(i) for i in g])
        for g in groups
    ]
