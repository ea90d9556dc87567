"""Any set of images -> batches: fast, exact, resumable, and no bad file ever ends a run.

In the order an image meets them: `sources` (what DATA means) -> `dataset`, `source` -> `decode` ->
`preprocess` (evaluation) or `augment`, `vary` (training) -> `samples` -> `loader`.
"""

from vitkit.data.augment import PRESETS, Augment, class_weights, drop_unsafe_flip, mix, preset, soft_targets
from vitkit.data.badfiles import BadFile, BadFiles
from vitkit.data.cache import cached
from vitkit.data.dataset import Dataset, evaluation_split
from vitkit.data.decode import BadImage
from vitkit.data.loader import ImageBatches, Loader
from vitkit.data.preprocess import denormalise, normalise, prepare, read_image, to_tensor
from vitkit.data.samples import Batch
from vitkit.data.source import Source
from vitkit.data.sources import open_data

__all__ = ["PRESETS", "Augment", "BadFile", "BadFiles", "BadImage", "Batch", "Dataset", "ImageBatches", "Loader"]
__all__ += ["Source", "cached", "class_weights", "denormalise", "drop_unsafe_flip", "evaluation_split", "mix"]
__all__ += ["normalise", "open_data", "prepare", "preset", "read_image", "soft_targets", "to_tensor"]
