"""vitkit: the Vision Transformer, faithful, unbreakable, visible.

    import vitkit
    run = vitkit.train("photos/", budget="5m")
    run.model.predict("cat.jpg")

The names of `__all__` are the public interface; every other module may change without notice. They are looked
up when they are first used, so that `import vitkit` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PUBLIC = {
    "vitkit.model.build": ("create",),
    "vitkit.checkpoints.load": ("load",),
    "vitkit.checkpoints.native": ("save",),
    "vitkit.data": ("open_data", "Dataset"),
    "vitkit.api": ("train", "pretrain", "evaluate", "predict", "embed", "explain", "export", "profile", "index"),
    "vitkit.hub": ("push", "pull"),
    "vitkit.curation": ("open_index",),
    "vitkit.model.summary": ("summarize",),
    "vitkit.model.base": ("VisionModel", "Outputs"),
    "vitkit.model.vit": ("ViT",),
    "vitkit.model.stem": ("ResNet",),
    "vitkit.model.config": (
        "ViTConfig",
        "ResNetConfig",
        "ConvStemConfig",
        "StemConfig",
        "WhitenedStemConfig",
        "Preprocessing",
    ),
    "vitkit.prediction.predicted": ("Prediction", "Predictions"),
    "vitkit.training.config": ("TrainConfig",),
    "vitkit.errors": ("VitkitError",),
}
_WHERE = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = ["__version__", "create", "load", "save", "open_data", "Dataset"]  # noqa: RUF022  # in the order of the docs
__all__ += ["train", "pretrain", "evaluate", "predict", "embed", "explain", "export", "profile"]  # noqa: RUF022
__all__ += ["index", "open_index", "push", "pull", "summarize"]  # noqa: RUF022
__all__ += ["VisionModel", "Outputs", "ViT", "ResNet", "ViTConfig", "ResNetConfig"]  # noqa: RUF022
__all__ += ["Prediction", "Predictions", "VitkitError"]
__all__ += ["ConvStemConfig", "StemConfig", "WhitenedStemConfig", "Preprocessing", "TrainConfig"]  # noqa: RUF022

if TYPE_CHECKING:
    from vitkit.api import embed, evaluate, explain, export, index, predict, pretrain, profile, train
    from vitkit.checkpoints.load import load
    from vitkit.checkpoints.native import save
    from vitkit.curation import open_index
    from vitkit.data import Dataset, open_data
    from vitkit.errors import VitkitError
    from vitkit.hub import pull, push
    from vitkit.model.base import Outputs, VisionModel
    from vitkit.model.build import create
    from vitkit.model.config import (
        ConvStemConfig,
        Preprocessing,
        ResNetConfig,
        StemConfig,
        ViTConfig,
        WhitenedStemConfig,
    )
    from vitkit.model.stem import ResNet
    from vitkit.model.summary import summarize
    from vitkit.model.vit import ViT
    from vitkit.prediction.predicted import Prediction, Predictions
    from vitkit.training.config import TrainConfig


def __getattr__(name: str) -> object:
    if name in ("ray", "spark"):
        return importlib.import_module(f"vitkit.{name}")
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'vitkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
