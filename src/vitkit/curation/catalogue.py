"""A data set, labelled or not, as a list: the name, label and split of every image, and a key of its content."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from vitkit.data import Source, open_data
from vitkit.data.identity import key
from vitkit.data.sources import FILES
from vitkit.errors import DataError, as_text
from vitkit.io import canonical, sha256
from vitkit.prediction import open_inputs
from vitkit.progress import SILENT, Progress
from vitkit.storage import is_url, listing, suffix


@dataclass(frozen=True)
class Catalogue:
    source: Source
    splits: list[str]

    @cached_property
    def paths(self) -> list[str]:
        return [as_text(self.source.where(i)) for i in range(len(self.source))]

    @cached_property
    def keys(self) -> list[str]:
        """Other than before where the image was written to; labels do not count."""
        return [key(self.source, i) for i in range(len(self.source))]

    @property
    def classes(self) -> tuple[str, ...]:
        """None where images have several labels, values or no label at all."""
        return self.source.classes if self.source.label_kind == "classes" and self.source.classes != ("",) else ()

    @property
    def labels(self) -> np.ndarray:
        """(N,) class numbers; -1 where there are none."""
        return self.source.labels if self.classes else np.full(len(self.source), -1, np.int64)

    def __len__(self) -> int:
        return len(self.source)


def open_catalogue(data: str | Path, progress: Progress = SILENT, classes_from: str | int = "auto") -> Catalogue:
    """Whatever `open_data` takes, all splits one after the other; or a folder of images without classes."""
    data = placed(data)
    folder = Path(data)
    if is_url(data):
        below = listing(str(data)) if suffix(str(data)) not in FILES else None
        if below is not None and not below.folders and len(source := _loose(str(data))):
            return Catalogue(source, ["all"] * len(source))
    elif folder.is_dir() and not any(p.is_dir() and not p.name.startswith(".") for p in folder.iterdir()):
        if any(folder.glob("*.tar")) or not len(source := _loose(str(folder))):
            return _labelled(data, progress, classes_from)
        return Catalogue(source, ["all"] * len(source))
    return _labelled(data, progress, classes_from)


def placed(path: str | Path) -> str:
    """What a path names from whatever folder a command runs; names of sets, URLs and what is not there stay."""
    local = Path(path).expanduser()
    return str(path) if is_url(path) or not local.exists() else os.path.abspath(local)


def _loose(folder: str) -> Source:
    try:
        return open_inputs([folder])
    except DataError:  # it holds something else: a set in a few large files
        return Source(folder)


def _labelled(data: str | Path, progress: Progress, classes_from: str | int) -> Catalogue:
    dataset = open_data(data, progress, classes_from=classes_from)
    return Catalogue(dataset.split("all"), np.repeat(list(dataset.splits), list(dataset.splits.values())).tolist())


def differences(before: list[str], now: list[str]) -> str:
    """In words, "" when both lists of keys hold the same: "3 images are new or changed, 1 is gone"."""
    new, gone = len(set(now) - set(before)), len(set(before) - set(now))
    words = [f"{new:,} {'image is' if new == 1 else 'images are'} new or changed"] * bool(new)
    words += [f"{gone:,} {'is' if gone == 1 else 'are'} gone or changed"] * bool(gone)
    return ", ".join(words) or ("" if before == now else "their order or number changed")


def digest_of(keys: list[str], *more: object) -> str:
    return sha256(canonical([keys, *more]).encode())
