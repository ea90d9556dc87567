"""timm's VisionTransformer, its DeiT with a distillation token, and its ResNet hybrids <-> vitkit.

A state dict does not say everything: heads, the activation and LayerNorm's epsilon come from the
`config.json` of a hub folder, from its architecture's name, or from timm's defaults.
"""

from __future__ import annotations

from typing import Any

import torch

from vitkit.checkpoints.layout import (
    IMAGENET,
    Checkpoint,
    LazyTensors,
    NameMap,
    Shape,
    Tensors,
    count,
    find_grid,
    guess_heads,
    make_config,
    need,
    note_assumptions,
    of,
    renamed,
    without_leading_axis,
)
from vitkit.checkpoints.stems import stem_from_shapes
from vitkit.errors import CheckpointError

BODY = (
    ("cls_token", "class_token"),
    ("dist_token", "distillation_token"),
    ("reg_token", "registers"),
    ("pos_embed", "positions.learned"),
    ("patch_embed.proj.*", "patches.*"),
    ("norm_pre.*", "pre_norm.*"),
    ("blocks.{i}.norm1.*", "encoder.blocks.{i}.norm1.*"),
    ("blocks.{i}.attn.qkv.*", "encoder.blocks.{i}.attention.qkv.*"),
    ("blocks.{i}.attn.proj.*", "encoder.blocks.{i}.attention.out.*"),
    ("blocks.{i}.ls1.gamma", "encoder.blocks.{i}.scale1"),
    ("blocks.{i}.norm2.*", "encoder.blocks.{i}.norm2.*"),
    ("blocks.{i}.mlp.fc1.*", "encoder.blocks.{i}.mlp.up.*"),
    ("blocks.{i}.mlp.fc2.*", "encoder.blocks.{i}.mlp.down.*"),
    ("blocks.{i}.ls2.gamma", "encoder.blocks.{i}.scale2"),
    ("norm.*", "norm.*"),
    ("fc_norm.*", "head.norm.*"),
    ("attn_pool.latent", "head.pool.probe"),
    ("attn_pool.q.*", "head.pool.query.*"),
    ("attn_pool.kv.*", "head.pool.key_value.*"),
    ("attn_pool.proj.*", "head.pool.out.*"),
    ("attn_pool.norm.*", "head.pool.norm.*"),
    ("attn_pool.mlp.fc1.*", "head.pool.mlp.up.*"),
    ("attn_pool.mlp.fc2.*", "head.pool.mlp.down.*"),
    ("pre_logits.fc.*", "head.pre_logits.*"),
    ("head.*", "head.classifier.*"),
    ("head_dist.*", "head.distilled.*"),
)
STEM = (
    ("patch_embed.backbone.stem.conv.weight", "stem.root.weight"),
    ("patch_embed.backbone.stem.norm.*", "stem.norm.*"),
    ("patch_embed.backbone.stages.{s}.blocks.{u}.conv{n}.weight", "stem.stages.{s}.{u}.conv{n}.weight"),
    ("patch_embed.backbone.stages.{s}.blocks.{u}.norm{n}.*", "stem.stages.{s}.{u}.norm{n}.*"),
    ("patch_embed.backbone.stages.{s}.blocks.{u}.downsample.conv.weight", "stem.stages.{s}.{u}.shortcut.0.weight"),
    ("patch_embed.backbone.stages.{s}.blocks.{u}.downsample.norm.*", "stem.stages.{s}.{u}.shortcut.1.*"),
)
BARE_STEM = (  # R+Ti/16: a stem without stages
    ("patch_embed.backbone.conv.weight", "stem.root.weight"),
    ("patch_embed.backbone.norm.*", "stem.norm.*"),
)
NAMES = NameMap(*BODY, *STEM)
NAMES_BARE_STEM = NameMap(*BODY, *BARE_STEM)

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu-tanh", "quick_gelu": "quick-gelu", "silu": "swiglu"}


def matches(tensors: Tensors) -> bool:
    return "patch_embed.proj.weight" in tensors and "blocks.0.norm1.weight" in tensors


