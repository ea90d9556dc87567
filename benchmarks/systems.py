"""The systems that are compared, each with its default settings, built from one vitkit configuration.

Weights are fresh: they do not change the time. Every builder returns a function of images -> logits and
the module behind it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import peers
from vitkit.model import zoo
from vitkit.model.config import ViTConfig
from vitkit.model.vit import ViT

System = tuple[Callable[[Tensor], Tensor], nn.Module]


def shape(name: str) -> ViTConfig:
    config = zoo.config(name)
    if not isinstance(config, ViTConfig) or config.stem is not None:
        raise SystemExit(f"{name} cannot be built by every peer; choose a plain ViT of `vitkit zoo`")
    return config


def vitkit(config: ViTConfig) -> System:
    model = ViT(config)
    return model, model


def timm(config: ViTConfig) -> System:
    model = peers.import_timm().models.vision_transformer.VisionTransformer(
        img_size=config.image_size, patch_size=config.patch_size, in_chans=config.channels, embed_dim=config.width,
        depth=config.depth, num_heads=config.heads, mlp_ratio=config.mlp_width / config.width,
        num_classes=config.classes,
    )  # fmt: skip
    return model, model


def huggingface(config: ViTConfig) -> System:
    hf = peers.import_transformers()
    model: Any = hf.ViTForImageClassification(
        hf.ViTConfig(
            image_size=config.image_size[0], patch_size=config.patch_size[0], num_channels=config.channels,
            hidden_size=config.width, num_hidden_layers=config.depth, num_attention_heads=config.heads,
            intermediate_size=config.mlp_width, num_labels=config.classes,
        )
    )  # fmt: skip
    return lambda images: model(images).logits, model


def torchvision(config: ViTConfig) -> System:
    model = peers.import_torchvision().models.vision_transformer.VisionTransformer(
        image_size=config.image_size[0], patch_size=config.patch_size[0], num_layers=config.depth,
        num_heads=config.heads, hidden_dim=config.width, mlp_dim=config.mlp_width, num_classes=config.classes,
    )  # fmt: skip
    return model, model


def vit_pytorch(config: ViTConfig) -> System:
    model = peers.import_vit_pytorch().ViT(
        image_size=config.image_size[0], patch_size=config.patch_size[0], num_classes=config.classes,
        dim=config.width, depth=config.depth, heads=config.heads, dim_head=config.width // config.heads,
        mlp_dim=config.mlp_width, channels=config.channels,
    )  # fmt: skip
    return model, model


SYSTEMS: dict[str, Callable[[ViTConfig], System]] = {
    "vitkit": vitkit,
    "timm": timm,
    "huggingface": huggingface,
    "torchvision": torchvision,
    "vit-pytorch": vit_pytorch,
}
