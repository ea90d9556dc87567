"""From the numbers of samples to the tensors of one batch, as a loading process makes them.

`Samples` knows nothing of ranks; it can be pickled and run anywhere. A sample that cannot be read is replaced by
another of its class, chosen by its number alone, and reported.

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
from vitkit.data.decode import BadImage
from vitkit.data.keys import Keys, sample_keys, uniforms
from vitkit.data.order import Order
from vitkit.data.preprocess import RESAMPLING, match_channels, prepare_pixels, resize, to_tensor
from vitkit.data.source import Source
from vitkit.data.vary import crop_and_flip, shift_and_flip, vary
from vitkit.errors import DataError
from vitkit.model.config import Preprocessing

_PREPARED = 1 << 30  # bytes of images in memory that are enlarged once; more are enlarged batch by batch


@dataclass
class Batch:
    """One rank's part of a batch."""

    images: Tensor  # uint8 (B, C, H, W); `normalise` makes floats of them on the model's device
    labels: Tensor  # int64 (B,); float (B, classes) when an image may have several; float (B, T) values
    indices: Tensor  # int64 (B,), the samples that were asked for (a bad one's replacement keeps its number)
    keys: Keys  # the samples' randomness, for `mix`
    bad: list[BadFile] = field(default_factory=list)  # files that could not be read

    def __len__(self) -> int:
        return len(self.indices)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch with one thread: the steps here are so small that waking others costs more than they do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Samples:
    """Makes batches of one source, for evaluation (`augment` None) or for training."""

    def __init__(
        self,
        source: Source,
        pre: Preprocessing,
        augment: Augment | None = None,
        seed: int = 0,
        channels: int | None = None,
        replace_bad: bool = True,
    ) -> None:
        self.source, self.pre, self.augment, self.seed = source, pre, augment, seed
        self.channels, self.replace_bad = channels or source.channels, replace_bad
        self.views = 0  # that augmentation makes of an image, one after the other; 0: a new one in every epoch
        self.crop = crop_kind(augment, pre.size) if augment else "none"
        self.pixels: Tensor | None = None
        if source.pixels is not None:
            self.pixels = match_channels(source.pixels, self.channels)
            self.prepare_late = len(source) * self.channels * math.prod(pre.size) > _PREPARED
            if self.crop != "resized" and not self.prepare_late:
                self.pixels = prepare_pixels(self.pixels, pre)

    @one_thread()
    def load(self, epoch: int, order: Order) -> Batch:
        keys, bad = self.keys(epoch, order), list[BadFile]()
        if self.pixels is not None:
            images, used = self.pixels.index_select(0, torch.from_numpy(np.array(order.indices))), order.indices
            if self.crop != "resized" and self.prepare_late:
                images = prepare_pixels(images, self.pre)
        else:
            images, used = self._from_files(order.indices, keys, bad)
        if self.augment is not None and len(keys):
            if self.pixels is not None:
                images = crop_and_flip(images, keys, self.augment, self.pre.size)
            else:
                images = shift_and_flip(images, keys, self.augment, shift=self.crop == "pad")
            images = vary(images, keys, self.augment)
        kept = used >= 0
        if not kept.all():
            images, keys = images[torch.from_numpy(kept)], keys[kept]
        labels = torch.from_numpy(self.source.labels[used[kept]])
        labels = labels.float() if self.source.multi_label else labels
        return Batch(images, labels, torch.from_numpy(order.indices[kept]), keys, bad)

    def keys(self, epoch: int, order: Order) -> Keys:
        if self.views:
            return sample_keys(self.seed, epoch % self.views, order.indices)
        return sample_keys(self.seed, epoch, order.indices, order.repeats)

    def _from_files(self, indices: np.ndarray, keys: Keys, bad: list[BadFile]) -> tuple[Tensor, np.ndarray]:
        """The images, and the samples they are of; -1 where an image is left out."""
        images = torch.empty((len(indices), self.channels, *self.pre.size), dtype=torch.uint8)
        used = np.full(len(indices), -1, dtype=np.int64)
        draws = uniforms(keys, "crop", 40) if self.crop == "resized" else [None] * len(indices)
        for row, index in enumerate(indices.tolist()):
            if found := self._readable(index, draws[row], bad):
                images[row], used[row] = found
        return images, used

    def _readable(self, index: int, draws: np.ndarray | None, bad: list[BadFile]) -> tuple[Tensor, int] | None:
        """The sample, or the first readable one of its class in an order of its own; None when it is left out."""
        for candidate in self.candidates(index):
            try:
                if draws is None or self.augment is None:
                    return self.source.pixels_of(candidate, self.pre, self.channels), candidate
                return self._read_crop(candidate, draws, self.augment), candidate
            except BadImage as e:
                bad.append(BadFile(self.source.where(candidate), self.source.label_name(candidate), e.reason))
        if not self.replace_bad:
            return None
        raise self.nothing_like(index, bad)

    def nothing_like(self, index: int, bad: list[BadFile]) -> DataError:
        first = "\n".join(f"  {b.path}: {b.reason}" for b in bad[:3])
        return DataError(
            f"no image of the class {self.source.label_name(index)!r} in {self.source.name} can be read:\n{first}\n"
            f"Repair them or remove the class; `vitkit data check` lists everything that is wrong"
        )

    def _read_crop(self, index: int, draws: np.ndarray, augment: Augment) -> Tensor:
        """RandomResizedCrop; a large JPEG is decoded only as finely as the crop needs."""
        view = self.source.view(index)
        if view is not None:
            left, top, right, bottom = random_box(draws, view.shape[1], view.shape[0], augment)
            return resize(view[top:bottom, left:right], self.pre)
        height, width = self.pre.size
        whole, box = (0, 0), (0, 0, 0, 0)

        def needed(w: int, h: int) -> tuple[int, int]:
            nonlocal whole, box
            whole, box = (w, h), random_box(draws, w, h, augment)
            return math.ceil(w * width / (box[2] - box[0])), math.ceil(h * height / (box[3] - box[1]))

        image = self.source.image(index, self.channels, needed)
        if not any(whole):  # not a JPEG
            needed(*image.size)
        if image.size == whole:
            return resize(np.array(image.crop(box)), self.pre)
        x, y = image.width / whole[0], image.height / whole[1]
        between = box[0] * x, box[1] * y, min(box[2] * x, image.width), min(box[3] * y, image.height)  # between pixels
        return to_tensor(image.resize((width, height), RESAMPLING[self.pre.interpolation], box=between))

    def candidates(self, index: int) -> Iterator[int]:
        """The sample, then where it is replaced the others of its class."""
        yield index
        if self.replace_bad:
            same = self.source.members[self.source.groups[index]]
            start = int(sample_keys(0, 0, [index])[0] % np.uint64(len(same)))
            yield from (int(other) for other in np.roll(same, -start) if other != index)