def read(tensors: Tensors, about: dict[str, Any] | None = None, given: dict[str, Any] | None = None) -> Checkpoint:
    """`about` is the config.json of a hub folder; `given` are fields of ViTConfig that the caller states."""
    about, given = about or {}, dict(given or {})
    tensors = modernized(of(tensors))
    refuse_variants(tensors)
    notes: list[str] = []
    names = NAMES_BARE_STEM if "patch_embed.backbone.conv.weight" in tensors else NAMES
    lazy = names.renamed(tensors)
    config = make_config(given, **_fields(lazy, about, given, notes))
    converted = {name: without_leading_axis(name, lazy[name]) for name in lazy}
    if "patches.bias" not in lazy and config.pre_norm:  # where timm leaves it out
        converted["patches.bias"] = torch.zeros(config.width, dtype=lazy.dtype("patches.weight"))
    return Checkpoint(config, converted, class_names(about, config.classes), notes, "timm", names.theirs)


def modernized(tensors: LazyTensors) -> LazyTensors:
    """Names of older code: LayerScale as `gamma_1`."""

    def new_name(name: str) -> str:
        return name.replace(".gamma_1", ".ls1.gamma").replace(".gamma_2", ".ls2.gamma")

    return renamed(tensors, new_name)


def refuse_variants(tensors: Tensors) -> None:
    for part, what in (
        ("blocks.0.attn.q_norm.weight", "normalised queries and keys (qk_norm)"),
        ("blocks.0.attn.norm.weight", "a norm inside attention"),
        ("blocks.0.mlp.norm.weight", "a norm inside the MLP"),
        ("blocks.0.mlp.fc1_g.weight", "an MLP with separate gates (timm's SwiGLU)"),
        ("blocks.0.attn.relative_position_bias_table", "BEiT's relative positions"),
        ("patch_embed.backbone.conv1.weight", "a ResNet-D backbone"),
    ):
        if part in tensors:
            raise CheckpointError(f"not supported: {what}, shown by the tensor {part!r}; vitkit has no such ViT")


