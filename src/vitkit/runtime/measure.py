"""How fast is a runtime, and how right? The two figures that `vitkit tune` weighs."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from vitkit.model.config import AnyConfig
from vitkit.runtime.base import Runtime
from vitkit.runtime.verify import Pictures


def images_per_second(runtimes: dict[str, Runtime], images: Tensor, seconds: float) -> dict[str, float]:
    """Interleaved, so that a disturbance meets all alike; the fastest call of each, the least disturbed, counts."""
    best = dict.fromkeys(runtimes, float("inf"))
    for runtime in runtimes.values():
        runtime.run(images)  # the first call allocates, and may compile
    start, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - start < seconds * len(runtimes):
        for name, runtime in runtimes.items():
            before = time.perf_counter()
            runtime.run(images)
            best[name] = min(best[name], time.perf_counter() - before)
        rounds += 1
    return {name: len(images) / t for name, t in best.items()}


def logits_of(runtime: Runtime, pictures: Pictures, config: AnyConfig, batch_size: int) -> Tensor:
    return torch.cat([runtime.run(batch) for batch in pictures.batches(config, batch_size)])
