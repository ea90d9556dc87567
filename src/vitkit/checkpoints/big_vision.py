"""Google's big_vision checkpoints (.npz): one entry per layer or all layers stacked, MAP head, sin-cos <-> vitkit.

Positions are added before the class token is put in front, so the table has no row for it. What a file
does not say is as in `google.py`.
"""

from __future__ import annotations

import re
from functools import cache

from vitkit.checkpoints import google, writing
from vitkit.checkpoints.family import Checkpoint, Fields, Opened, Written
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import LazyTensors, NameMap
from vitkit.errors import CheckpointError

ATTENTION, POOL = "MultiHeadDotProductAttention_0", "MAPHead_0"
NAMES = NameMap(  # each after the prefix params/
    ("embedding/kernel*", "patches.*"),
    ("cls", "class_token"),
    ("pos_embedding", "positions.learned"),
    *google.flax_block("LayerNorm_0", ATTENTION, "LayerNorm_1", "MlpBlock_0"),
    ("Transformer/encoder_norm/scale*", "norm.*"),
    (f"{POOL}/probe", "head.pool.probe"),
    *((f"{POOL}/{ATTENTION}/{theirs}", f"head.pool.{ours}.*") for ours, theirs in google.ATTENTION.items()),
    (f"{POOL}/LayerNorm_0/scale*", "head.pool.norm.*"),
    *((f"{POOL}/MlpBlock_0/{theirs}", f"head.pool.mlp.{ours}.*") for ours, theirs in google.MLP.items()),
    ("pre_logits/kernel*", "head.pre_logits.*"),
    ("head/kernel*", "head.classifier.*"),
)
HELD: Fields = writing.PAPER | {"stem": None, "positions": ("learned", "sincos-2d"), "class_token": (True, False)}
HELD |= {"positioned_prefix": ("all", "class", "none"), "pooling": ("cls", "mean", "map")}


def matches(opened: Opened) -> bool:
    return any(re.search(r"Transformer/encoderblock(_\d+)?/MlpBlock_0/Dense_0/kernel", n) for n in opened.tensors)


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    notes: list[str] = []
    named = _unstacked(opened.tensors.tower(google.TOWERS, "embedding/kernel", notes)).renamed(NAMES.ours)
    return google.read_flax(named, options, notes, NAMES.theirs, [0, 1])


def _unstacked(tensors: LazyTensors) -> LazyTensors:
    """Layers stacked along a first axis (flax's scan) as one entry per layer."""
    start = "Transformer/encoderblock/"
    outlines = {name: outline for name, outline in tensors.outlines.items() if not name.startswith(start)}
    stacked = [name for name in tensors if name not in outlines]
    depths = {tuple(tensors.outlines[name].shape[:1]) for name in stacked}
    if len(depths) > 1 or () in depths or (depths and not 0 < max(depths)[0] <= 10_000):
        raise CheckpointError(f"the stacked layers have different or unbelievable depths ({sorted(depths)}): damaged")
    where: dict[str, tuple[str, int]] = {}
    for i in range(max(depths)[0] if depths else 0):
        for name in stacked:
            one = f"Transformer/encoderblock_{i}/{name.removeprefix(start)}"
            where[one], outlines[one] = (name, i), tensors.outlines[name][i]
    whole = cache(tensors.__getitem__)  # each stack is read once
    return LazyTensors(outlines, lambda name: whole(where[name][0])[where[name][1]] if name in where else tensors[name])


def write(checkpoint: Checkpoint) -> Written:
    config, tensors = writing.held(checkpoint, "big_vision's format", **HELD)
    if config.pooling == "mean" and config.class_token:
        raise CheckpointError("big_vision's format cannot hold mean pooling beside a class token; use --to native")
    notes = writing.not_kept(config, "big_vision's format", google.MEANT, pillow=False)
    if config.class_token and config.positions == "learned" and config.positioned_prefix != "none":
        notes.append(writing.fold_class_row(tensors, 1))
    return Written(google.to_flax(tensors, config.heads, lambda name: f"params/{NAMES.theirs(name)}"), notes)
