"""Any set of pictures -> batches: fast, exact, resumable, and no bad file ever ends a run.

In the order a picture meets them: `open` (what DATA means) -> `source` and its readers -> `decode` ->
`preprocess` (evaluation) or `augment`, `vary` (training) -> `samples` -> `order` -> `loader` -> `targets`.
"""

from __future__ import annotations

from vitkit.data.augment import PRESETS, Augment, preset, suited
from vitkit.data.badfiles import BadFile, BadFiles
from vitkit.data.cache import cached
from vitkit.data.decode import BadPicture
from vitkit.data.loader import Loader
from vitkit.data.open import open_data
from vitkit.data.preprocess import denormalise, normalise, prepare, to_tensor
from vitkit.data.samples import Batch
from vitkit.data.source import Source, evaluation_split
from vitkit.data.targets import class_weights, mix, soft_targets

__all__ = [
    "PRESETS",
    "Augment",
    "BadFile",
    "BadFiles",
    "BadPicture",
    "Batch",
    "Loader",
    "Source",
    "cached",
    "class_weights",
    "denormalise",
    "evaluation_split",
    "mix",
    "normalise",
    "open_data",
    "prepare",
    "preset",
    "soft_targets",
    "suited",
    "to_tensor",
]
