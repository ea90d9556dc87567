"""What every runtime is: something that turns a batch of prepared pictures into logits."""

from __future__ import annotations

import copy
import importlib
from typing import Any, Protocol

from torch import Tensor, nn

from vitkit.errors import ConfigError, MissingPackage
from vitkit.model.vit import ViT


class Runtime(Protocol):
    name: str  # what ran: "eager", "onnx int8", ...

    def run(self, images: Tensor) -> Tensor:
        """Normalised pictures (batch, channels, height, width) in float32 -> logits (batch, classes) in float32."""
        ...


def described(kind: str, int8: bool = False, merge: int = 0) -> str:
    """ "onnx int8 merge 8" """
    return " ".join([kind, *(["int8"] if int8 else []), *([f"merge {merge}"] if merge else [])])


def merged(model: nn.Module, merge: int) -> nn.Module:
    """The same weights in a model that merges so many tokens per block; the given model stays as it is."""
    if not merge:
        return model
    twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    found = [m for m in twin.modules() if isinstance(m, ViT)]
    if not found:
        raise ConfigError(f"{type(model).__name__} has no tokens that could be merged; leave --merge out")
    for vit in found:
        vit.merge = merge
    return twin


def need(package: str, purpose: str, extra: str) -> Any:
    """An optional package, or the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingPackage(package.split(".")[0], purpose, extra) from None
