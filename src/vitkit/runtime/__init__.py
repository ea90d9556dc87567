"""The same model, run by whatever is fastest on this machine, and proven equal."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from vitkit.errors import ConfigError, did_you_mean
from vitkit.runtime.base import Runtime
from vitkit.runtime.eager import Eager
from vitkit.runtime.onnx_int8 import Calibration
from vitkit.runtime.tuned import Choice, stored

KINDS = ("auto", "eager", "compiled", "onnx", "openvino")

__all__ = ["KINDS", "Choice", "Runtime", "open_runtime"]


def open_runtime(
    model: nn.Module,
    kind: str = "auto",
    *,
    source: str | Path | None = None,
    int8: bool = False,
    merge: int = 0,
    threads: int | None = None,
    calibration: Calibration | None = None,
) -> Runtime:
    """A runtime for a loaded model; "auto" takes what `vitkit tune` has found for it, or PyTorch as it is.

    source       where the model was loaded from: beside it, "auto" looks for what was found
    int8         8-bit matrix products (onnx, openvino)
    merge        patches that each block merges into others
    threads      by default the runtime's own choice
    calibration  batches of normalised pictures, for static int8
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no runtime {kind!r}.{did_you_mean(kind, KINDS)} Known: {', '.join(KINDS)}")
    if kind == "auto":
        found = None if source is None or int8 or merge else stored(model, source)
        if found is not None:
            return found
        kind = "onnx" if int8 else "eager"
    if int8 and kind not in ("onnx", "openvino"):
        raise ConfigError(f"the runtime {kind} has no int8; choose onnx or openvino")
    if kind == "onnx":
        from vitkit.runtime import onnx

        return onnx.build(model, int8, merge, threads, calibration)
    if kind == "openvino":
        from vitkit.runtime import openvino

        return openvino.build(model, int8, merge, threads, calibration)
    if kind == "compiled":
        from vitkit.runtime.compiled import Compiled

        return Compiled(model, merge, threads)
    return Eager(model, merge, threads)
