"""torchvision's VisionTransformer state dicts <-> vitkit."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vitkit.checkpoints.layout import (
    IMAGENET,
    PAPER,
    Checkpoint,
    NameMap,
    Tensors,
    conv_patches,
    count,
    find_grid,
    guess_heads,
    make_config,
    need,
    not_kept,
    only,
    without_leading_axis,
)
from vitkit.errors import CheckpointError

LAYER = "encoder.layers.encoder_layer_{i}"
NAMES = NameMap(
    ("conv_proj.*", "patches.*"),
    ("class_token", "class_token"),
    ("encoder.pos_embedding", "positions.learned"),
    (f"{LAYER}.ln_1.*", "encoder.blocks.{i}.norm1.*"),
    (f"{LAYER}.self_attention.in_proj_weight", "encoder.blocks.{i}.attention.qkv.weight"),
    (f"{LAYER}.self_attention.in_proj_bias", "encoder.blocks.{i}.attention.qkv.bias"),
    (f"{LAYER}.self_attention.out_proj.*", "encoder.blocks.{i}.attention.out.*"),
    (f"{LAYER}.ln_2.*", "encoder.blocks.{i}.norm2.*"),
    (f"{LAYER}.mlp.0.*", "encoder.blocks.{i}.mlp.up.*"),
    (f"{LAYER}.mlp.3.*", "encoder.blocks.{i}.mlp.down.*"),
    (f"{LAYER}.mlp.linear_1.*", "encoder.blocks.{i}.mlp.up.*"),  # before torchvision 0.13
    (f"{LAYER}.mlp.linear_2.*", "encoder.blocks.{i}.mlp.down.*"),
    ("encoder.ln.*", "norm.*"),
    ("heads.pre_logits.*", "head.pre_logits.*"),
    ("heads.head.*", "head.classifier.*"),
)


def matches(tensors: Tensors) -> bool:
    return "encoder.pos_embedding" in tensors and "conv_proj.weight" in tensors


def read(tensors: Tensors, about: Any = None, given: dict[str, Any] | None = None) -> Checkpoint:
    given, notes = dict(given or {}), []
    lazy = NAMES.renamed(tensors)
    width, channels, *patch = need(lazy, "patches.weight", 4)
    grid, _ = find_grid(need(lazy, "positions.learned", 3)[1], [1], (patch[0], patch[1]), given.get("image_size"))
    head, pre = "head.classifier.weight", "head.pre_logits.weight"
    notes.append("preprocessing: not in the file, torchvision's (resize 256, crop 224, ImageNet statistics) is assumed")
    config = make_config(
        given,
        image_size=(grid[0] * patch[0], grid[1] * patch[1]),
        patch_size=(patch[0], patch[1]),
        channels=channels,
        width=width,
        depth=count(lazy, "encoder.blocks.{i}.norm1.weight"),
        heads=guess_heads(width, given, notes),
        mlp_width=need(lazy, "encoder.blocks.0.mlp.up.weight", 2)[0],
        classes=need(lazy, head, 2)[0] if head in lazy else 0,
        pre_logits=need(lazy, pre, 2)[0] if pre in lazy else 0,
        position_resize="torchvision",
        preprocessing={**IMAGENET, "crop": 0.875, "fit": "crop", "interpolation": "bilinear"},
    )
    converted = {name: without_leading_axis(name, lazy[name]) for name in lazy}
    return Checkpoint(config, converted, None, notes, "torchvision", NAMES.theirs)


def write(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], list[str]]:
    config = only(checkpoint.config, "torchvision's ViT", stem=None, **PAPER)
    if config.image_size[0] != config.image_size[1] or config.patch_size[0] != config.patch_size[1]:
        raise CheckpointError("torchvision's ViT wants square pictures and patches; use --to native")
    foreign = {NAMES.theirs(name) or name: tensor for name, tensor in conv_patches(checkpoint).items()}
    for name in ("class_token", "encoder.pos_embedding"):
        foreign[name] = foreign[name][None]
    meant = {"norm_eps": 1e-6, "activation": "gelu", "position_resize": "torchvision"}
    notes = not_kept(config, "torchvision's ViT", **meant)
    return foreign, [*notes, f"the number of heads is not kept: read it with heads={config.heads}"]
