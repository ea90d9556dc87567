"""vitkit -> timm: a state dict, and the config.json that lets `timm.create_model("local-dir:...")` build it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints.layout import WITH_LEADING_AXIS, Checkpoint, conv_patches, not_kept, only, resnet_of
from vitkit.checkpoints.timm import NAMES, NAMES_BARE_STEM
from vitkit.errors import CheckpointError
from vitkit.model.config import Preprocessing, ViTConfig

# timm builds models from functions; these are the ones whose other sizes model_args can set.
_HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
_ACTIVATIONS = {"gelu": "gelu", "gelu-tanh": "gelu_tanh", "quick-gelu": "quick_gelu", "swiglu": "silu"}
_POOLINGS = {"cls": "token", "mean": "avg", "map": "map"}


def write(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Tensors, config.json, and what the format cannot say."""
    config = only(
        checkpoint.config, "timm", positions=("learned", "none"), pooling=tuple(_POOLINGS), pre_logits=0, projection=0
    )
    if config.norm_after_pooling and config.pooling == "map":
        raise CheckpointError("timm cannot hold a norm after MAP pooling; use --to native")
    tensors, notes = _with_whole_prefix(conv_patches(checkpoint), config)
    if config.pre_norm:
        if torch.count_nonzero(tensors["patches.bias"]):
            raise CheckpointError("timm's patch embedding has no bias before a pre-norm, but this model has one")
        del tensors["patches.bias"]
    stem = resnet_of(config, "timm")
    names = NAMES_BARE_STEM if stem is not None and not stem.layers else NAMES
    foreign = {}
    for name, tensor in tensors.items():
        foreign[names.theirs(name) or name] = tensor[None] if name in WITH_LEADING_AXIS else tensor
    notes += not_kept(config, "timm", norm_eps=1e-5 if config.pre_norm else 1e-6, position_resize="timm")
    if stem and stem.numerics != "timm":
        notes.append("stem.numerics='official' is not kept: timm's is 'timm' (logits differ by about 1e-4)")
    return foreign, config_json(checkpoint), notes


def _with_whole_prefix(tensors: dict[str, Tensor], config: ViTConfig) -> tuple[dict[str, Tensor], list[str]]:
    """timm positions all tokens before the patches or none: add the class token's row to the token itself."""
    if config.positions != "learned" or config.positioned_prefix != "class" or not config.registers:
        return tensors, []
    if config.distillation_token:
        raise CheckpointError("timm cannot hold a distillation token beside registers; use --to native")
    rows = config.positioned_prefix_tokens
    table = tensors["positions.learned"]
    folded = {**tensors, "positions.learned": table[rows:]}
    if rows:
        folded["class_token"] = tensors["class_token"] + table[:1]
    return folded, ["the class token's position is added to the class token, as timm has no row for it here"]


def config_json(checkpoint: Checkpoint) -> dict[str, Any]:
    config = only(checkpoint.config, "timm")
    about: dict[str, Any] = {
        "architecture": _architecture(config),
        "num_classes": config.classes,
        "num_features": config.width,
        "global_pool": _POOLINGS[config.pooling],
        "model_args": _model_args(config),
        "pretrained_cfg": _pretrained_cfg(config.preprocessing, config),
    }
    if checkpoint.class_names is not None:
        about["label_names"] = list(checkpoint.class_names)
    return about


def _architecture(config: ViTConfig) -> str:
    stem = resnet_of(config, "timm")
    if stem is not None:
        if stem.layers not in _HYBRIDS or stem.root != "imagenet" or stem.width != 64:
            raise CheckpointError(f"timm has no hybrid with stem.layers={stem.layers}; use --to native")
        return _HYBRIDS[stem.layers]
    if config.activation == "swiglu":
        return "vit_giant_patch14_dinov2"
    if config.distillation_token:
        return "deit_base_distilled_patch16_224"
    return "vit_base_patch16_clip_224" if config.pre_norm else "vit_base_patch16_224"


def _model_args(config: ViTConfig) -> dict[str, Any]:
    stride = config.stem.stride if config.stem else 1
    ratio = config.mlp_width * (2 if config.activation == "swiglu" else 1) / config.width
    if int(config.width * ratio) != config.mlp_width * (2 if config.activation == "swiglu" else 1):
        ratio += 1e-9  # timm cuts the product down to a whole number
    args: dict[str, Any] = {
        "img_size": list(config.image_size),
        "patch_size": [p // stride for p in config.patch_size],
        "in_chans": config.channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": ratio,
        "qkv_bias": config.qkv_bias,
        "init_values": config.layer_scale,
        "class_token": config.class_token,
        "pos_embed": "learn" if config.positions == "learned" else "none",
        "no_embed_class": _no_embed_class(config),
        "reg_tokens": config.registers,
        "pre_norm": config.pre_norm,
        "global_pool": _POOLINGS[config.pooling],
        "fc_norm": config.norm_after_pooling,
        "act_layer": _ACTIVATIONS[config.activation],
    }
    if config.stem:
        del args["in_chans"]  # of the backbone, which model_args do not reach
    if args["patch_size"][0] == args["patch_size"][1]:
        args["patch_size"] = args["patch_size"][0]
    return args


def _no_embed_class(config: ViTConfig) -> bool:
    if config.positioned_prefix == "class" and not config.registers:
        return False
    return config.positioned_prefix != "all" and config.prefix_tokens > 0


def _pretrained_cfg(pre: Preprocessing, config: ViTConfig) -> dict[str, Any]:
    repeat = config.channels if len(pre.mean) == 1 else 1
    return {
        "num_classes": config.classes,
        "input_size": [config.channels, *config.image_size],
        "fixed_input_size": True,
        "interpolation": pre.interpolation,
        "crop_pct": pre.crop,
        "crop_mode": "center" if pre.fit == "crop" else "squash",
        "mean": list(pre.mean) * repeat,
        "std": list(pre.std) * (config.channels if len(pre.std) == 1 else 1),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
