"""Meta's own DINOv3 files (.pth) -> vitkit.

timm's names with a few of their own. The file keeps the periods of its rotary positions, whose number tells the heads
and whose values tell the base; LayerNorm's epsilon is 1e-5 in all published ones. The biases of keys are masked.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from vitkit.checkpoints import reading, timm
from vitkit.checkpoints.family import Checkpoint, Fields, Opened
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import LazyTensors, NameMap, block, without_leading_axis
from vitkit.errors import CheckpointError
from vitkit.model.config import RotaryConfig

BLOCK, PERIODS = "blocks.{i}.", "rope_embed.periods"
NAMES = NameMap(
    ("cls_token", "class_token"),
    ("storage_tokens", "registers"),
    ("patch_embed.proj.*", "patches.*"),
    *block(BLOCK, norm1="norm1.*", qkv="attn.qkv.*", out="attn.proj.*", scale1="ls1.gamma"),
    *block(BLOCK, norm2="norm2.*", up="mlp.fc1.*", down="mlp.fc2.*", scale2="ls2.gamma"),
    *block(BLOCK, gate="mlp.w1.*", gated="mlp.w2.*", down="mlp.w3.*"),
    ("norm.*", "norm.*"),
    ("head.*", "head.classifier.*"),
    ("linear_head.*", "head.classifier.*"),
)
# Of pre-training: `local_cls_norm` is not read in evaluation.
_LEFT_OUT = re.compile(
    r"mask_token|rope_embed\..*|.*\.bias_mask|local_cls_norm\..*|projectors?\..*|(dino|ibot)_head\..*"
)


def matches(opened: Opened) -> bool:
    own = PERIODS in opened.tensors or "storage_tokens" in opened.tensors
    return own and "patch_embed.proj.weight" in opened.tensors and "blocks.0.norm1.weight" in opened.tensors


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    notes, foreign = list[str](), opened.tensors
    if "cls_norm.weight" in foreign:
        raise CheckpointError("not supported: a norm of the class token apart from that of the patches (cls_norm)")
    kept = foreign.renamed(lambda name: None if _LEFT_OUT.fullmatch(name) else NAMES.ours(name), notes, "of training")
    tensors = kept.converted(without_leading_axis).fused()
    tensors = tensors.rebuilt(_unmasked(tensors, foreign))
    patch, width, fields = reading.body_of(tensors)
    fields |= _rotary(foreign, width, options, notes)
    if tensors.rows("encoder.blocks.0.mlp.up.weight") == 2 * tensors.need("encoder.blocks.0.mlp.down.weight", 2)[1]:
        fields["activation"] = "swiglu"
    size = options.image_size or (224 // patch[0] * patch[0], 224 // patch[1] * patch[1])
    notes.append("preprocessing: not in the file, ImageNet statistics are assumed (satellite models have others)")
    pre: Fields = {**reading.IMAGENET, "fit": "squash", "interpolation": "bicubic"}
    fields |= {"positions": "none", "image_size": size, "norm_eps": _epsilon(tensors, options, notes)}
    fields |= {"pooling": "cls", "preprocessing": pre}
    if "linear_head.weight" in foreign:
        fields |= timm.linear_head(foreign)
    return reading.make_checkpoint(tensors, options, notes, NAMES.theirs, **fields)


def _epsilon(tensors: LazyTensors, options: ModelOptions, notes: list[str]) -> object:
    """1e-5 where biases of keys are masked or there are none, as in all published models; else either may be."""
    if "encoder.blocks.0.attention.qkv.bias" in tensors and "norm_eps" not in options.fields:
        own = "no published DINOv3 has biases of keys, and the file does not say the epsilon of its norms"
        asked = "norm_eps=1e-6 (norm_layer: layernorm, the default of its training) or norm_eps=1e-5 (layernormbf16)"
        raise CheckpointError(f"{own}: pass {asked} (--set norm_eps=...)")
    notes.append("not in the file, but common to all published DINOv3: norm_eps=1e-05, each axis spans -1 to 1")
    return 1e-5


def _unmasked(tensors: LazyTensors, foreign: LazyTensors) -> dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]]:
    """Biases of queries and values; those of keys are multiplied by zero, and no part of the model."""
    recipes: dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]] = {}
    for name in tensors:
        match = re.fullmatch(r"encoder\.(blocks\.\d+\.)attention\.qkv\.bias", name)
        if match and f"{match[1]}attn.qkv.bias_mask" in foreign:
            ours = f"encoder.{match[1]}attention."
            recipes[f"{ours}query_bias"] = ((name,), lambda t: t.chunk(3)[0].clone())
            recipes[f"{ours}value_bias"] = ((name,), lambda t: t.chunk(3)[2].clone())
    return recipes


def _rotary(foreign: LazyTensors, width: int, options: ModelOptions, notes: list[str]) -> Fields:
    """Heads and base from the periods, base ** (i / n) for n = a quarter of a head's width."""
    if PERIODS not in foreign:
        if options.heads is None or "rotary" not in options.fields:
            asked = 'heads=N and rotary={"kind": "box", "base": 100, "half": true} (--heads N --set rotary=...)'
            raise CheckpointError(f"the file has no {PERIODS!r}, which tells heads and rotary positions: pass {asked}")
        return {}
    count = foreign.need(PERIODS, 1)[0]
    if width % (4 * count) or count < 2:
        raise CheckpointError(
            f"{count} rotary periods do not fit a width of {width}: the file is damaged; fetch it again"
        )
    periods = foreign[PERIODS].double()
    if foreign.outlines[PERIODS].dtype != torch.float32:
        notes.append("rotary angles: Meta's code computes them in the periods' half precision, vitkit in full")
    base = float(periods[-1]) ** (count / (count - 1))
    base = float(round(base)) if abs(base - round(base)) < 0.01 * base else base  # they may be kept in bfloat16
    expected = base ** (torch.arange(count).double() / count)
    if not torch.allclose(periods, expected, rtol=0.01):
        raise CheckpointError("not supported: rotary periods that are no powers of one base (min_period, max_period)")
    rotary = RotaryConfig("box", base=base, half=True, rescale=2.0)
    return {"heads": width // (4 * count), "rotary": rotary}
