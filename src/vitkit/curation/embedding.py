"""What makes the features of an index: any checkpoint, or a descriptor of edges and colours that needs no weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.zeroshot import has_text_tower
from vitkit.curation.catalogue import placed
from vitkit.data.descriptor import SIDE, describe
from vitkit.model.base import Outputs
from vitkit.model.config import Preprocessing, ViTConfig
from vitkit.prediction import Opened, open_model
from vitkit.prediction.opened import Loadable
from vitkit.progress import SILENT, Progress
from vitkit.runtime.base import Runtime

DESCRIPTOR = "descriptor"
_VERSION = "descriptor 1"  # another one where the same image gets other numbers


class _Describing(Runtime):
    def compute(self, images: Tensor) -> Tensor:
        return describe((images * 255).round().to(torch.uint8))


def open_embedder(
    model: Loadable | None,
    device: str | None = None,
    progress: Progress = SILENT,
    options: ModelOptions | None = None,
    features: str = "",
) -> Opened:
    """Features of prepared images, by what the model's head reads; None: by the descriptor.

    Where a checkpoint has a text tower they are what its texts are compared with.
    """
    if model is not None and str(model) != DESCRIPTOR:
        if not features and isinstance(model, (str, Path)) and has_text_tower(model):
            features = "pooled"
        return open_model(model, device=device, progress=progress, features=features, options=options)
    pre = Preprocessing(size=(SIDE, SIDE), mean=(0.0,), std=(1.0,))
    config = ViTConfig(  # its preprocessing is read
        image_size=pre.size, patch_size=pre.size, classes=0, preprocessing=pre
    )
    return Opened(config, Outputs(), _Describing("descriptor"), _VERSION, features=DESCRIPTOR)


def name_of(model: Loadable | None) -> str:
    if model is None:
        return DESCRIPTOR
    return "a model in memory" if isinstance(model, torch.nn.Module) else placed(model)
