"""Google's vit_jax checkpoints (.npz), plain and hybrid <-> vitkit.

Activation: the released weights are read with the exact GELU, as every PyTorch port does; the JAX code
itself runs flax's default, the tanh form. `load(..., activation="gelu-tanh")` chooses that one.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from torch import Tensor

from vitkit.checkpoints import flax
from vitkit.checkpoints.fused import fuse, split
from vitkit.checkpoints.layout import (
    Checkpoint,
    NameMap,
    Tensors,
    make_config,
    not_kept,
    note_assumptions,
    of,
    only,
    renamed,
    resnet_of,
)
from vitkit.model.patches import linear_to_conv

BLOCK = "Transformer/encoderblock_{i}"
ATTENTION = f"{BLOCK}/MultiHeadDotProductAttention_1"
# The stem's stages and units count from 1 in the file, and from 0 here: see _count_from.
NAMES = NameMap(
    ("conv_root/kernel", "stem.root.weight"),
    ("gn_root/scale", "stem.norm.weight"),
    ("gn_root/bias", "stem.norm.bias"),
    ("block{s}/unit{u}/conv{n}/kernel", "stem.stages.{s}.{u}.conv{n}.weight"),
    ("block{s}/unit{u}/gn{n}/scale", "stem.stages.{s}.{u}.norm{n}.weight"),
    ("block{s}/unit{u}/gn{n}/bias", "stem.stages.{s}.{u}.norm{n}.bias"),
    ("block{s}/unit{u}/conv_proj/kernel", "stem.stages.{s}.{u}.shortcut.0.weight"),
    ("block{s}/unit{u}/gn_proj/scale", "stem.stages.{s}.{u}.shortcut.1.weight"),
    ("block{s}/unit{u}/gn_proj/bias", "stem.stages.{s}.{u}.shortcut.1.bias"),
    ("embedding/kernel", "patches.weight"),
    ("embedding/bias", "patches.bias"),
    ("cls", "class_token"),
    ("Transformer/posembed_input/pos_embedding", "positions.learned"),
    (f"{BLOCK}/LayerNorm_0/scale", "encoder.blocks.{i}.norm1.weight"),
    (f"{BLOCK}/LayerNorm_0/bias", "encoder.blocks.{i}.norm1.bias"),
    (f"{ATTENTION}/query/kernel", "encoder.blocks.{i}.attention.query.weight"),
    (f"{ATTENTION}/query/bias", "encoder.blocks.{i}.attention.query.bias"),
    (f"{ATTENTION}/key/kernel", "encoder.blocks.{i}.attention.key.weight"),
    (f"{ATTENTION}/key/bias", "encoder.blocks.{i}.attention.key.bias"),
    (f"{ATTENTION}/value/kernel", "encoder.blocks.{i}.attention.value.weight"),
    (f"{ATTENTION}/value/bias", "encoder.blocks.{i}.attention.value.bias"),
    (f"{ATTENTION}/out/kernel", "encoder.blocks.{i}.attention.out.weight"),
    (f"{ATTENTION}/out/bias", "encoder.blocks.{i}.attention.out.bias"),
    (f"{BLOCK}/LayerNorm_2/scale", "encoder.blocks.{i}.norm2.weight"),
    (f"{BLOCK}/LayerNorm_2/bias", "encoder.blocks.{i}.norm2.bias"),
    (f"{BLOCK}/MlpBlock_3/Dense_0/kernel", "encoder.blocks.{i}.mlp.up.weight"),
    (f"{BLOCK}/MlpBlock_3/Dense_0/bias", "encoder.blocks.{i}.mlp.up.bias"),
    (f"{BLOCK}/MlpBlock_3/Dense_1/kernel", "encoder.blocks.{i}.mlp.down.weight"),
    (f"{BLOCK}/MlpBlock_3/Dense_1/bias", "encoder.blocks.{i}.mlp.down.bias"),
    ("Transformer/encoder_norm/scale", "norm.weight"),
    ("Transformer/encoder_norm/bias", "norm.bias"),
    ("pre_logits/kernel", "head.pre_logits.weight"),
    ("pre_logits/bias", "head.pre_logits.bias"),
    ("head/kernel", "head.classifier.weight"),
    ("head/bias", "head.classifier.bias"),
)


def matches(tensors: Tensors) -> bool:
    return any(name.endswith("Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel") for name in tensors)


def read(tensors: Tensors, about: Any = None, given: dict[str, Any] | None = None) -> Checkpoint:
    given = dict(given or {})
    notes: list[str] = []
    tensors = flax.without_prefix(of(tensors), notes)
    lazy = flax.to_our_names(renamed(tensors, lambda name: _count_from(0, name)), NAMES)
    fields = flax.body_fields(lazy)
    size, prefix = flax.image_size(lazy, fields["patch_size"], [1, 0], given.get("image_size"))
    fields |= {"image_size": size, "positioned_prefix": "all" if prefix else "none"}
    fields["pooling"] = "cls" if fields["class_token"] else "mean"
    note_assumptions(fields, notes)
    config = make_config(given, **fields)
    converted = fuse(lazy, partial(flax.from_flax, config=config))
    return Checkpoint(config, converted, None, notes, "google", _in_file)


def write(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors under Google's names and in flax's layout, and what the format cannot say."""
    config = only(
        checkpoint.config,
        "Google's format",
        positions="learned",
        positioned_prefix="all",
        class_token=True,
        distillation_token=False,
        registers=0,
        pre_norm=False,
        layer_scale=None,
        qkv_bias=True,
        activation=("gelu", "gelu-tanh"),
        pooling="cls",
        norm_after_pooling=False,
        projection=0,
    )
    tensors = split(conv_patches(checkpoint))
    foreign = {_in_file(name) or name: flax.to_flax(name, t, config.heads) for name, t in tensors.items()}
    notes = not_kept(config, "Google's format", norm_eps=1e-6, activation="gelu", position_resize="official")
    stem = resnet_of(config, "Google's format")
    if stem and stem.numerics != "official":
        notes.append("stem.numerics='timm' is not kept: Google's format means 'official' (logits differ by about 1e-4)")
    return foreign, notes


def conv_patches(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors with the patch embedding as a convolution, which is what other systems hold."""
    config = only(checkpoint.config, "this format")
    tensors = dict(checkpoint.tensors)
    if config.patch_embedding == "linear":
        stride = config.stem.stride if config.stem else 1
        patch = (config.patch_size[0] // stride, config.patch_size[1] // stride)
        tensors["patches.weight"] = linear_to_conv(tensors["patches.weight"], patch)
    return tensors


def _count_from(first: int, name: str) -> str:
    change = -1 if first == 0 else 1
    return re.sub(
        r"^block(\d+)/unit(\d+)/", lambda m: f"block{int(m[1]) + change}/unit{int(m[2]) + change}/", name, count=1
    )


def _in_file(name: str) -> str | None:
    theirs = NAMES.theirs(name)
    return None if theirs is None else _count_from(1, theirs)
