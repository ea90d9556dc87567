"""An average of the weights over time, which is often the better model."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Average:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Early on the average follows closely: it must not remember the random start."""
        decay = min(self.decay, (1 + step) / (10 + step))
        ours, theirs = ([p.detach() for p in m.parameters()] for m in (self.model, model))
        torch._foreach_lerp_(ours, theirs, 1 - decay)
        for mine, other in zip(self.model.buffers(), model.buffers(), strict=True):
            mine.copy_(other)
