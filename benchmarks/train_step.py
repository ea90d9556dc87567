"""Throughput (img/s) of a training step: forward, cross-entropy, backward, AdamW step, in five systems.

Every system has the same shape, its own default settings, train() mode and the same optimiser.

    python benchmarks/train_step.py            # all cases, about five minutes
    python benchmarks/train_step.py --quick    # a smoke run of a minute
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from systems import SYSTEMS, shape, side_by_side

CASES: tuple[tuple[str, int], ...] = (("vit-32px/4", 8), ("vit-32px/4", 64), ("vit-ti/16", 8), ("vit-b/16", 8))


def step_call(system: str, model: str, batch: int) -> Callable[[], Any]:
    config = shape(model)
    logits_of, module = SYSTEMS[system](config)
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    images = torch.randn(batch, config.channels, *config.image_size)
    labels = torch.randint(config.classes, (batch,))

    def call() -> None:
        optimizer.zero_grad()
        F.cross_entropy(logits_of(images), labels).backward()
        optimizer.step()

    return call


if __name__ == "__main__":
    side_by_side(
        __file__, __doc__, CASES, step_call, passes=3
    )  # the backward pass multiplies twice as much as the forward
