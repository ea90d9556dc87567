"""A model as a stage of a Ray Data pipeline: an actor that loads it once and answers batch after batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitkit.prediction.columns import ColumnPredictor

if TYPE_CHECKING:
    import pyarrow as pa


class Predictor(ColumnPredictor):
    """`ds.map_batches(vitkit.ray.Predictor, fn_constructor_args=("model.safetensors",), compute=...)`.

    The image of a row is in the first of the columns `image`, `bytes`, `content` or `path`. What comes back are the
    columns that `vitkit predict --out x.parquet` writes, or `embed` with `features`; `keep` names columns that are
    handed on. A row without a readable image says why in `error`.
    """

    def __call__(self, batch: dict[str, np.ndarray]) -> pa.Table:
        return self.table({name: list(column) for name, column in batch.items()})
