"""A data set, scanned once: it knows its splits, classes and channels, and gives each split as a `Source`.

One vocabulary names the splits of every kind of set: `validation/`, `dev-0001.tar` and `x_valid` all mean `val`.
A name outside the vocabulary that stands beside `train` is a split of its own: no sample is ever dropped because of
what its split is called. Splits that a set comes without are taken out by the content of its images.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitkit.data.source import Source
from vitkit.errors import ConfigError, DataError
from vitkit.progress import SILENT, Progress
from vitkit.storage import RemoteFolder

SPLITS = ("train", "val", "test")
_SYNONYMS = {
    "train": ("train", "training", "trn"),
    "val": ("val", "valid", "validation", "dev", "devel", "development"),
    "test": ("test", "testing", "tst", "holdout", "heldout", "hold-out", "held-out"),
    "": ("", "all", "none"),  # says nothing: not split yet
}
_MEANING = {word: split for split, words in _SYNONYMS.items() for word in words}
_UNNAMED = "unnamed"  # the split of samples that no name was given for, while others have one
_CARVED = 0.1  # the share of a set that becomes `val`, and again `test`, when it comes without


@dataclass(frozen=True)
class Options:
    """How a set is to be understood, where it can be understood in several ways."""

    target: tuple[str, ...] = ()  # columns of a list or of Parquet that hold the numbers to be predicted
    classes_from: str = "auto"  # which folders are the classes: auto, top, leaf, or a level counted from 1
    labelled: bool = True  # False: images alone are enough, and labels are taken where there are any
    remote: RemoteFolder | None = None  # what lies below the set, where it is a folder behind a URL

    def allow(self, what: str, *known: str) -> None:
        """An error when an option was given that this kind of set knows nothing about."""
        if self.target and "target" not in known:
            raise ConfigError(f"{what} has no columns for target={','.join(self.target)}; list the images in a .csv")
        if self.classes_from != "auto" and "classes_from" not in known:
            raise ConfigError(f"classes_from={self.classes_from} is about folders of classes, which {what} has not")


class Dataset:
    """`dataset.split("val")` gives the samples of a split; `dataset.splits` how many each has.

    samples        every sample, in the order of the scan; name, classes, targets (the names of values), label_kind,
                   channels and flip_safe are those of its `Source`
    names          the split of every sample; "" where the set does not say: see `_split_rows`
    progress       told how far the splitting by content is, where splits have to be made
    notes          what was understood, for the user
    lost           what the set holds and cannot give: images without a label, the end of a shard; also in `notes`
    empty_classes  folders that look like classes but hold no image
    files          the entry of `names` for every sample, where whole files are in one split
    split_missing  take missing splits out of what there is, by content; False: the set has those that it names
    """

    def __init__(
        self,
        samples: Source,
        names: Sequence[str] | np.ndarray,
        progress: Progress = SILENT,
        notes: Iterable[str] = (),
        empty_classes: Iterable[str] = (),
        lost: Iterable[str] = (),
        files: np.ndarray | None = None,
        split_missing: bool = True,
    ) -> None:
        if not len(samples):
            raise DataError(f"{samples.name} holds no image with a label; give it one, or choose another set")
        self.samples, self.lost, self.empty_classes = samples, tuple(lost), tuple(empty_classes)
        self.notes = (*notes, *self.lost)
        self.name, self.classes, self.targets = samples.name, samples.classes, samples.targets
        self.label_kind, self.flip_safe = samples.label_kind, samples.flip_safe
        if self.label_kind == "values":
            ends = zip(self.targets, samples.labels.min(axis=0), samples.labels.max(axis=0), strict=True)
            self.notes += tuple(f"values to be predicted: {name}, from {low:g} to {high:g}" for name, low, high in ends)
        self.split_by_content = not any(names)  # all of it: copies of an image are in one split
        self.rows = _split_rows(names, files, samples, progress, split_missing)
        self.splits = {s: len(rows) for s, rows in self.rows.items()}
        self._opened: dict[str, Source] = {}
        self.channels = samples.channels = self._take("train" if self.splits.get("train") else "all").sniffed_channels()

    def split(self, name: str = "train") -> Source:
        """train, val, test or another of `splits`; several joined with "+"; or all."""
        source = self._opened[name] = self._opened.get(name) or self._take(name)
        if not len(source):
            have = ", ".join(f"{s} {n}" for s, n in self.splits.items())
            empty = f"the split {name!r} of {self.name} is empty; it has {have}"
            raise DataError(f"{empty}. Add images, or choose another split")
        return source

    def _take(self, name: str) -> Source:
        wanted = list(self.rows) if name == "all" else [name] if name in self.rows else name.split("+")
        for part in wanted:
            if part not in self.rows:
                have = ", ".join(self.rows)
                raise DataError(f"{self.name} has no split {part!r}; it has {have}. Choose one, or several: train+val")
        parts = [self.rows[s] for s in wanted]
        return self.samples.take(np.concatenate(parts) if len(parts) > 1 else parts[0], name, self.splits)

    def evaluation(self) -> Source:
        return self.split(evaluation_split(self.splits))


def split_name(word: object) -> str:
    """ "Validation" -> "val"; a word that is no synonym stays, in lower case; "" where nothing is said."""
    text = "" if word is None else str(word).strip().lower()
    return _MEANING.get(text, text)


def is_split(word: str) -> bool:
    return split_name(word) in SPLITS


def splits_of_files(files: Sequence[Path], root: Path) -> list[str]:
    """What the names of files say: train-0001.tar and train/0001.tar are of train.

    Without any train among them, names outside the vocabulary say nothing: part-1.tar, part-2.tar.
    """
    names = []
    for file in files:
        first = split_name(first_word(file))
        folders = file.relative_to(root).parts[:-1] if file.is_relative_to(root) else ()
        known = (split_name(word) for word in reversed(folders) if is_split(word))
        names.append(first if first in SPLITS else next(known, first))
    return names if "train" in names else [name if name in SPLITS else "" for name in names]


def first_word(file: Path) -> str:
    """ "train-0001.tar" -> "train"."""
    return re.split(r"[-_.\d]", file.name.lower())[0]


def _split_rows(
    names: Sequence[str] | np.ndarray,
    files: np.ndarray | None,
    samples: Source,
    progress: Progress,
    split_missing: bool,
) -> dict[str, np.ndarray]:
    """The split of every sample, or of its file -> rows per split, with the missing ones taken out by content.

    Samples without a name give a tenth to each of val and test, the rest to train. A set that has train but no val
    gives a tenth of train to val. The content is read only when it is needed.
    """
    written, of_row = np.unique(np.asarray(names, dtype=str), return_inverse=True)
    if files is not None:
        of_row = of_row[files]
    parts = {str(name): np.flatnonzero(of_row == n) for n, name in enumerate(written)}
    if "" in parts and "train" in parts:
        parts[_UNNAMED] = parts.pop("")
    origin, wanted = ("", ("val", "test")) if "" in parts else ("train", ("val",))
    missing = [s for s in wanted if s not in parts] if split_missing else []
    if origin in parts and (missing or not origin):
        rows, low = parts.pop(origin), 0.0
        shares = np.zeros(len(rows))
        if missing:
            shares[:] = samples.shares(rows, progress)
        for split in missing:
            parts[split] = rows[(shares >= low) & (shares < low + _CARVED)]
            low += _CARVED
        parts["train"] = rows[shares >= low]
    return {s: parts[s] for s in (*SPLITS, *sorted(parts.keys() - set(SPLITS))) if s in parts}


def evaluation_split(splits: Mapping[str, int]) -> str:
    """The split that a finished model is evaluated on: test if there is one, else val, else what there is."""
    filled = [s for s, n in splits.items() if n]
    return next((s for s in ("test", "val", "train", *filled) if s in filled), "train")
