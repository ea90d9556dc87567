"""From a list of sample numbers to the tensors of one batch: what a loading process does.

Nothing here knows about epochs' order, ranks or processes; it can be pickled and run anywhere. A sample
that cannot be read is replaced by another of its class, chosen by its number alone, and reported.

Shapes: B samples, C channels, H x W pixels of the model's input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vitkit.data.augment import Augment, crop_kind, random_box
from vitkit.data.badfiles import BadFile
from vitkit.data.decode import BadPicture
from vitkit.data.keys import Keys, sample_keys, uniforms
from vitkit.data.order import Order
from vitkit.data.preprocess import RESAMPLING, prepare, prepare_pixels, resize, to_tensor
from vitkit.data.source import Source
from vitkit.data.vary import crop_and_flip, shift_and_flip, vary
from vitkit.errors import DataError
from vitkit.model.config import Preprocessing


@dataclass
class Batch:
    """One rank's part of a batch.

    images   uint8 (B, C, H, W); `preprocess.normalise` makes floats of them on the model's device
    labels   int64 (B,), or float (B, classes) when a picture may have several
    indices  int64 (B,), the samples that were asked for (a bad one's replacement keeps its number)
    keys     the samples' randomness, for `targets.mix`
    bad      files that could not be read
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    keys: Keys
    bad: list[BadFile] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.indices)


class Samples:
    """Makes batches of one source, for evaluation (`augment` None) or for training."""

    def __init__(
        self,
        source: Source,
        pre: Preprocessing,
        augment: Augment | None = None,
        seed: int = 0,
        channels: int | None = None,
    ) -> None:
        self.source, self.pre, self.augment, self.seed = source, pre, augment, seed
        self.channels = channels or source.channels
        self.crop = crop_kind(augment, pre.size) if augment else "none"
        self.pixels: Tensor | None = None
        if source.pixels is not None:
            self.pixels = match_channels(source.pixels, self.channels, source.name)
            if self.crop != "resized":
                self.pixels = prepare_pixels(self.pixels, pre)

    def load(self, epoch: int, order: Order) -> Batch:
        with one_thread():
            return self._load(epoch, order)

    def _load(self, epoch: int, order: Order) -> Batch:
        keys = sample_keys(self.seed, epoch, order.indices, order.repeats)
        bad: list[BadFile] = []
        if self.pixels is not None:
            used = order.indices
            images = self._from_memory(order.indices, keys)
        else:
            images, used = self._from_files(order.indices, keys, bad)
        labels = torch.from_numpy(self.source.labels[used])
        return Batch(
            images=images,
            labels=labels.float() if self.source.multi_label else labels,
            indices=torch.from_numpy(np.array(order.indices)),
            keys=keys,
            bad=bad,
        )

    def _from_memory(self, indices: np.ndarray, keys: Keys) -> Tensor:
        assert self.pixels is not None
        images = self.pixels.index_select(0, torch.from_numpy(np.array(indices)))
        if self.augment is None or not len(indices):
            return images
        return vary(crop_and_flip(images, keys, self.augment, self.pre.size), keys, self.augment)

    def _from_files(self, indices: np.ndarray, keys: Keys, bad: list[BadFile]) -> tuple[Tensor, np.ndarray]:
        images = torch.empty((len(indices), self.channels, *self.pre.size), dtype=torch.uint8)
        used = np.array(indices)
        draws = uniforms(keys, "crop", 40) if self.crop == "resized" else [None] * len(indices)
        for row, index in enumerate(indices):
            images[row], used[row] = self._readable(int(index), draws[row], bad)
        if self.augment is None or not len(indices):
            return images, used
        images = shift_and_flip(images, keys, self.augment, shift=self.crop == "pad")
        return vary(images, keys, self.augment), used

    def _readable(self, index: int, draws: np.ndarray | None, bad: list[BadFile]) -> tuple[Tensor, int]:
        """The pixels of a sample, or of the first readable one of its class in an order of its own."""
        for candidate in self._candidates(index):
            try:
                return self._pixels(candidate, draws), candidate
            except BadPicture as e:
                where = self.source.where(candidate)
                bad.append(BadFile(where, self.source.label_name(candidate), e.reason))
        first = "\n".join(f"  {b.path}: {b.reason}" for b in bad[:3])
        raise DataError(
            f"no picture of the class {self.source.label_name(index)!r} in {self.source.name} can be read:\n{first}\n"
            f"Repair them or remove the class; `vitkit data check` lists everything that is wrong"
        )

    def _candidates(self, index: int) -> Iterator[int]:
        yield index
        kin = self.source.kin(index)
        start = int(sample_keys(0, 0, [index])[0] % np.uint64(len(kin)))
        for other in np.roll(kin, -start):
            if other != index:
                yield int(other)

    def _pixels(self, index: int, draws: np.ndarray | None) -> Tensor:
        """uint8 (C, H, W) at the model's size."""
        if draws is None or self.augment is None:
            picture = self.source.picture(index, self.channels)
            return to_tensor(picture if self.source.prepared else prepare(picture, self.pre))
        return self._random_crop(index, draws, self.augment)

    def _random_crop(self, index: int, draws: np.ndarray, augment: Augment) -> Tensor:
        """RandomResizedCrop; a large JPEG is decoded only as finely as the crop needs."""
        height, width = self.pre.size
        chosen: dict[str, tuple[int, ...]] = {}

        def needed(w: int, h: int) -> tuple[int, int]:
            left, top, right, bottom = random_box(draws, w, h, augment)
            chosen.update(size=(w, h), box=(left, top, right, bottom))
            return math.ceil(w * width / (right - left)), math.ceil(h * height / (bottom - top))

        view = self.source.view(index)
        if view is not None:
            left, top, right, bottom = random_box(draws, view.shape[1], view.shape[0], augment)
            return resize(view[top:bottom, left:right], self.pre)
        picture = self.source.picture(index, self.channels, needed)
        if "box" not in chosen:
            needed(*picture.size)
        left, top, right, bottom = chosen["box"]
        if picture.size == chosen["size"]:
            return resize(np.array(picture.crop((left, top, right, bottom))), self.pre)
        x, y = (got / full for got, full in zip(picture.size, chosen["size"], strict=True))
        box = left * x, top * y, min(right * x, picture.width), min(bottom * y, picture.height)  # between pixels
        return to_tensor(picture.resize((width, height), RESAMPLING[self.pre.interpolation], box=box))


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch with one thread: the steps here are so small that waking others costs more than they do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def match_channels(pixels: Tensor, channels: int, name: str) -> Tensor:
    """(N, C, H, W) with the wanted number of channels: grey is repeated, colour is weighed into grey."""
    have = pixels.shape[1]
    if have == channels:
        return pixels
    if have == 1:
        return pixels.expand(-1, channels, -1, -1)
    if have == 3 and channels == 1:
        from vitkit.data.operations import grey

        return grey(pixels).to(torch.uint8)
    raise DataError(f"{name} has {have} channels and the model wants {channels}; make a model with channels={have}")