def _fields(tensors: LazyTensors, about: dict[str, Any], given: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Everything of the configuration that shapes, names and config.json tell."""
    args, pretrained, architecture = _parts(about)
    width, _, *kernel = need(tensors, "patches.weight", 4)
    depth = count(tensors, "encoder.blocks.{i}.norm1.weight")
    stem = stem_from_shapes(tensors, numerics="timm")
    stride = stem.stride if stem else 1
    patch = (kernel[0] * stride, kernel[1] * stride)
    up, down = (need(tensors, f"encoder.blocks.0.mlp.{part}.weight", 2) for part in ("up", "down"))
    fields: dict[str, Any] = {
        "patch_size": patch,
        "channels": need(tensors, "stem.root.weight" if stem else "patches.weight", 4)[1],
        "width": width,
        "depth": depth,
        "heads": args.get("num_heads") or heads_of(architecture, width, given, notes),
        "mlp_width": down[1],
        "stem": stem,
        "activation": _activation(up, down, args, architecture),
        "qkv_bias": "encoder.blocks.0.attention.qkv.bias" in tensors,
        "layer_scale": 1e-5 if "encoder.blocks.0.scale1" in tensors else None,
        "pre_norm": "pre_norm.weight" in tensors,
        "norm_eps": 1e-5 if "pre_norm.weight" in tensors else 1e-6,
        "position_resize": "timm",
    }
    fields |= _tokens(tensors, patch, args, pretrained, given, notes)
    fields |= _head(tensors, args, about)
    if not args:
        note_assumptions(fields, notes)
    deit = architecture.startswith("deit") or fields["distillation_token"] or fields["layer_scale"] is not None
    fields["preprocessing"] = _preprocessing(pretrained, bool(deit), notes)
    return fields


def _parts(about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    args = about.get("model_args") or {}
    pretrained = about.get("pretrained_cfg") or about
    architecture = about.get("architecture") or ""
    if not (isinstance(args, dict) and isinstance(pretrained, dict) and isinstance(architecture, str)):
        raise CheckpointError("config.json is not timm's: model_args and pretrained_cfg should be tables")
    return args, pretrained, architecture


def heads_of(architecture: str, width: int, given: dict[str, Any], notes: list[str]) -> int:
    if architecture and width % 64 == 0 and "heads" not in given:
        return guess_heads(width, given, [])  # the architecture is a published one, so its heads are known
    return guess_heads(width, given, notes)


def _activation(up: Shape, down: Shape, args: dict[str, Any], architecture: str) -> str:
    if up[0] == 2 * down[1]:
        return "swiglu"
    named = args.get("act_layer")
    if isinstance(named, str):
        if named not in _ACTIVATIONS:
            raise CheckpointError(f"not supported: the activation {named!r} of config.json")
        return _ACTIVATIONS[named]
    if "quickgelu" in architecture:
        return "quick-gelu"
    return "gelu-tanh" if "so400m" in architecture else "gelu"


def _tokens(
    tensors: LazyTensors,
    patch: tuple[int, int],
    args: dict[str, Any],
    pretrained: dict[str, Any],
    given: dict[str, Any],
    notes: list[str],
) -> dict[str, Any]:
    """Class token, distillation token, registers, and which of them the position table counts."""
    class_token, distilled = "class_token" in tensors, "distillation_token" in tensors
    registers = need(tensors, "registers", 3)[1] if "registers" in tensors else 0
    fields: dict[str, Any] = {"class_token": class_token, "distillation_token": distilled, "registers": registers}
    size = args.get("img_size") or (pretrained.get("input_size") or [None])[1:] or given.get("image_size")
    size = size if size is None or isinstance(size, int) else tuple(size)
    if "positions.learned" not in tensors:
        if "none" not in (args.get("pos_embed"), given.get("positions")):
            raise CheckpointError(
                "the tensor 'pos_embed' is missing; if the model really has no positions, pass positions='none'"
            )
        if size is None:
            size = (224 // patch[0] * patch[0], 224 // patch[1] * patch[1])
            notes.append(f"no position table: the picture size is not in the file, {size[0]}x{size[1]} is assumed")
        return {**fields, "positions": "none", "image_size": size}
    of_kind = {"all": class_token + distilled + registers, "class": class_token + distilled, "none": 0}
    likeliest = ("none", "class", "all") if registers else ("all", "none")
    rows = need(tensors, "positions.learned", 3)[1]
    grid, prefix = find_grid(rows, [of_kind[kind] for kind in likeliest], patch, size)
    fields["positioned_prefix"] = next(kind for kind in likeliest if of_kind[kind] == prefix)
    return {**fields, "image_size": (grid[0] * patch[0], grid[1] * patch[1])}


def _head(tensors: LazyTensors, args: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    stated = args.get("global_pool") or about.get("global_pool")
    poolings = {"token": "cls", "avg": "mean", "map": "map"}
    if stated is not None and stated not in poolings:
        raise CheckpointError(f"not supported: the pooling global_pool={stated!r} of config.json")
    if "head.pool.probe" in tensors:
        pooling = "map"
    elif stated is not None:
        pooling = poolings[stated]
    else:
        pooling = "mean" if "head.norm.weight" in tensors or "class_token" not in tensors else "cls"
    classes = need(tensors, "head.classifier.weight", 2)[0] if "head.classifier.weight" in tensors else 0
    pre_logits = need(tensors, "head.pre_logits.weight", 2)[0] if "head.pre_logits.weight" in tensors else 0
    after = "head.norm.weight" in tensors
    return {"pooling": pooling, "norm_after_pooling": after, "classes": classes, "pre_logits": pre_logits}


def _preprocessing(pretrained: dict[str, Any], deit: bool, notes: list[str]) -> dict[str, Any]:
    """As config.json says; else what timm has for the family: DeiT and its LayerScale successors want ImageNet's."""
    if "mean" not in pretrained or "std" not in pretrained:
        stats = IMAGENET if deit else {"mean": (0.5,), "std": (0.5,)}
        notes.append(f"preprocessing: not in the file, timm's mean {stats['mean'][0]} and crop 0.9 are assumed")
        return {**stats, "crop": 0.9, "fit": "crop", "interpolation": "bicubic"}
    return {
        "mean": tuple(pretrained["mean"]),
        "std": tuple(pretrained["std"]),
        "crop": pretrained.get("crop_pct") or 0.875,
        "fit": "squash" if pretrained.get("crop_mode") == "squash" else "crop",
        "interpolation": pretrained.get("interpolation") or "bicubic",
    }


def class_names(about: dict[str, Any], classes: int) -> tuple[str, ...] | None:
    """timm keeps `label_names` (a list, or a table by number) and `label_descriptions` for readers."""
    pretrained = about.get("pretrained_cfg") if isinstance(about.get("pretrained_cfg"), dict) else {}
    names = about.get("label_names") or (pretrained or {}).get("label_names")
    if isinstance(names, dict):
        names = [names.get(str(i)) for i in range(classes)]
    if not isinstance(names, list) or len(names) != classes or not all(isinstance(n, str) for n in names):
        return None
    described = about.get("label_descriptions")
    return tuple(str(described.get(n, n)) if isinstance(described, dict) else n for n in names)
