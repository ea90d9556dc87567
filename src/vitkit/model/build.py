"""A configuration or a name -> a model with fresh weights."""

from __future__ import annotations

from typing import Any

from vitkit.errors import ConfigError
from vitkit.model import zoo
from vitkit.model.config import AnyConfig, ResNetConfig, ViTConfig
from vitkit.model.stem import ResNet
from vitkit.model.vit import ViT

Model = ViT | ResNet


def build(config: AnyConfig) -> Model:
    return ViT(config) if isinstance(config, ViTConfig) else ResNet(config)


def create(name: str | AnyConfig, **changes: Any) -> Model:
    """A model with fresh weights: `create("vit-b/16", image_size=384, classes=10)`.

    `name` is a row of the zoo, timm's or Hugging Face's name for the same model, or a configuration;
    `changes` are fields of `ViTConfig` (or `ResNetConfig`).
    """
    if isinstance(name, (ViTConfig, ResNetConfig)):
        return build(name.replace(**changes) if changes else name)
    if not isinstance(name, str):
        raise ConfigError(f"create() wants a model's name or a ViTConfig, not {type(name).__name__}")
    return build(zoo.config(name, **changes))
