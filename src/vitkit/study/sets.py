"""The pictures of a study: train, val and test in memory, small and square.

Whatever DATA is, its pictures become uint8 of 8, 28 or 32 pixels a side, so that a training takes seconds
and every study can be tried on every set. Shares of the training pictures are nested: those of 1/32
are among those of 1/8, and so on.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data import Loader, Source, open_data
from vitkit.data.keys import permutation
from vitkit.data.packed import Names
from vitkit.data.preprocess import prepare_pixels
from vitkit.data.source import PixelSource
from vitkit.errors import ConfigError, DataError
from vitkit.model.config import Preprocessing
from vitkit.train.recipe import picture_size

SIDES = (8, 28, 32)  # digits; mnist and its relatives; all others
MOST = {"train": 60_000, "val": 2_000, "test": 10_000}  # pictures that are used, at most


@dataclass(frozen=True)
class Sets:
    name: str
    side: int
    train: PixelSource
    val: PixelSource
    test: PixelSource

    @property
    def channels(self) -> int:
        return self.train.channels

    @property
    def classes(self) -> int:
        return len(self.train.classes)

    def about(self) -> dict[str, Any]:
        """What tells one set of pictures from another."""
        labels = np.concatenate([s.labels for s in (self.train, self.val, self.test)])
        sizes = {"train": len(self.train), "val": len(self.val), "test": len(self.test)}
        return {"name": self.name, "side": self.side, **sizes, "check": zlib.crc32(labels.astype(np.int64).tobytes())}

    def part(self, share: float, seed: int) -> PixelSource:
        """A random share of the training pictures, another one for every seed."""
        if share >= 1:
            return self.train
        count = max(self.classes, round(share * len(self.train)))
        return _chosen(self.train, np.sort(permutation(seed, 0, len(self.train), "study")[:count]))


@lru_cache(maxsize=16)
def resized(source: PixelSource, side: int) -> PixelSource:
    """The same pictures at another size."""
    pixels = prepare_pixels(source.pixels, Preprocessing(size=(side, side)))
    return source if pixels is source.pixels else _source(source, pixels, source.labels)


@lru_cache(maxsize=2)
def open_sets(data: str) -> Sets:
    """The three parts. A set without test pictures is judged on val, and val is taken out of train."""
    train = open_data(data, "train")
    if train.multi_label:
        raise ConfigError(f"{data} has several labels per picture; studies need one: give --data another set")
    side = next((s for s in SIDES if max(picture_size(train)) <= s), SIDES[-1])
    has_test, has_val = train.splits.get("test"), train.splits.get("val")
    parts: dict[str, PixelSource] = {}
    if not has_test or not has_val:
        whole = _in_memory(train, side, MOST["train"])
        mixed = permutation(0, 0, len(whole), "study split")
        tenth = max(1, len(whole) // 10)
        cut = {"val": mixed[:tenth], "test": mixed[tenth : 2 * tenth], "train": mixed[2 * tenth :]}
        parts = {name: _chosen(whole, np.sort(rows)) for name, rows in cut.items()}
        if has_test or has_val:  # one of the two is there: it is what the study is judged on
            known = "test" if has_test else "val"
            parts["train"] = _chosen(whole, np.sort(mixed[tenth:]))
            parts["test"] = _in_memory(open_data(data, known), side, MOST["test"])
    else:
        for name in ("train", "val", "test"):
            source = train if name == "train" else open_data(data, name)
            parts[name] = _in_memory(source, side, MOST[name])
    if len(parts["train"]) < 2 * len(train.classes):
        raise DataError(f"{data} has {len(parts['train'])} training pictures, too few for a study; give a larger set")
    return Sets(data, side, parts["train"], parts["val"], parts["test"])


def _in_memory(source: Source, side: int, most: int) -> PixelSource:
    rows = np.sort(permutation(0, 0, len(source), "study")[:most])
    if source.pixels is not None:
        pixels = prepare_pixels(source.pixels[torch.from_numpy(rows)], Preprocessing(size=(side, side)))
        return _source(source, pixels, source.labels[rows])
    wanted = set(rows.tolist())
    images, labels = [], []
    for batch in Loader(source, Preprocessing(size=(side, side)), 256):
        keep = torch.tensor([i in wanted for i in batch.indices.tolist()])
        images.append(batch.images[keep])
        labels.append(batch.labels[keep])
    return _source(source, torch.cat(images), torch.cat(labels).numpy())


def _chosen(source: PixelSource, rows: np.ndarray) -> PixelSource:
    return _source(source, source.pixels[torch.from_numpy(rows)], source.labels[rows])


def _source(like: Source, pixels: Tensor, labels: np.ndarray) -> PixelSource:
    made = PixelSource(
        pixels=pixels.numpy(),
        name=like.name,
        split=like.split,
        splits=like.splits,
        classes=like.classes,
        labels=labels,
        names=Names(),
    )
    made.mirrors = like.mirrors
    return made
