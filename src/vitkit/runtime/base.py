"""What every runtime is: something that turns a batch of prepared pictures into logits."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Runtime(Protocol):
    name: str  # what ran: "eager", "onnx int8", ...

    def run(self, images: Tensor) -> Tensor:
        """Normalised pictures (batch, channels, height, width) in float32 -> logits (batch, classes) in float32."""
        ...
