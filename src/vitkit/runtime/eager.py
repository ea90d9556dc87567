"""PyTorch as it is: always there, and what every other runtime is compared with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitkit.runtime.base import described, merged


class Eager:
    def __init__(self, model: nn.Module, merge: int = 0, threads: int | None = None) -> None:
        self.model = merged(model.eval(), merge)
        self.name, self.threads = described("eager", merge=merge), threads
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype

    @torch.inference_mode()
    def run(self, images: Tensor) -> Tensor:
        before = torch.get_num_threads()
        if self.threads and self.threads != before:
            torch.set_num_threads(self.threads)
        try:
            return self.model(images.to(self.device, self.dtype)).float().cpu()
        finally:
            if self.threads and self.threads != before:
                torch.set_num_threads(before)
