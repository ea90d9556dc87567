"""What an exported file says about itself, as four pieces of JSON that need no vitkit to be read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from torch import nn

from vitkit import __version__
from vitkit.errors import ConfigError
from vitkit.model.config import AnyConfig, ResNetConfig, ViTConfig

_KINDS: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"ViT": ViTConfig, "ResNet": ResNetConfig}


@dataclass(frozen=True)
class About:
    """What `vitkit predict` needs of an exported file."""

    config: AnyConfig
    class_names: tuple[str, ...] | None
    raw: bool


def write(model: nn.Module, **how: Any) -> dict[str, str]:
    """`how`: raw, int8, merge."""
    config: Any = model.config
    kind = "ViT" if isinstance(config, ViTConfig) else "ResNet"
    names = getattr(model, "class_names", None)
    values = {
        "vitkit": {"version": __version__, "kind": kind, **how},
        "config": config.to_dict(),
        "preprocessing": config.preprocessing.to_dict(),
        "classes": None if names is None else list(names),
    }
    return {key: json.dumps(value, sort_keys=True) for key, value in values.items()}


def read(metadata: dict[str, str], where: str) -> About:
    try:
        about = json.loads(metadata["vitkit"])
        config = _KINDS[about["kind"]].from_json(metadata["config"])
        names = json.loads(metadata["classes"])
        return About(config, None if names is None else tuple(names), bool(about.get("raw")))
    except (KeyError, ValueError, TypeError) as e:
        raise ConfigError(f"{where} does not say what model it is; it was not written by `vitkit export`") from e
