"""Postprocessing as part of an exported graph: the most probable classes beside the logits.

The logits stay the first output, so that whatever reads them reads such a file too; a runtime that is asked for one
output computes no other.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.model.base import Outputs
from vitkit.model.config import AnyConfig


class WithTop(nn.Module):
    """Whatever the model takes -> logits B C, the K highest probabilities B K, and the numbers of their classes B K."""

    def __init__(self, model: nn.Module, outputs: Outputs, count: int) -> None:
        super().__init__()
        self.model, self.several = model, outputs.kind == "labels"
        self.config = cast(AnyConfig, model.config)
        classes = self.config.classes
        if outputs.kind == "values" or not classes:
            what = "features" if not classes else "values"
            raise ConfigError(f"--top is for classes, and this model gives {what}; leave --top out")
        if not 1 <= count <= classes:
            raise ConfigError(f"--top {count} must be from 1 to the {classes} classes of the model")
        self.count = count

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits: Tensor = self.model(images)
        best = (logits.sigmoid() if self.several else logits.softmax(dim=-1)).topk(self.count, dim=-1)
        return logits, best.values, best.indices


OUTPUTS = ("logits", "probabilities", "classes")  # their names in a file
