"""Columns with images in, columns with predictions out: the predictor that Ray, Spark and other tables share.

The image of a row stands in the first of the columns `image` (pixels, or a struct as in Parquet of Hugging Face),
`bytes`, `content` (as Spark names it) and `path` (a file or URL) that there is. A row that holds no readable image
has an `error`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from torch import Tensor

from vitkit.checkpoints.options import ModelOptions
from vitkit.data import BadImage
from vitkit.data.given import Given, is_url, to_pixels
from vitkit.data.preprocess import read_image
from vitkit.data.source import Names
from vitkit.errors import ConfigError, InputError
from vitkit.model.config import Preprocessing
from vitkit.prediction.job import stream
from vitkit.prediction.opened import Loadable, Opened, open_model
from vitkit.prediction.tables import Columns, Row, arrow_table

if TYPE_CHECKING:
    import pyarrow as pa

CONTENT = ("image", "bytes", "content", "path")
_IN_A_STRUCT = ("bytes", "content", "path")
Item = str | bytes | Image.Image | Tensor


class ColumnPredictor:
    """`predictor.table(columns)`: the rows of `vitkit predict`, or of `embed` with `features`, as an Arrow table.

    model       whatever `vitkit.load` takes, or an exported file
    features    cls, mean, tokens, or "" for what the model's own head reads; None: predictions
    keep        columns that are handed on as they are, before those of the prediction
    batch_size  images computed at once; None: by their size
    options     of `vitkit.load`: image_size, classes and so on
    """

    def __init__(
        self,
        model: Loadable,
        *,
        features: str | None = None,
        top: int = 5,
        keep: Sequence[str] = (),
        batch_size: int | None = None,
        runtime: str = "auto",
        merge: int | str = 0,
        device: str | None = None,
        trust: str | None = None,
        **options: object,
    ) -> None:
        how = (runtime, merge, device, ModelOptions.of(**options) if options else None)
        self.opened: Opened = open_model(model, *how, top=top, features=features, trust=trust)
        self.keep, self.batch_size = tuple(keep), batch_size
        if both := [name for name in self.keep if name in self.opened.columns]:
            raise ConfigError(f"keep={both} would stand twice: the prediction has a column of that name; rename yours")

    @property
    def columns(self) -> Columns:
        return self.opened.columns

    @property
    def dimensions(self) -> int:
        """Of the features of an image."""
        return 2 if self.opened.features == "tokens" else 1

    def rows(self, columns: Mapping[str, Sequence[object]]) -> list[Row]:
        return list(stream(self.opened, _Rows.of(columns), self.batch_size)) if len(columns[_content(columns)]) else []

    def table(self, columns: Mapping[str, Sequence[object]]) -> pa.Table:
        if missing := [name for name in self.keep if name not in columns]:
            raise ConfigError(f"there is no column {missing[0]!r} to keep; there are {', '.join(columns)}")
        made = arrow_table(self.rows(columns), self.columns, self.dimensions)
        for place, name in enumerate(self.keep):
            made = made.add_column(place, name, [list(columns[name])])
        return made


def _content(columns: Mapping[str, Sequence[object]]) -> str:
    for name in CONTENT:
        if name in columns:
            return name
    raise ConfigError(f"the batch has no column {', '.join(CONTENT)} with images, only {', '.join(columns) or 'none'}")


class _Rows(Given):
    """The rows of a batch; those that hold nothing to be read have a reason."""

    reasons: dict[int, str]

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[object]]) -> _Rows:
        content = _content(columns)
        found: list[Item | Path] = []
        reasons = {}
        for i, value in enumerate(columns[content]):
            try:
                found.append(_item(value))
            except InputError as e:
                found.append(b"")
                reasons[i] = str(e)
        names = (
            [str(name) for name in columns["path"]] if "path" in columns else [f"image {i}" for i in range(len(found))]
        )
        names = [str(item) if isinstance(item, Path) else name for name, item in zip(names, found, strict=True)]
        items = tuple(b"" if isinstance(item, Path) else item for item in found)
        count = len(items)
        rows = cls(
            f"{count:,} rows", "all", {"all": count}, ("",), np.zeros(count, np.int64), Names(names), items=items
        )
        rows.reasons, rows.files = reasons, {i for i, item in enumerate(found) if isinstance(item, Path)}
        return rows

    files: set[int]  # rows whose image is the file of that name

    def pixels_of(self, index: int, pre: Preprocessing, channels: int) -> Tensor:
        if index in self.reasons:
            raise BadImage(self.reasons[index])
        if index in self.files:
            return read_image(self.names[index], pre, channels)
        return super().pixels_of(index, pre, channels)


def _item(value: object) -> Item | Path:
    """A cell of a table -> an image, the path of a file, or an `InputError`."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in _IN_A_STRUCT if value.get(key) is not None), None)
    if value is None or isinstance(value, float):  # pandas has NaN where nothing is
        raise InputError("the row holds no image")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str | Path):
        local = str(value).removeprefix("file://").removeprefix("file:")
        return local if is_url(local) else Path(local)
    if isinstance(value, Image.Image):
        return value
    return to_pixels(value if isinstance(value, Tensor) else np.asarray(value))
