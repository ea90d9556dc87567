"""Google's big_vision checkpoints (.npz): one entry per layer or all layers stacked, MAP head, sin-cos <-> vitkit.

Positions are added before the class token is put in front, so the table has no row for it. Activation:
as in `google.py`, the exact GELU unless `activation="gelu-tanh"` is asked for.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints import flax
from vitkit.checkpoints.fused import fuse, split
from vitkit.checkpoints.layout import (
    PAPER,
    Checkpoint,
    LazyTensors,
    NameMap,
    Tensors,
    conv_patches,
    make_config,
    not_kept,
    note_assumptions,
    only,
)
from vitkit.errors import CheckpointError

BLOCK = "Transformer/encoderblock_{i}"
POOL = "MAPHead_0"
NAMES = NameMap(  # each after the prefix params/
    *flax.dense("embedding", "patches"),
    ("cls", "class_token"),
    ("pos_embedding", "positions.learned"),
    *flax.norm(f"{BLOCK}/LayerNorm_0", "encoder.blocks.{i}.norm1"),
    *flax.attention(f"{BLOCK}/MultiHeadDotProductAttention_0", "encoder.blocks.{i}.attention"),
    *flax.norm(f"{BLOCK}/LayerNorm_1", "encoder.blocks.{i}.norm2"),
    *flax.mlp(f"{BLOCK}/MlpBlock_0", "encoder.blocks.{i}.mlp"),
    *flax.norm("Transformer/encoder_norm", "norm"),
    (f"{POOL}/probe", "head.pool.probe"),
    *flax.attention(f"{POOL}/MultiHeadDotProductAttention_0", "head.pool"),
    *flax.norm(f"{POOL}/LayerNorm_0", "head.pool.norm"),
    *flax.mlp(f"{POOL}/MlpBlock_0", "head.pool.mlp"),
    *flax.dense("pre_logits", "head.pre_logits"),
    *flax.dense("head", "head.classifier"),
)
_BLOCK_PART = re.compile(r"Transformer/encoderblock(?:_\d+)?/MlpBlock_0/Dense_0/kernel")


def matches(tensors: Tensors) -> bool:
    return any(_BLOCK_PART.search(name) for name in tensors)


def read(tensors: Tensors, about: Any = None, given: dict[str, Any] | None = None) -> Checkpoint:
    given = dict(given or {})
    notes: list[str] = []
    lazy = NAMES.renamed(_unstacked(flax.without_prefix(tensors, notes)))
    fields = flax.body_fields(lazy)
    patch = fields["patch_size"]
    if "positions.learned" in lazy:
        fields["image_size"], prefix = flax.image_size(lazy, patch, [0, 1], given.get("image_size"))
        fields["positioned_prefix"] = "all" if prefix else "none"
    else:
        size = given.get("image_size") or (224 // patch[0] * patch[0], 224 // patch[1] * patch[1])
        fields |= {"positions": "sincos-2d", "positioned_prefix": "none", "image_size": size}
        if "image_size" not in given:
            notes.append(f"no position table (sin-cos): the picture size is not in the file, {size[0]} is assumed")
    fields["pooling"] = "map" if "head.pool.probe" in lazy else "cls" if fields["class_token"] else "mean"
    note_assumptions(fields, notes)
    notes.append(flax.ASSUMED)
    if "activation" not in given:
        notes.append("activation: not in the file, the exact GELU is assumed")
    config = make_config(given, **fields)
    converted = fuse(lazy, partial(flax.from_flax, config=config))
    return Checkpoint(config, converted, None, notes, "big_vision", NAMES.theirs)


def _unstacked(tensors: LazyTensors) -> LazyTensors:
    """Layers stacked along a first axis (flax's scan) as one entry per layer."""
    start = "Transformer/encoderblock/"
    stacked = [name for name in tensors if name.startswith(start)]
    if not stacked:
        return tensors
    depths = {tensors.shape(name)[:1] for name in stacked}
    if len(depths) != 1 or not (depth := next(iter(depths))):
        raise CheckpointError(f"the stacked layers have different numbers of layers ({sorted(depths)}): damaged file")
    if not 0 < depth[0] <= 10_000:
        raise CheckpointError(f"{depth[0]} stacked layers are declared, which is not believable")
    table = {name: entry for name, entry in tensors.table.items() if name not in stacked}
    where: dict[str, tuple[str, int]] = {}
    for i in range(depth[0]):
        for name in stacked:
            one = f"Transformer/encoderblock_{i}/{name.removeprefix(start)}"
            table[one] = (tensors.shape(name)[1:], tensors.dtype(name))
            where[one] = (name, i)
    kept: dict[str, Tensor] = {}  # each stack is read once

    def read_one(name: str) -> Tensor:
        if name not in where:
            return tensors[name]
        stack, i = where[name]
        if stack not in kept:
            kept[stack] = tensors[stack]
        return kept[stack][i]

    return LazyTensors(table, read_one)


def write(checkpoint: Checkpoint, stacked: bool = False) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors under big_vision's names, and what the format cannot say. `stacked`: all layers in one array."""
    more: dict[str, Any] = {
        "stem": None,
        "positions": ("learned", "sincos-2d"),
        "positioned_prefix": ("all", "class", "none"),
        "class_token": (True, False),
        "pooling": ("cls", "mean", "map"),
    }
    config = only(checkpoint.config, "big_vision's format", **PAPER | more)
    if config.pooling == "mean" and config.class_token:
        raise CheckpointError("big_vision's format cannot hold mean pooling beside a class token; use --to native")
    tensors = conv_patches(checkpoint)
    notes = not_kept(config, "big_vision's format", norm_eps=1e-6, activation="gelu", position_resize="official")
    if config.class_token and config.positions == "learned" and config.positioned_prefix != "none":
        table = tensors["positions.learned"]
        tensors |= {"class_token": tensors["class_token"] + table[:1], "positions.learned": table[1:]}
        notes.append("the class token's position is added to the class token, as the format has no row for it")
    foreign = {
        f"params/{NAMES.theirs(name) or name}": flax.to_flax(name, tensor, config.heads)
        for name, tensor in split(tensors).items()
    }
    return (_stack(foreign, config.depth) if stacked else foreign), notes


def _stack(tensors: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    first = "params/Transformer/encoderblock_0/"
    parts = [name.removeprefix(first) for name in tensors if name.startswith(first)]
    rest = {name: t for name, t in tensors.items() if "/encoderblock_" not in name}
    layers = range(depth)
    return rest | {
        f"params/Transformer/encoderblock/{part}": torch.stack(
            [tensors[f"params/Transformer/encoderblock_{i}/{part}"] for i in layers]
        )
        for part in parts
    }
