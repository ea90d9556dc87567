"""Search by one patch: what is at this place of an image, in which other images is it, and where?

An index has one vector of each image, not one of each patch. So the search has two steps: images whose features are
near to those of the neighbourhood of the patch, then the patches of these few, of which the best match counts.

Shapes: N patches of an image, D width.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vitkit.curation.embedding import DESCRIPTOR, open_embedder
from vitkit.curation.query import Hit, embed_one, hit, hits_of, opened_image
from vitkit.errors import ConfigError
from vitkit.model.config import ViTConfig
from vitkit.prediction import stream
from vitkit.prediction.opened import Loadable
from vitkit.prediction.tables import features_of

if TYPE_CHECKING:
    from vitkit.curation.index import Index

_SHORTLIST = 100  # images whose patches are compared, at least; four times as many as are wanted


def search_patch(
    index: Index, image: str | Path | Image.Image, patch: tuple[int, int], top: int, model: Loadable | None = None
) -> list[Hit]:
    """The images with the patch that is most like it; the score is the cosine of these two patches."""
    if index.about["features"] == DESCRIPTOR:
        made = f"the index {index.path} was made without a model, so it knows no patches"
        raise ConfigError(f"{made}; use --box, or index the set with --model and a ViT")
    whole = index.embedder(model)
    opened = open_embedder(index.model(model), options=index.options, features="tokens")
    query = opened_image(image)
    wanted = unit(embed_one(opened, query, image))[_number(opened.config, patch)]  # D
    whole_image = embed_one(whole, query, image)
    mean = whole.features == "mean"  # then patches and images have one space
    few = min(len(index), max(_SHORTLIST, 4 * top))
    near = hits_of(index, wanted if mean else whole_image, few)
    near += hits_of(index, whole_image, few) if mean else []
    rows = np.unique([found.row for found in near])
    source = index.catalogue().source.take(rows)
    found = [
        hit(index, int(row), _best(wanted, features_of(r))) for row, r in zip(rows, stream(opened, source), strict=True)
    ]
    return sorted(found, key=lambda h: (-h.score, h.row))[:top]


def unit(tokens: np.ndarray) -> np.ndarray:
    """N D, rows of length 1."""
    return np.asarray(tokens / np.maximum(np.linalg.norm(tokens, axis=-1, keepdims=True), 1e-12))


def _best(wanted: np.ndarray, tokens: np.ndarray | None) -> float:
    return -1.0 if tokens is None else float((unit(tokens) @ wanted).max())


def _number(config: object, patch: tuple[int, int]) -> int:
    """Of the patch among those of an image."""
    assert isinstance(config, ViTConfig)  # only a ViT gives tokens
    (rows, columns), (row, column) = config.grid, patch
    if not (0 <= row < rows and 0 <= column < columns):
        raise ConfigError(f"--patch {row},{column} must be ROW,COLUMN from 0,0 to {rows - 1},{columns - 1}")
    return row * columns + column
