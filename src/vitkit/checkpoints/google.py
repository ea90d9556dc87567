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
    PAPER,
    Checkpoint,
    NameMap,
    Tensors,
    conv_patches,
    make_config,
    not_kept,
    note_assumptions,
    only,
    renamed,
    resnet_of,
)

BLOCK = "Transformer/encoderblock_{i}"
UNIT, OUR_UNIT = "block{s}/unit{u}", "stem.stages.{s}.{u}"  # counted from 1 in the file, from 0 here: see _count_from
NAMES = NameMap(
    ("conv_root/kernel", "stem.root.weight"),
    *flax.norm("gn_root", "stem.norm"),
    (f"{UNIT}/conv{{n}}/kernel", f"{OUR_UNIT}.conv{{n}}.weight"),
    *flax.norm(f"{UNIT}/gn{{n}}", f"{OUR_UNIT}.norm{{n}}"),
    (f"{UNIT}/conv_proj/kernel", f"{OUR_UNIT}.shortcut.0.weight"),
    *flax.norm(f"{UNIT}/gn_proj", f"{OUR_UNIT}.shortcut.1"),
    *flax.dense("embedding", "patches"),
    ("cls", "class_token"),
    ("Transformer/posembed_input/pos_embedding", "positions.learned"),
    *flax.norm(f"{BLOCK}/LayerNorm_0", "encoder.blocks.{i}.norm1"),
    *flax.attention(f"{BLOCK}/MultiHeadDotProductAttention_1", "encoder.blocks.{i}.attention"),
    *flax.norm(f"{BLOCK}/LayerNorm_2", "encoder.blocks.{i}.norm2"),
    *flax.mlp(f"{BLOCK}/MlpBlock_3", "encoder.blocks.{i}.mlp"),
    *flax.norm("Transformer/encoder_norm", "norm"),
    *flax.dense("pre_logits", "head.pre_logits"),
    *flax.dense("head", "head.classifier"),
)


def matches(tensors: Tensors) -> bool:
    return any(name.endswith("Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel") for name in tensors)


def read(tensors: Tensors, about: Any = None, given: dict[str, Any] | None = None) -> Checkpoint:
    given = dict(given or {})
    notes: list[str] = []
    lazy = NAMES.renamed(renamed(flax.without_prefix(tensors, notes), lambda name: _count_from(0, name)))
    fields = flax.body_fields(lazy)
    size, prefix = flax.image_size(lazy, fields["patch_size"], [1, 0], given.get("image_size"))
    fields |= {"image_size": size, "positioned_prefix": "all" if prefix else "none"}
    fields["pooling"] = "cls" if fields["class_token"] else "mean"
    note_assumptions(fields, notes)
    notes.append(flax.ASSUMED)
    if "activation" not in given:
        notes.append("activation: not in the file, the exact GELU is assumed")
    config = make_config(given, **fields)
    converted = fuse(lazy, partial(flax.from_flax, config=config))
    return Checkpoint(config, converted, None, notes, "google", _in_file)


def write(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors under Google's names and in flax's layout, and what the format cannot say."""
    config = only(checkpoint.config, "Google's format", **PAPER | {"positioned_prefix": "all"})
    tensors = split(conv_patches(checkpoint))
    foreign = {_in_file(name) or name: flax.to_flax(name, t, config.heads) for name, t in tensors.items()}
    notes = not_kept(config, "Google's format", norm_eps=1e-6, activation="gelu", position_resize="official")
    stem = resnet_of(config, "Google's format")
    if stem and stem.numerics != "official":
        notes.append("stem.numerics='timm' is not kept: Google's format means 'official' (logits differ by about 1e-4)")
    return foreign, notes


def _count_from(first: int, name: str) -> str:
    change = -1 if first == 0 else 1
    return re.sub(
        r"^block(\d+)/unit(\d+)/", lambda m: f"block{int(m[1]) + change}/unit{int(m[2]) + change}/", name, count=1
    )


def _in_file(name: str) -> str | None:
    theirs = NAMES.theirs(name)
    return None if theirs is None else _count_from(1, theirs)
