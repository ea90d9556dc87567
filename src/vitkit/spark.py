"""vitkit on Spark: `df.mapInPandas(vitkit.spark.predictor(model), schema=vitkit.spark.schema(model))`.

Nothing here imports Spark: what `mapInPandas` wants is a function from an iterator of pandas frames to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.prediction.columns import ColumnPredictor
from vitkit.prediction.opened import Loadable

if TYPE_CHECKING:
    import pandas as pd

_KINDS = {str: "string", float: "double"}
Frames = Callable[["Iterable[pd.DataFrame]"], "Iterator[pd.DataFrame]"]


def predictor(model: str | Path, *, keep: Mapping[str, str] | None = None, **options: object) -> Frames:
    """A function for `mapInPandas`; each Python process of an executor loads the model once.

    model    a file, folder or name that every executor can open
    keep     columns that are handed on, with their types: {"id": "long"}
    options  of `vitkit.ray.Predictor`: features, top, batch_size, runtime, device and so on
    """
    given = tuple(sorted({"keep": tuple(keep or ()), **options}.items()))

    def predict(frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        opened = _opened(str(model), given)
        for frame in frames:
            yield opened.table({str(name): frame[name].tolist() for name in frame.columns}).to_pandas()

    return predict


def schema(model: Loadable, *, keep: Mapping[str, str] | None = None, **options: object) -> str:
    """What `mapInPandas` wants to know about the columns, in Spark's own words."""
    opened = ColumnPredictor(model, **options)  # type: ignore[arg-type]
    features = "array<float>" if opened.dimensions == 1 else "array<array<float>>"
    own = {name: _KINDS.get(kind, features) for name, kind in opened.columns.items()}
    return ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in {**(keep or {}), **own}.items())


@lru_cache(maxsize=4)
def _opened(model: str, given: tuple[tuple[str, object], ...]) -> ColumnPredictor:
    return ColumnPredictor(model, **dict(given))  # type: ignore[arg-type]
