"""One argument, DATA, names any set of images. The kinds of sets: each one file and one row of `SOURCES`.

A kind is a module with `matches(data) -> bool` and `open(data, options, progress) -> Dataset`; the first that
matches opens the set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from vitkit.data.dataset import Dataset, Options
from vitkit.data.sources import arrays, folder, lists, named, parquet, shards
from vitkit.errors import ConfigError, DataError, did_you_mean
from vitkit.progress import SILENT, Progress
from vitkit.storage import RemoteFolder, is_url, listing, suffix


class Kind(Protocol):
    def matches(self, data: str) -> bool:
        """True when this kind opens what the user called `data`."""

    def open(self, data: str, options: Options, progress: Progress) -> Dataset:
        """Scan the set."""


SOURCES: dict[str, Kind] = {
    "digits, mnist, fashion-mnist, cifar10": named,
    "tar shards": shards,
    "Parquet with images": parquet,
    ".csv, .tsv, .jsonl, .parquet, .txt": lists,
    ".npz": arrays,
    "folders": folder,
}


FILES = (".tar", ".csv", ".tsv", ".jsonl", ".parquet", ".txt", ".npz")  # that are a set by themselves


def _kind_of(below: RemoteFolder) -> Kind:
    """Of a folder behind a URL, by what it holds."""
    return shards if below.paths(".tar") else parquet if below.paths(".parquet") else folder


def open_data(
    data: str | os.PathLike[str],
    progress: Progress = SILENT,
    *,
    target: str | Sequence[str] = (),
    classes_from: str | int = "auto",
    labelled: bool = True,
) -> Dataset:
    """Scan a set of images, once; `.split("train")` gives its samples.

    data          a name (digits, mnist, fashion-mnist, cifar10), a folder of classes (alone or inside train/,
                  val/, test/), a list (.csv .tsv .jsonl .parquet .txt), .npz arrays, Parquet with images inside,
                  or WebDataset shards (shards/train-{0000..0099}.tar, or their folder); any of them also by its URL
                  (s3://, gs://, az://, hf://, https://)
    progress      shows how far a long scan is, and what was understood
    target        the columns of a list or of Parquet that hold the numbers to be predicted
    classes_from  which folders are the classes: "top", "leaf", a level counted from 1, or "auto": the innermost
                  ones when those above hold no images
    labelled      False: images alone are enough, also a flat folder; labels are taken where every image has one
    """
    text = str(data) if is_url(data) else str(Path(data).expanduser())
    columns = (target,) if isinstance(target, str) else tuple(target)
    level = str(classes_from)
    if level not in ("auto", "top", "leaf") and (not level.isdecimal() or int(level) < 1):
        raise ConfigError(f"classes_from={level!r} must be auto, top, leaf or a level: 1, 2, 3 ...")
    below = listing(text) if is_url(text) and suffix(text) not in FILES else None
    for kind in SOURCES.values() if below is None else (_kind_of(below),):
        if below is not None or kind.matches(text):
            dataset = kind.open(text, Options(tuple(c for c in columns if c), level, labelled, below), progress)
            for note in dataset.notes:
                progress.note(note)
            return dataset
    if is_url(text) or os.path.exists(text):
        raise DataError(f"{text} is not a set of images: vitkit reads {', '.join(SOURCES)}")
    raise DataError(
        f"there is no file or folder {text!r}, and no set of that name.{did_you_mean(text, named.NAMES)} "
        f"Give a path that exists, or one of: {', '.join(named.NAMES)}"
    )
