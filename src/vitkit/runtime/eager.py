"""PyTorch as it is: always there, and what every other runtime is compared with."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Eager:
    name = "eager"

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()

    @torch.inference_mode()
    def run(self, images: Tensor) -> Tensor:
        return self.model(images).float()
