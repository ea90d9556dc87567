"""Logits -> one row per picture: the likeliest classes by name, with their probabilities."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.predict.job import Part
from vitkit.runtime import Runtime

DIGITS = 6  # of a probability: what remains the same on another runtime


class Classify:
    """The work of `vitkit predict` on one batch."""

    def __init__(self, runtime: Runtime, classes: int, names: tuple[str, ...] | None = None, top: int = 5) -> None:
        if not classes:
            raise ConfigError("the model has no classifier (classes=0), so it names no classes; use `vitkit embed`")
        self.runtime, self.top = runtime, min(top, classes)
        self.names = names or tuple(map(str, range(classes)))
        self.columns: dict[str, type] = {"path": str}
        for k in range(self.top):
            after = f"_{k + 1}" if k else ""
            self.columns |= {f"class{after}": str, f"probability{after}": float}
        self.columns["error"] = str

    def __call__(self, images: Tensor) -> Part:
        found = self.runtime.run(images).softmax(dim=-1).topk(self.top)
        rows: list[dict[str, Any]] = []
        for numbers, shares in zip(found.indices.tolist(), found.values.tolist(), strict=True):
            row: dict[str, Any] = {}
            for k, (number, share) in enumerate(zip(numbers, shares, strict=True)):
                after = f"_{k + 1}" if k else ""
                row |= {f"class{after}": self.names[number], f"probability{after}": round(share, DIGITS)}
            rows.append(row)
        return Part(rows)
