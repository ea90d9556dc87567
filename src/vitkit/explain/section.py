"""One section of the report: what was found, the arrays behind it, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import InputError, did_you_mean
from vitkit.explain.attention import OutputAttention, output_attention
from vitkit.explain.inside import probabilities
from vitkit.explain.occlusion import Occlusion, occlusion_map
from vitkit.explain.pictures import Pictures
from vitkit.explain.relevance import ClassRelevance, class_relevance
from vitkit.model.config import Size
from vitkit.model.vit import ViT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class LeftOut(Exception):
    """A figure that cannot be made for this model or these pictures; the message says why and what would help."""


@dataclass(frozen=True)
class Section:
    name: str  # of its files
    heading: str
    finding: str  # one sentence with numbers: the title of the figure
    alt: str  # what is to be seen, for those who cannot see it
    how: str  # how to read it and how it was made
    arrays: Mapping[str, np.ndarray]
    draw: Callable[[], Figure]
    table: Sequence[Mapping[str, Any]] | None = None


@dataclass
class Subject:
    """What a report is about. Arrays that several sections need are made once, when first asked for."""

    name: str
    model: ViT
    pictures: Pictures  # looked at one by one
    sample: Pictures  # for statistics
    class_names: Sequence[str] | None = None
    classes: Sequence[int] | None = None  # the classes to explain; None: the two likeliest of each picture
    query: Size | None = None
    run: Path | None = None
    warnings: list[str] = field(default_factory=list)

    def class_name(self, index: int) -> str:
        name = f"class {index}" if self.class_names is None else str(self.class_names[index])
        return name.split(",")[0]

    @property
    def grid(self) -> Size:
        return self.model.config.grid

    def need_pictures(self) -> None:
        if not len(self.pictures):
            raise LeftOut("it needs pictures: name some after the model, or give a set with --data")

    @property
    def has_classifier(self) -> bool:
        """Whether there is one, and it has learned something: a fresh one is all zeros."""
        classifier = self.model.head.classifier
        return classifier is not None and bool(classifier.weight.any())

    def need_classifier(self) -> None:
        self.need_pictures()
        if self.model.head.classifier is None:
            raise LeftOut("the model has no classifier (classes=0), so there is no class to explain")
        if not self.has_classifier:
            raise LeftOut("the classifier is all zeros, so every class has the same score; train the model first")

    @cached_property
    def probability(self) -> Tensor:
        return probabilities(self.model, self.pictures.images)

    @cached_property
    def explained(self) -> Tensor:
        """B K: the classes that are explained, for each picture."""
        if self.classes is not None:
            return torch.tensor([list(self.classes)] * len(self.pictures))
        return self.probability.topk(min(2, self.model.config.classes), dim=1).indices

    @cached_property
    def attention(self) -> OutputAttention:
        self.need_pictures()
        return output_attention(self.model, self.pictures.images)

    @cached_property
    def relevance(self) -> ClassRelevance:
        self.need_classifier()
        return class_relevance(self.model, self.pictures.images, self.explained)

    @cached_property
    def occluded(self) -> Occlusion:
        self.need_classifier()
        return occlusion_map(self.model, self.pictures.images, self.explained[:, 0])

    @cached_property
    def query_patch(self) -> Size:
        """The patch of the query view: the one asked for, else the one that matters most in the first picture."""
        if self.query is not None:
            return self.query
        weights = self.attention.rollout[0]
        row, column = np.unravel_index(int(weights.argmax()), weights.shape)
        return int(row), int(column)


def find_class(word: str, class_names: Sequence[str] | None, count: int) -> int:
    """A class by its number, its name, or one of the synonyms in its name ("tabby, tabby cat")."""
    if word.lstrip("-").isdigit():
        if 0 <= int(word) < count:
            return int(word)
        raise InputError(f"class {word} does not exist; the model has classes 0 to {count - 1}")
    known: dict[str, int] = {}
    for index, name in enumerate(class_names or ()):
        for synonym in (name, *str(name).split(",")):
            known.setdefault(str(synonym).strip().lower(), index)
    if word.lower() in known:
        return known[word.lower()]
    if not known:
        raise InputError(f"the model has no class names, so {word!r} is unknown; give a number from 0 to {count - 1}")
    hint = did_you_mean(word.lower(), known)
    raise InputError(f"no class is called {word!r}.{hint} Give a name of the model's {count} classes, or a number")
