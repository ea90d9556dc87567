"""What this machine can do: the fastest matrix product and the bandwidth of its memory, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True)
class Limits:
    """What this machine can do with these threads."""

    flops: float  # per second, in a large matrix product
    bandwidth: float  # bytes per second, read and written

    def seconds(self, flops: float, moved: float) -> float:
        return max(flops / self.flops, moved / self.bandwidth)


def machine_limits(dtype: torch.dtype, device: torch.device, side: int = 1024) -> Limits:
    """The best of several large matrix products, and of several copies of what no cache holds."""
    with torch.inference_mode():
        a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
        source, target = (torch.ones(1 << 24, device=device) for _ in range(2))  # 64 MB each
        product, copy = partial(torch.mm, a, b, out=torch.empty_like(a)), partial(target.copy_, source)
        best = {}
        for name, run in (("product", product), ("copy", copy)):
            run()
            best[name] = min(_seconds(run, device) for _ in range(8))
    return Limits(2 * side**3 / best["product"], 2 * source.nbytes / best["copy"])


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
