"""The same pictures through a model and through what was made of it: how far apart are they?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.data import Source, normalise
from vitkit.data.order import Order
from vitkit.data.preprocess import prepare_pixels
from vitkit.data.samples import Samples
from vitkit.errors import ConfigError, DataError
from vitkit.evaluate.classes import columns_of
from vitkit.evaluate.run import evaluation_loader
from vitkit.model.config import AnyConfig
from vitkit.runtime.base import Runtime
from vitkit.runtime.eager import Eager
from vitkit.runtime.example import made_up

TOLERANCE = 1e-4  # of a probability, in fp32
_ROUNDING = 0.5  # of the spread of the logits: more than that is no rounding


@dataclass(frozen=True)
class Pictures:
    """What is compared on: uint8 (N, C, H, W) as prepared, with labels where they are known."""

    pixels: Tensor
    labels: Tensor | None = None
    name: str = "made-up pictures"

    def __len__(self) -> int:
        return len(self.pixels)

    def batches(self, config: AnyConfig, size: int) -> Iterator[Tensor]:
        for part in self.pixels.split(size):
            yield normalise(part, config.preprocessing)


def pictures_of(
    source: Source | None, config: AnyConfig, count: int, raw: bool = False, model: nn.Module | None = None
) -> Pictures:
    """Up to `count` readable pictures spread evenly over a set; made-up ones when there is no set.

    With `model` they have labels, as numbers of its classes, where the set is about the same classes.
    """
    if source is None:
        height, width = config.preprocessing.size
        return Pictures(made_up(config, count, (height * 5 // 4, width * 3 // 2) if raw else None))
    numbers = torch.linspace(0, len(source) - 1, min(count, len(source))).long().tolist()
    own = _own_classes(source, model) if not source.multi_label else None
    if source.pixels is not None:
        pixels = Samples(source, config.preprocessing, channels=config.channels).pixels
        assert pixels is not None
        labels = None if own is None else own[torch.from_numpy(source.labels[numbers])]
        return Pictures(pixels[numbers], labels, source.name)
    with evaluation_loader(source, config) as loader:
        batch = loader.samples.load(0, Order(np.array(numbers), np.zeros(len(numbers), dtype=np.int64)))
    if not len(batch):
        raise DataError(f"no picture of {source.name} can be read; `vitkit data check` says why")
    return Pictures(batch.images, None if own is None else own[batch.labels], source.name)


def _own_classes(source: Source, model: nn.Module | None) -> Tensor | None:
    """The model's number of each class of the set; None where the set is not about the model's classes."""
    if model is None:
        return None
    try:
        columns = columns_of(model, source)
    except ConfigError:
        return None
    return torch.arange(len(source.classes)) if columns is None else torch.from_numpy(columns)


@dataclass(frozen=True)
class Check:
    """How a runtime compares with the model on so many pictures."""

    pictures: int
    name: str
    difference: float  # the largest, of a probability (of an output, without a classifier)
    spread: float  # root mean square difference of the logits, over that of the logits themselves
    agreement: float  # share of pictures with the same first class
    accuracy: float | None = None  # of the runtime, where labels are known
    accuracy_before: float | None = None
    exact: bool = True
    classifies: bool = True

    def insist(self, what: Path | str) -> None:
        """An error when the difference cannot be rounding."""
        if self.exact and (self.difference > TOLERANCE or self.agreement < 1):
            raise ConfigError(
                f"{what} differs from the model by {self.difference:.1e} in a probability, and agrees on "
                f"{self.agreement:.1%} of {self.pictures} pictures; nothing was kept. Choose another format"
            )
        if not self.exact and not self.spread < _ROUNDING:
            raise ConfigError(
                f"{what} differs from the model by {self.spread:.0%} of what its answers differ by, and agrees on "
                f"{self.agreement:.1%} of {self.pictures} pictures; nothing was kept. "
                f"Try --calibrate DATA, a smaller --merge, or fp32"
            )


def compare(
    model: nn.Module, runtime: Runtime, pictures: Pictures, raw: bool = False, exact: bool = True, batch: int = 7
) -> Check:
    """`batch` is odd, and the last one smaller: a batch size that was baked in shows.

    With `raw` the pictures are taken as they would come from a file, and prepared on both sides.
    """
    config: AnyConfig = model.config  # type: ignore[assignment]
    eager = Eager(model)
    theirs, ours = [], []
    for pixels in pictures.pixels.split(batch):
        images = normalise(prepare_pixels(pixels, config.preprocessing) if raw else pixels, config.preprocessing)
        ours.append(eager.run(images))
        theirs.append(runtime.run(pixels.permute(0, 2, 3, 1).contiguous() if raw else images))
    return judge(torch.cat(ours), torch.cat(theirs), pictures, config.classes > 0, exact)


def judge(ours: Tensor, theirs: Tensor, pictures: Pictures, classifies: bool, exact: bool) -> Check:
    """Logits of the model and of a runtime -> their comparison."""
    a, b = (ours.softmax(-1), theirs.softmax(-1)) if classifies else (ours, theirs)
    level = (ours - ours.mean(dim=-1, keepdim=True)).square().mean().sqrt().clamp(min=1e-12)
    same = ours.argmax(-1) == theirs.argmax(-1)
    if exact:  # two classes with the same probability have no order
        first = a.max(dim=-1).values
        same |= first - a.gather(-1, theirs.argmax(-1, keepdim=True))[..., 0] < TOLERANCE
    labels = pictures.labels
    return Check(
        pictures=len(pictures),
        name=pictures.name,
        difference=float((a - b).abs().max()),
        spread=float((ours - theirs).square().mean().sqrt() / level),
        agreement=float(same.double().mean()),
        accuracy=None if labels is None else float((theirs.argmax(-1) == labels).double().mean()),
        accuracy_before=None if labels is None else float((ours.argmax(-1) == labels).double().mean()),
        exact=exact,
        classifies=classifies,
    )
