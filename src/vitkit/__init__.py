"""vitkit: the Vision Transformer, faithful, unbreakable, visible.

    import vitkit
    model = vitkit.create("vit-b/16", classes=10)

Names are looked up when they are first used, so that `import vitkit` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "create": "vitkit.model.build",
    "load": "vitkit.checkpoints.load",
    "save": "vitkit.checkpoints.native",
    "ViT": "vitkit.model.vit",
    "ResNet": "vitkit.model.stem",
    "ViTConfig": "vitkit.model.config",
    "ResNetConfig": "vitkit.model.config",
    "ConvStemConfig": "vitkit.model.config",
    "StemConfig": "vitkit.model.config",
    "Preprocessing": "vitkit.model.config",
    "summarize": "vitkit.model.summary",
    "TrainConfig": "vitkit.train.config",
    "VitkitError": "vitkit.errors",
}
__all__ = ["__version__", *_WHERE]  # noqa: PLE0604

if TYPE_CHECKING:
    from vitkit.checkpoints.load import load as load
    from vitkit.checkpoints.native import save as save
    from vitkit.errors import VitkitError as VitkitError
    from vitkit.model.build import create as create
    from vitkit.model.config import ConvStemConfig as ConvStemConfig
    from vitkit.model.config import Preprocessing as Preprocessing
    from vitkit.model.config import ResNetConfig as ResNetConfig
    from vitkit.model.config import StemConfig as StemConfig
    from vitkit.model.config import ViTConfig as ViTConfig
    from vitkit.model.stem import ResNet as ResNet
    from vitkit.model.summary import summarize as summarize
    from vitkit.model.vit import ViT as ViT
    from vitkit.train.config import TrainConfig as TrainConfig


def __getattr__(name: str) -> Any:
    if name == "train":  # the package itself can be called
        return importlib.import_module("vitkit.train")
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'vitkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
