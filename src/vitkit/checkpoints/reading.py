"""What readers share: shapes of tensors -> configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from vitkit.checkpoints.family import Checkpoint, Fields
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import LazyTensors
from vitkit.errors import CheckpointError, ConfigError
from vitkit.model.config import Size, StemConfig, ViTConfig, as_size

IMAGENET: Fields = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
Numerics = Literal["official", "timm"]  # whose small numbers a ResNet stem has
_UNSUPPORTED = {  # part of a tensor's name -> what it shows
    ".lambda_": "differential attention",
    ".attn.rel_pos_h": "SAM's attention in windows",
    "patch_embed.backbone.0.": "MobileCLIP's MCI stem",
    "embeds.": "NaFlex models, which take batches of patches of several image sizes",
    ".attn.gate.": "gated attention",
    "relative_position_bias_for_": "relative positions with a table for rows and one for columns",
    "attn_pool.query": "attentional pooling (CoCa)",
}
FIRST = "encoder.blocks.0."
_FIRST_OF = {"v2": "stem.root.weight", "d": "stem.root.0.weight"}  # what sees the image
# Fields that a tensor shows by being there, or by being absent; and by its number of rows.
_PRESENT = {"class_token": "class_token", "distillation_token": "distillation_token", "pre_norm": "pre_norm.weight"}
_PRESENT |= {"norm_after_pooling": "head.norm.weight"}
_IN_BLOCK = {"qk_norm": "attention.query_norm.weight", "attention_norm": "attention.norm.weight"}
_IN_BLOCK |= {"mlp_norm": "mlp.norm.weight", "out_bias": "attention.out.bias", "mlp_bias": "mlp.down.bias"}
_ROWS = {"classes": "head.classifier.weight", "registers": "registers"}
_ROWS |= {"pre_logits": "head.pre_logits.weight", "projection": "head.projection.weight"}


def body_of(tensors: LazyTensors, numerics: Numerics = "timm") -> tuple[Size, int, Fields]:
    """The patch size, the width, and all fields that tensors with our names and in our layout tell in every family."""
    refuse_unsupported(tensors)
    width, channels, *kernel = tensors.need("patches.weight", 4)
    stem = _stem_of(tensors, numerics)
    stride = stem.stride if stem else 1
    patch = (kernel[0] * stride, kernel[1] * stride)
    fields: Fields = {
        "patch_size": patch,
        "channels": tensors.need(_FIRST_OF[stem.variant], 4)[1] if stem else channels,
        "width": width,
        "stem": stem,
        "patch_norms": tuple(side for side in ("before", "after") if f"patches.norm_{side}.weight" in tensors),
        "final_norm": "norm.weight" in tensors or "head.norm.weight" in tensors,
    }
    fields |= {field: name in tensors for field, name in _PRESENT.items()}
    fields["patch_bias"] = "patches.bias" in tensors or not fields["pre_norm"]  # CLIP and the like have none
    fields |= {field: tensors.rows(name) for field, name in _ROWS.items()}
    return patch, width, fields | _blocks_of(tensors)


def refuse_unsupported(tensors: LazyTensors) -> None:
    for name in tensors:
        if what := next((what for part, what in _UNSUPPORTED.items() if part in name), None):
            raise CheckpointError(f"not supported: {what}, shown by the tensor {name!r}; vitkit has no such ViT")


def _blocks_of(tensors: LazyTensors) -> Fields:
    """What the first block shows; with several branches, the first of them."""
    branches = len(_numbers(tensors, r"encoder\.blocks\.0\.branches\.(\d{1,6})\.norm1\.weight"))
    first = f"{FIRST}branches.0." if branches else FIRST
    tensors.need(f"{first}norm1.weight", 1)
    part = r"(?:branches\.0\.)?norm1\.weight"
    fields: Fields = {
        "depth": 1 + max(i for (i,) in _numbers(tensors, rf"encoder\.blocks\.(\d{{1,6}})\.{part}")),
        "mlp_width": tensors.need(f"{first}mlp.down.weight", 2)[1],
        "branches": branches or 1,
        "norm": "layernorm" if f"{first}norm1.bias" in tensors else "rmsnorm",
        "layer_scale": 1e-5 if f"{first}scale1" in tensors else None,
        "qkv_bias": any(f"{first}attention.{name}" in tensors for name in ("qkv.bias", "query_bias")),
        "key_bias": f"{first}attention.query_bias" not in tensors,
    }
    return fields | {field: first + name in tensors for field, name in _IN_BLOCK.items()}


def _numbers(tensors: LazyTensors, pattern: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, match.groups())) for name in tensors if (match := re.fullmatch(pattern, name))]


def _stem_of(tensors: LazyTensors, numerics: Numerics) -> StemConfig | None:
    """The ResNet in front of a hybrid, or None."""
    deep = "stem.root.0.weight" in tensors  # of a ResNet-D
    if "stem.root.weight" not in tensors and not deep:
        return None
    width, _, kernel, _ = tensors.need("stem.root.2.weight" if deep else "stem.root.weight", 4)
    units: dict[int, int] = {}
    for stage, unit in sorted(_numbers(tensors, r"stem\.stages\.(\d+)\.(\d+)\.conv1\.weight")):
        units[stage] = unit + 1
    layers = tuple(units.values())
    if list(units) != list(range(len(units))) or len(units) > 8 or sum(layers) > len(tensors):
        raise CheckpointError(f"the stages of the ResNet stem are numbered {list(units)}: some are missing")
    if deep:
        return StemConfig(layers, width, variant="d")
    return StemConfig(layers, width, "imagenet" if kernel == 7 else "small", numerics)


HEADS_BY_WIDTH = {1280: 16, 1408: 16, 1664: 16}  # of published models; all others have 64 channels per head
NARROWEST = 192  # of published models: ViT-Ti


def guess_heads(width: int, options: ModelOptions, notes: list[str]) -> int:
    """Heads cannot be seen in fused weights."""
    if options.heads is not None:
        return options.heads
    if width < NARROWEST or (width % 64 and width not in HEADS_BY_WIDTH):
        unknown = f"the file does not say how many heads its layers of width {width} have"
        raise CheckpointError(f"{unknown}, and no published model has this width: pass heads=N (--heads N)")
    heads = HEADS_BY_WIDTH.get(width, width // 64)
    notes.append(f"{heads} heads: not in the file, published models have so many; else pass heads=N (--heads N)")
    return heads


def image_size_of(tensors: LazyTensors, prefixes: Sequence[int], patch: Size, wanted: Size | None) -> tuple[Size, int]:
    """The image size that the position table was trained for, and how many of its rows come before the patches.

    `prefixes` are the possible numbers of such rows, likeliest first. The grid is the one of the `wanted`
    image size if that fits, or else a square.
    """
    rows = tensors.need("positions.learned", 2)[0]
    grids = [(wanted[0] // patch[0], wanted[1] // patch[1], prefix) for prefix in prefixes] if wanted else []
    grids += [(side := round(max(0, rows - prefix) ** 0.5), side, prefix) for prefix in prefixes]
    for h, w, prefix in grids:
        if h * w and h * w + prefix == rows:
            return (h * patch[0], w * patch[1]), prefix
    wrong = f"{rows} rows is not a square grid of patches (with {' or '.join(map(str, prefixes))} rows before it)"
    stated = "say which image size it was trained for, image_size=(height, width) (--image-size HxW)"
    raise CheckpointError(f"a position table of {wrong}: {stated}")


def assumed_size(patch: Size, wanted: Size | None, notes: list[str]) -> Size:
    """The image size of a model without a position table."""
    if wanted:
        return wanted
    h, w = 224 // patch[0] * patch[0], 224 // patch[1] * patch[1]
    notes.append(f"no position table (sin-cos, or none): the image size is not in the file, {h}x{w} is assumed")
    return h, w


def pool_apart(tensors: LazyTensors) -> LazyTensors:
    """Attention pooling with one matrix for query, key and value -> the query's, and the other two's."""
    recipes: dict[str, tuple[tuple[str], Callable[[Tensor], Tensor]]] = {}
    for name in [n for n in tensors if n.startswith("head.pool.in.")]:
        recipes[name.replace(".in.", ".query.")] = ((name,), lambda t: t[: len(t) // 3])
        recipes[name.replace(".in.", ".key_value.")] = ((name,), lambda t: t[len(t) // 3 :])
    return tensors.rebuilt(recipes)


def make_checkpoint(
    tensors: LazyTensors, options: ModelOptions, notes: list[str], in_file: Callable[[str], str], **fields: object
) -> Checkpoint:
    """From tensors with our names; `fields` of the configuration are what the file tells, the user's come first."""
    fields |= options.stated
    pre = fields.get("preprocessing")
    if isinstance(pre, dict):
        if fields.get("channels", 3) != 3:  # published statistics are for RGB
            pre = {k: (sum(v) / len(v),) if k in ("mean", "std") else v for k, v in pre.items()}
        fields["preprocessing"] = {"size": fields["image_size"], **pre}
    try:
        config = ViTConfig.from_dict(fields)
    except (ConfigError, TypeError) as e:
        raise CheckpointError(f"the tensors do not make a model that can be built: {e}") from e
    if "patches.bias" not in tensors and config.pre_norm and config.patch_bias:  # where CLIP leaves it out
        bias = torch.zeros(config.width, dtype=tensors.outlines["patches.weight"].dtype)
        outlines, others = {**tensors.outlines, "patches.bias": bias.to("meta")}, tensors
        tensors = LazyTensors(outlines, lambda name: bias if name == "patches.bias" else others[name])
    return Checkpoint(config, tensors, notes=notes, in_file=in_file)


def rare(fields: Fields) -> list[str]:
    """Notes of what is rare enough to be a sign of a damaged file."""
    height, width = as_size(fields["patch_size"], "patch_size")
    notes = [f"patches of {height}x{width} pixels, which are not square"] if height != width else []
    return notes if fields["class_token"] else [*notes, f"no class token in the file: pooling is {fields['pooling']!r}"]
