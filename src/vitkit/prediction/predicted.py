"""Predictions as Python and notebooks want them: `.label`, `.probability`, `.top(5)`, the image beside them.

A `Prediction` is also the row that `predict --out` writes: `prediction["class"]`, `dict(prediction)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property

import numpy as np
from PIL import Image
from torch import Tensor

from vitkit.data import BadImage, ImageBatches, Source, normalise
from vitkit.display import Grid, Part, Shown, drawing
from vitkit.errors import InputError, as_text
from vitkit.prediction.job import batch_size_for, cut
from vitkit.prediction.opened import Opened
from vitkit.prediction.tables import Row

_SHOWN = 20  # predictions of a long list that a notebook shows


class Prediction(Shown, Mapping[str, "str | float | np.ndarray | None"]):
    """What a model says about one image."""

    def __init__(self, opened: Opened, source: Source, index: int, output: Tensor | None, error: str | None) -> None:
        self.path = as_text(source.where(index))  # or URL, or number among those given
        self.error = error  # why the image could not be read; None: it could
        self._opened, self._source, self._index, self._output = opened, source, index, output

    # --- the row -------------------------------------------------------------------------------------

    @cached_property
    def row(self) -> Row:
        task, empty = self._opened.task, dict.fromkeys(self._opened.columns)
        found = {} if self._output is None else task.rows(self._output[None], self._opened.top)[0]
        return {**empty, "path": self.path, **found, "error": self.error}

    def __getitem__(self, column: str) -> str | float | np.ndarray | None:
        return self.row[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self.row)

    def __len__(self) -> int:
        return len(self.row)

    # --- the same in words -----------------------------------------------------------------------------

    @cached_property
    def probabilities(self) -> np.ndarray:
        """Of every class, in the order of `model.class_names`."""
        if self.is_values:
            raise InputError("the model predicts values, not classes; see `.value` and `.values_by_name`")
        return self._activated.float().numpy()

    @property
    def values_by_name(self) -> dict[str, float]:
        """What a regression predicts, in its own units."""
        if not self.is_values:
            raise InputError("the model predicts classes, not values; see `.label` and `.probability`")
        return dict(zip(self._opened.task.names, self._activated.tolist(), strict=True))

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        """The likeliest classes with their probabilities, the likeliest first."""
        best, names = np.argsort(-self.probabilities, kind="stable")[:count], self._opened.task.names
        return [(names[i], float(self.probabilities[i])) for i in best]

    @property
    def label(self) -> str:
        """The likeliest class."""
        return self.top(1)[0][0]

    @property
    def probability(self) -> float:
        """Of the likeliest class."""
        return self.top(1)[0][1]

    @property
    def value(self) -> float:
        """The only one that a regression predicts, or the first."""
        return next(iter(self.values_by_name.values()))

    @property
    def is_values(self) -> bool:
        return self._opened.outputs.kind == "values"

    @property
    def image(self) -> Image.Image:
        """As it was given, upright, in colour."""
        return self._source.image(self._index, 3 if self._source.pixels is None else None)

    @property
    def _activated(self) -> Tensor:
        if self._output is None:
            raise InputError(f"{self.path} cannot be read: {self.error}; `.error` is None for those that can")
        return self._opened.task.activate(self._output[None])[0]

    # --- shown -----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"Prediction({self.path!r}, {self.words(1)})"

    def words(self, count: int = 5) -> str:
        """cat 93.1%, dog 4.0%; or age 31.4; or why not."""
        if self.error is not None:
            return f"unreadable: {self.error}"
        if self.is_values:
            return ", ".join(f"{name} {value:.4g}" for name, value in self.values_by_name.items())
        return ", ".join(f"{name} {share:.1%}" for name, share in self.top(count))

    def parts(self) -> Iterable[Part]:
        with suppress(BadImage):  # the words say so
            yield drawing(self.image, self.path)
        if self.error is not None or self.is_values:
            yield f"{self.path}: {self.words()}"
        else:
            rows = [(name, f"{share:.1%}") for name, share in self.top(5)]
            yield Grid([(self.path, "probability"), *rows])


class Predictions(Shown, list[Prediction]):
    """One for each image, in the order given."""

    one = False  # whether a single image was given, by itself

    def parts(self) -> Iterable[Part]:
        yield Grid([("image", "prediction"), *((p.path, p.words(3)) for p in self[:_SHOWN])])
        if len(self) > _SHOWN:
            yield f"... and {len(self) - _SHOWN:,} more"


def predictions(opened: Opened, source: Source, batch_size: int | None = None) -> Iterator[Prediction]:
    """Image after image of a source; those that cannot be read have an `error`."""
    opened.task.columns(opened.top)  # a model without a classifier is refused before it runs
    batches = cut(range(len(source)), batch_size or batch_size_for(opened))
    for read in ImageBatches(source, opened.config).batches(batches):
        outputs: dict[int, Tensor] = {}
        if read.indices:
            found = opened.runtime.run(normalise(read.images, opened.config.preprocessing))
            outputs = dict(zip(read.indices, found, strict=True))
        for index in sorted({*outputs, *read.bad}):
            yield Prediction(opened, source, index, outputs.get(index), read.bad.get(index))
