"""How fast runtimes are beside each other, on a machine that may be busy."""

from __future__ import annotations

import time

from torch import Tensor

from vitkit.runtime.base import Runtime


def in_words(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def images_per_second(runtimes: dict[str, Runtime], batches: list[Tensor], seconds: float) -> dict[str, float]:
    """Interleaved, so that a disturbance meets all alike; the fastest call of each, the least disturbed, counts.

    On a busy machine it takes longer (up to five times): until another call was nearly as fast.
    """
    best = {name: [float("inf")] * 2 for name in runtimes}  # the two fastest calls, in seconds
    for runtime in runtimes.values():
        _run(runtime, batches)  # the first call allocates, and may compile
    start, rounds, spent, limit = time.perf_counter(), 0, 0.0, seconds * len(runtimes)
    while rounds < 3 or spent < limit or (spent < 5 * limit and any(b > 1.1 * a for a, b in best.values())):
        for name, runtime in runtimes.items():
            best[name] = sorted([*best[name], _run(runtime, batches)])[:2]
        rounds, spent = rounds + 1, time.perf_counter() - start
    return {name: sum(map(len, batches)) / fastest for name, (fastest, _) in best.items()}


def _run(runtime: Runtime, batches: list[Tensor]) -> float:
    before = time.perf_counter()
    for images in batches:
        runtime.run(images)
    return time.perf_counter() - before
