"""What a report is about, and one section of it: what was found, the arrays behind it, and how it is drawn.

Images are as the model sees them: read, resized and cut by its own preprocessing. An image that cannot be read is
left out and named, with the reason; the others are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from vitkit.data.decode import BadImage
from vitkit.data.given import GivenImages, OneImage, is_image_url, listed, open_inputs
from vitkit.data.loader import ImageBatches
from vitkit.data.preprocess import normalise, read_image
from vitkit.data.sources import open_data
from vitkit.errors import ConfigError, DataError
from vitkit.explanation.inside import as_vit, predictions
from vitkit.figures.overlay import enlarged
from vitkit.figures.style import Figure
from vitkit.model.build import Model
from vitkit.model.config import AnyConfig, Size
from vitkit.model.vit import ViT
from vitkit.tasks.match import map_classes, matched

T = TypeVar("T")


@dataclass(frozen=True)
class Images:
    names: list[str]
    pixels: Tensor  # uint8 B C H W: what the model sees, before normalising
    images: Tensor  # float B C H W: the model's input
    labels: np.ndarray | None = None  # B: true classes, by the model's outputs, where known
    no_labels: str = ""  # why the labels of the set cannot be used
    matched_by: str = ""  # how its classes were matched with the model's, where not by name
    skipped: list[tuple[str, str]] = field(default_factory=list)  # name and reason
    class_names: tuple[str, ...] | None = None  # of the set, for a model that has no names

    def __len__(self) -> int:
        return len(self.names)

    def first(self, count: int) -> Images:
        names, pixels, images = self.names[:count], self.pixels[:count], self.images[:count]
        return replace(self, names=names, pixels=pixels, images=images, labels=None)

    def shown(self, which: Sequence[int] | None = None) -> list[np.ndarray]:
        """H W 3 uint8 each, as large as they are drawn; grey images become RGB, other channels are averaged."""
        pixels = self.pixels if which is None else self.pixels[which]
        pixels = pixels if pixels.shape[1] == 3 else pixels.float().mean(dim=1, keepdim=True)
        rgb = pixels.to(torch.uint8).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
        return [enlarged(image) for image in rgb]


def load_images(given: GivenImages, config: AnyConfig) -> Images:
    """Read images for this model. Folders give the files in them; what cannot be read is listed."""
    names, read, skipped, items = [], [], [], [one for item in listed(given) for one in _files(item)]
    for item in items:
        handed = None if isinstance(item, Path) else open_inputs(item)
        name = str(item) if handed is None else handed.where(0)
        try:
            if handed is None:
                read.append(read_image(name, config.preprocessing, config.channels))
            else:
                read.append(handed.pixels_of(0, config.preprocessing, config.channels))
            names.append(Path(name).name)
        except BadImage as e:
            there = not isinstance(item, Path) or item.exists()
            skipped.append((name, e.reason if there else "there is no such file"))
    if items and not read:
        first = f": {skipped[0][0]}: {skipped[0][1]}" if skipped else ""
        raise DataError(f"none of the images given can be read{first}; give others")
    pixels = torch.stack(read) if read else torch.empty((0, config.channels, *config.image_size), dtype=torch.uint8)
    return Images(names, pixels, normalise(pixels, config.preprocessing), skipped=skipped)


def _files(item: OneImage) -> list[OneImage]:
    """The files of a folder; paths and what is no path as they are."""
    if not isinstance(item, str | Path) or is_image_url(item):
        return [item]
    path = Path(item)
    return [*sorted(filter(Path.is_file, path.glob("[!.]*")))] if path.is_dir() else [path]


def sample_data(data: str, model: Model, count: int = 200, class_map: Mapping[str, str] | None = None) -> Images:
    """Up to `count` images of a set's evaluation split, spread over its classes, read as `evaluate` reads them."""
    source = map_classes(model, open_data(data).evaluation(), class_map or {})
    picks = [m[np.linspace(0, len(m) - 1, min(count, len(m))).astype(int)] for m in source.members if len(m)]
    turns = [int(m[turn]) for turn in range(count) for m in picks if turn < len(m)]  # one of each class in turn
    (batch,) = ImageBatches(source, model.config).batches([turns[:count]])
    names = [Path(source.where(i)).name for i in batch.indices]
    skipped = [(source.where(i), reason) for i, reason in batch.bad.items()]
    images = Images(names, batch.images, normalise(batch.images, model.config.preprocessing), skipped=skipped)
    labels = source.labels[batch.indices]
    if source.label_kind != "classes" or model.outputs.kind != "classes":
        return replace(images, no_labels="labels are compared where each image has one class; see `vitkit evaluate`")
    if not model.config.classes:
        return replace(images, no_labels="the model has no classifier (classes=0)")
    try:
        columns, note = matched(model, source)
    except ConfigError as e:
        return replace(images, no_labels=str(e))
    labels = labels if columns is None else columns[labels]
    return replace(images, labels=labels, matched_by=note, class_names=source.classes)


