"""Throughput (img/s) of a forward pass: vitkit, timm, Hugging Face, torchvision and vit-pytorch side by side.

Every system has the same shape, its own default settings, eval() and inference_mode, and the same threads.

    python benchmarks/forward.py            # all cases, about five minutes
    python benchmarks/forward.py --quick    # a smoke run of a minute
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from systems import SYSTEMS, shape, side_by_side

CASES = tuple((model, batch) for model in ("vit-32px/4", "vit-ti/16", "vit-b/16") for batch in (1, 8))


def forward_call(system: str, model: str, batch: int) -> Callable[[], Any]:
    config = shape(model)
    logits_of, module = SYSTEMS[system](config)
    module.eval()
    images = torch.randn(batch, config.channels, *config.image_size)

    def call() -> None:
        with torch.inference_mode():
            logits_of(images)

    return call


if __name__ == "__main__":
    side_by_side(__file__, __doc__, CASES, forward_call, passes=1)
