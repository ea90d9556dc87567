"""The images of a study: train, val and test in memory, small and square.

Whatever DATA is, its images become uint8 of 8, 16, 28 or 32 pixels a side, so that a training takes seconds
and every study can be tried on every set. Shares of the training images are nested: those of 1/32
are among those of 1/8, and so on.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from vitkit.data import Loader, Source, open_data
from vitkit.data.keys import permutation
from vitkit.data.preprocess import read_pixels
from vitkit.errors import ConfigError, DataError
from vitkit.model.config import Preprocessing
from vitkit.study.synthetic import SIDE, SYNTHETIC, made
from vitkit.study.table import Facts, Setting
from vitkit.training.recipe import image_size

SIDES = (8, 16, 28, 32)  # digits; small; mnist and its relatives; all others
MOST = {"train": 60_000, "val": 5_000, "test": 10_000}  # images that are used, at most


@dataclass(frozen=True)
class Sets:
    name: str
    side: int
    train: Source
    val: Source
    test: Source

    @property
    def setting(self) -> Setting:
        return Setting(self.side, self.train.channels, len(self.train.classes))

    @property
    def sizes(self) -> dict[str, int]:
        return {"train": len(self.train), "val": len(self.val), "test": len(self.test)}

    def describe(self) -> Facts:
        """What tells one set of images from another."""
        labels = np.concatenate([s.labels for s in (self.train, self.val, self.test)]).astype(np.int64)
        return {"name": self.name, "side": self.side, **self.sizes, "check": zlib.crc32(labels.tobytes())}

    def of(self, classes: tuple[int, ...]) -> Sets:
        """The images of these classes alone, which are numbered anew; (): all."""
        return _of(self, classes) if classes else self

    def part(self, share: float, seed: int) -> Source:
        """A random share of the training images, another one for every seed."""
        if share >= 1:
            return self.train
        count = max(len(self.train.classes), round(share * len(self.train)))
        return self.train.take(np.sort(permutation(seed, 0, len(self.train), "study")[:count]))


@lru_cache(maxsize=4)
def _of(sets: Sets, classes: tuple[int, ...]) -> Sets:
    def chosen(source: Source) -> Source:
        some = source.take(np.flatnonzero(np.isin(source.labels, classes)))
        names = tuple(source.classes[c] for c in classes)
        return replace(some, labels=np.searchsorted(classes, some.labels), classes=names)

    return replace(sets, train=chosen(sets.train), val=chosen(sets.val), test=chosen(sets.test))


@lru_cache(maxsize=16)
def resized(source: Source, side: int) -> Source:
    """The same images at another size."""
    assert source.pixels is not None
    pixels = read_pixels(source.pixels, Preprocessing(size=(side, side)), source.channels)
    return source if pixels is source.pixels else replace(source, pixels=pixels)


@lru_cache(maxsize=2)
def open_sets(data: str) -> Sets:
    """The three parts. What a set lacks of val and test is taken out of train; if it has one of them, that is test.

    NAME@16 is the set NAME at 16 pixels, NAME@16/4 with a quarter of its training images; otherwise it has the smallest
    of SIDES that keeps all pixels. Some small sets are made up: see `synthetic.py`.
    """
    if data in SYNTHETIC:
        return Sets(data, SIDE, *(_source(data, split, *arrays) for split, arrays in made(data).items()))
    asked = re.fullmatch(rf"(.+)@({'|'.join(map(str, SIDES))})(?:/(\d+))?", data)
    whole, wanted, shared = (asked[1], int(asked[2]), int(asked[3] or 1)) if asked else (data, 0, 1)
    dataset = open_data(whole)
    train = dataset.split("train")
    if dataset.label_kind != "classes":
        raise ConfigError(f"{data} has {dataset.label_kind}; studies need one class per image: give --data another set")
    side = wanted or next((s for s in SIDES if max(image_size(train)) <= s), SIDES[-1])
    there = [name for name in ("test", "val") if dataset.splits.get(name)]
    parts = {"train": _in_memory(train, side, MOST["train"])}
    if len(there) < 2:
        parts = _cut(parts["train"], ["val"] if there else ["val", "test"])
    for name, split in zip(("test", "val"), there, strict=False):
        parts[name] = _in_memory(dataset.split(split), side, MOST[name])
    mixed = permutation(0, 0, len(parts["train"]), "study share")
    parts["train"] = parts["train"].take(np.sort(mixed[: len(mixed) // max(1, shared)]))
    if len(parts["train"]) < 2 * len(train.classes):
        raise DataError(f"{data} has {len(parts['train'])} training images, too few for a study; give a larger set")
    return Sets(data, side, parts["train"], parts["val"], parts["test"])


def _source(name: str, split: str, images: np.ndarray, labels: np.ndarray) -> Source:
    classes = tuple(str(n) for n in range(labels.max() + 1))
    pixels = torch.from_numpy(images)[:, None]
    return Source(name, split, classes=classes, labels=labels, pixels=pixels, flip_safe=False)


def _cut(whole: Source, names: Sequence[str]) -> dict[str, Source]:
    """A tenth of the images for each name; the rest is train."""
    mixed, tenth = permutation(0, 0, len(whole), "study split"), max(1, len(whole) // 10)
    cuts = np.split(mixed, [tenth * (i + 1) for i in range(len(names))])
    return {name: whole.take(np.sort(rows)) for name, rows in zip((*names, "train"), cuts, strict=True)}


def _in_memory(source: Source, side: int, most: int) -> Source:
    source = source.take(np.sort(permutation(0, 0, len(source), "study")[:most]))
    pre = Preprocessing(size=(side, side))
    if source.pixels is not None:
        return replace(source, pixels=read_pixels(source.pixels, pre, source.channels))
    batches = list(Loader(source, pre, 256))
    rows = torch.cat([batch.indices for batch in batches]).numpy()  # those that could be read
    return replace(source.take(rows), pixels=torch.cat([batch.images for batch in batches]), blocks=None)