@dataclass
class Subject:
    name: str
    model: Model
    images: Images  # looked at one by one
    sample: Images  # for statistics
    class_names: Sequence[str] | None = None
    classes: Sequence[int] | None = None  # the classes to explain; None: the two likeliest of each image
    query: Size | None = None
    run: Path | None = None
    warnings: list[str] = field(default_factory=list)
    _made: dict[object, object] = field(default_factory=dict, repr=False)

    def class_name(self, index: int) -> str:
        if self.class_names is None:
            return f"{'value' if self.predicts_values else 'class'} {index}"
        return self.class_names[index].split(",")[0]

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """Name and reason of each image that could not be read."""
        return list(dict([*self.images.skipped, *self.sample.skipped]).items())

    @property
    def vit(self) -> ViT:
        """For figures of what a CNN has not."""
        return as_vit(self.model)

    @property
    def predicts_values(self) -> bool:
        """Regression: outputs are numbers, not probabilities."""
        return self.model.outputs.kind == "values"

    def need_images(self) -> None:
        if not len(self.images):
            raise LeftOut("it needs images: name some after the model, or give a set with --data")

    def need_classifier(self) -> None:
        self.need_images()
        if not self.model.classifiers:
            raise LeftOut("the model has no classifier (classes=0), so there is no class to explain")
        if not self.model.classifiers[0].weight.any():
            raise LeftOut("the classifier is all zeros, so every class has the same score; train the model first")

    @cached_property
    def predicted(self) -> Tensor:
        """B outputs: probabilities, or values."""
        return predictions(self.model, self.images.images)

    @cached_property
    def explained(self) -> Tensor:
        """B K: the outputs that are explained, for each image."""
        most = min(2, self.model.config.classes)
        if self.classes is not None or self.predicts_values:
            return torch.tensor([list(self.classes or range(most))] * len(self.images))
        return self.predicted.topk(most, dim=1).indices

    def prediction(self, image: int, output: int) -> str:
        """cat: 93%, or age: 31.4"""
        number = float(self.predicted[image, output])
        return f"{self.class_name(output)}: {f'{number:.3g}' if self.predicts_values else f'{number:.0%}'}"

    def once(self, make: Callable[[Subject], T]) -> T:
        """What `make` computes of this subject, kept for the figures that share it."""
        if make not in self._made:
            self._made[make] = make(self)
        return cast("T", self._made[make])


class LeftOut(Exception):
    """A figure that cannot be made for this model or these images; the message says why and what would help."""


class Column(NamedTuple):  # of a section's table
    heading: str
    lower_is_better: bool
    digits: int


@dataclass(frozen=True)
class Section:
    heading: str
    finding: str  # one sentence with numbers: the title of the figure
    alt: str  # what is to be seen, for those who cannot see it
    how: str  # how to read it and how it was made
    arrays: Mapping[str, np.ndarray]
    draw: Callable[[], Figure]
    table: Sequence[Mapping[str, float | str]] = ()  # the first entry of each row names it
    columns: Mapping[str, Column] = field(default_factory=dict)  # of the table, those that the page shows
    name: str = ""  # of its files: that of its row in the table of figures
