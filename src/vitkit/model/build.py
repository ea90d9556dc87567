"""A configuration or a name -> a model with fresh weights, or only its outline."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

from vitkit.errors import ConfigError
from vitkit.model import zoo
from vitkit.model.config import AnyConfig, ResNetConfig, ViTConfig
from vitkit.model.stem import ResNet
from vitkit.model.vit import ViT

Model = ViT | ResNet


def build(config: AnyConfig) -> Model:
    return ViT(config) if isinstance(config, ViTConfig) else ResNet(config)


class _ShapesOnly(TorchFunctionMode):
    """Leaves initialisation out. The first random number of a process on the meta device costs seconds of imports."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        given = kwargs if isinstance(kwargs, dict) else {}
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):  # normal_, zeros_ ...
            return args[0] if args else given.get("tensor")
        return func(*args, **given)


def outline(config: AnyConfig) -> Model:
    """The model on the meta device: names and shapes, without memory and without numbers."""
    with torch.device("meta"), _ShapesOnly():
        return build(config)


def create(name: str | AnyConfig, **changes: object) -> Model:
    """A model with fresh weights: `create("vit-b/16", image_size=384, classes=10)`.

    `name` is a row of the zoo, timm's or Hugging Face's name for the same model, or a configuration;
    `changes` are fields of `ViTConfig` (or `ResNetConfig`).
    """
    if isinstance(name, (ViTConfig, ResNetConfig)):
        return build(name.replace(**changes) if changes else name)
    if not isinstance(name, str):
        raise ConfigError(f"create() wants a model's name or a ViTConfig, not {type(name).__name__}")
    return build(zoo.config(name, **changes))
