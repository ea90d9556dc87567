"""Hugging Face folders (config.json, preprocessor_config.json, weights): ViT, DeiT, DINOv2 <-> vitkit.

config.json says everything; shapes are checked against it when the model is loaded. The names below
are the ones on disk, which newer versions of transformers still write.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from vitkit.checkpoints.fused import fuse, split
from vitkit.checkpoints.layout import (
    IMAGENET,
    PAPER,
    Checkpoint,
    LazyTensors,
    NameMap,
    Tensors,
    conv_patches,
    find_grid,
    make_config,
    need,
    of,
    only,
    renamed,
    without_leading_axis,
)
from vitkit.errors import CheckpointError, did_you_mean
from vitkit.model.config import Preprocessing, as_size

LAYER = "encoder.layer.{i}"
NAMES = NameMap(  # each after a prefix: vit., deit., dinov2. or dinov2_with_registers., but for the classifiers
    ("embeddings.cls_token", "class_token"),
    ("embeddings.distillation_token", "distillation_token"),
    ("embeddings.register_tokens", "registers"),
    ("embeddings.position_embeddings", "positions.learned"),
    ("embeddings.patch_embeddings.projection.*", "patches.*"),
    (f"{LAYER}.layernorm_before.*", "encoder.blocks.{i}.norm1.*"),
    (f"{LAYER}.norm1.*", "encoder.blocks.{i}.norm1.*"),
    (f"{LAYER}.attention.attention.query.*", "encoder.blocks.{i}.attention.query.*"),
    (f"{LAYER}.attention.attention.key.*", "encoder.blocks.{i}.attention.key.*"),
    (f"{LAYER}.attention.attention.value.*", "encoder.blocks.{i}.attention.value.*"),
    (f"{LAYER}.attention.output.dense.*", "encoder.blocks.{i}.attention.out.*"),
    (f"{LAYER}.layer_scale1.lambda1", "encoder.blocks.{i}.scale1"),
    (f"{LAYER}.layernorm_after.*", "encoder.blocks.{i}.norm2.*"),
    (f"{LAYER}.norm2.*", "encoder.blocks.{i}.norm2.*"),
    (f"{LAYER}.intermediate.dense.*", "encoder.blocks.{i}.mlp.up.*"),
    (f"{LAYER}.output.dense.*", "encoder.blocks.{i}.mlp.down.*"),
    (f"{LAYER}.mlp.fc1.*", "encoder.blocks.{i}.mlp.up.*"),
    (f"{LAYER}.mlp.fc2.*", "encoder.blocks.{i}.mlp.down.*"),
    (f"{LAYER}.mlp.weights_in.*", "encoder.blocks.{i}.mlp.up.*"),
    (f"{LAYER}.mlp.weights_out.*", "encoder.blocks.{i}.mlp.down.*"),
    (f"{LAYER}.layer_scale2.lambda1", "encoder.blocks.{i}.scale2"),
    ("layernorm.*", "norm.*"),
    ("pooler.dense.*", "head.pre_logits.*"),
    ("classifier.*", "head.classifier.*"),
    ("cls_classifier.*", "head.classifier.*"),
    ("distillation_classifier.*", "head.distilled.*"),
)
# Names inside transformers 5, which a state dict taken there and saved by hand has.
_NEWER = (
    (r"^layers\.(\d+)\.", r"encoder.layer.\1."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)
_PREFIX = re.compile(r"^(vit|deit|dinov2|dinov2_with_registers)\.")
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "quick_gelu": "quick-gelu"}
_RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # PIL's numbers 0 to 5
MODEL_TYPES = ("vit", "deit", "dinov2", "dinov2_with_registers", "vit_mae", "vit_msn")
_LEFT_OUT = re.compile(r"embeddings\.mask_token|decoder\..*")


def matches(tensors: Tensors) -> bool:
    return any(name.endswith("embeddings.patch_embeddings.projection.weight") for name in tensors)


def read(
    tensors: Tensors,
    about: dict[str, Any] | None = None,
    given: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = None,
) -> Checkpoint:
    """`about` is config.json, `processor` preprocessor_config.json."""
    if not about:
        raise CheckpointError("weights of Hugging Face need the config.json that belongs beside them; fetch it too")
    notes: list[str] = []
    given = dict(given or {})
    kind = about.get("model_type")
    if kind not in MODEL_TYPES:
        raise CheckpointError(
            f"not supported: model_type {kind!r} in config.json.{did_you_mean(str(kind), MODEL_TYPES)} "
            f"vitkit reads {', '.join(MODEL_TYPES)}"
        )
    lazy = _to_our_names(of(tensors), kind, notes)
    config = make_config(given, **_fields(lazy, about, kind, notes, processor))
    converted = fuse(lazy, without_leading_axis)
    return Checkpoint(config, converted, _class_names(about, config.classes), notes, "huggingface", NAMES.theirs)


def _to_our_names(tensors: LazyTensors, kind: str, notes: list[str]) -> LazyTensors:
    def old_name(name: str) -> str:
        name = _PREFIX.sub("", name)
        for pattern, replacement in _NEWER:
            name = re.sub(pattern, replacement, name)
        return name

    tensors = renamed(tensors, old_name)
    if left_out := [name for name in tensors if _LEFT_OUT.fullmatch(name)]:
        notes.append(f"left out: {len(left_out)} tensors of pre-training, such as {left_out[0]!r}")
    # DeiT with one classifier never reads its distillation token: for us that is a register.
    one_head = kind == "deit" and "classifier.weight" in tensors
    has_head = any(n in tensors for n in ("classifier.weight", "cls_classifier.weight"))

    def our_name(name: str) -> str | None:
        if name in left_out or (name.startswith("pooler.") and has_head):
            return None
        ours = NAMES.ours(name) or name
        return "registers" if one_head and ours == "distillation_token" else ours

    renames = {name: our_name(name) for name in tensors}
    return renamed(tensors, renames.__getitem__)


def _fields(
    tensors: LazyTensors, about: dict[str, Any], kind: str, notes: list[str], processor: dict[str, Any] | None
) -> dict[str, Any]:
    try:
        width, depth, heads = (int(about[k]) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        patch = as_size(about.get("patch_size", 14 if kind == "dinov2" else 16), "patch_size")
        size = as_size(about.get("image_size", 224))
        eps = float(about.get("layer_norm_eps", 1e-6 if kind.startswith("dinov2") else 1e-12))
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"config.json does not describe a ViT ({e!r} is missing or wrong); fetch it again") from e
    swiglu = bool(about.get("use_swiglu_ffn"))
    act = about.get("hidden_act", "gelu")
    if act not in _ACTIVATIONS:
        raise CheckpointError(f"not supported: hidden_act {act!r} in config.json")
    registers = need(tensors, "registers", 3)[1] if "registers" in tensors else 0
    head = "head.classifier.weight"
    fields: dict[str, Any] = {
        "patch_size": patch,
        "channels": int(about.get("num_channels", 3)),
        "width": width,
        "depth": depth,
        "heads": heads,
        "mlp_width": need(tensors, "encoder.blocks.0.mlp.down.weight", 2)[1],
        "classes": need(tensors, head, 2)[0] if head in tensors else 0,
        "norm_eps": eps,
        "activation": "swiglu" if swiglu else _ACTIVATIONS[act],
        "qkv_bias": bool(about.get("qkv_bias", True)),
        "layer_scale": float(about.get("layerscale_value", 1.0)) if kind.startswith("dinov2") else None,
        "registers": registers,
        "distillation_token": "distillation_token" in tensors,
        "positioned_prefix": "class" if kind.startswith("dinov2") else "all",
        "pooling": "cls+mean" if kind.startswith("dinov2") and head in tensors else "cls",
        "pre_logits": need(tensors, "head.pre_logits.weight", 2)[0] if "head.pre_logits.weight" in tensors else 0,
        # transformers resizes DINOv2's table with antialiasing only when there are registers
        "position_resize": "timm" if kind == "dinov2_with_registers" else "huggingface",
    }
    prefix = 1 if kind.startswith("dinov2") else 1 + registers + int(fields["distillation_token"])
    grid, _ = find_grid(need(tensors, "positions.learned", 3)[1], [prefix], patch, size)
    if grid != (size[0] // patch[0], size[1] // patch[1]):
        notes.append(f"config.json says {size[0]}x{size[1]} pixels, but the position table holds {grid[0]}x{grid[1]}")
    fields["image_size"] = (grid[0] * patch[0], grid[1] * patch[1])
    fields["preprocessing"] = _preprocessing(processor, kind, notes)
    return fields


def _preprocessing(processor: dict[str, Any] | None, kind: str, notes: list[str]) -> dict[str, Any]:
    if not processor:
        stats: dict[str, Any] = {"mean": (0.5,), "std": (0.5,)} if kind == "vit" else dict(IMAGENET)
        notes.append(f"preprocessing: no preprocessor_config.json, mean {stats['mean'][0]} is assumed")
        return stats
    try:
        pre: dict[str, Any] = {"interpolation": _RESAMPLE[int(processor.get("resample", 2))]}
        normalise = processor.get("do_normalize", True)
        pre["mean"] = tuple(processor["image_mean"]) if normalise else (0.0,)
        pre["std"] = tuple(processor["image_std"]) if normalise else (1.0,)
        size, crop = processor.get("size"), processor.get("crop_size")
        resized = size.get("shortest_edge") or size["height"] if isinstance(size, dict) else size
        if (isinstance(size, dict) and "shortest_edge" in size) or kind.startswith("dinov2"):
            pre["fit"] = "crop"
        if processor.get("do_center_crop") and crop and resized:
            cropped = crop["height"] if isinstance(crop, dict) else crop
            pre["crop"] = min(1.0, int(cropped) / int(resized))
        return pre
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise CheckpointError(f"preprocessor_config.json is not understood ({e!r}); fetch it again") from e


def _class_names(about: dict[str, Any], classes: int) -> tuple[str, ...] | None:
    table = about.get("id2label")
    if not isinstance(table, dict):
        return None
    names = [table.get(str(i)) for i in range(classes)]
    if not classes or not all(isinstance(n, str) for n in names):
        return None
    placeholders = all(name == f"LABEL_{i}" for i, name in enumerate(names))
    return None if placeholders else tuple(str(n) for n in names)


def write(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Tensors, config.json and preprocessor_config.json of a ViTForImageClassification, or ViTModel without classes."""
    more = {"stem": None, "qkv_bias": (True, False), "activation": ("gelu", "gelu-tanh", "quick-gelu")}
    config = only(checkpoint.config, "Hugging Face's ViT", **PAPER | more)
    if config.pre_logits and config.classes:
        raise CheckpointError("Hugging Face's ViT has no layer before its classifier (pre_logits); use --to native")
    prefix = "vit." if config.classes else ""
    foreign = {}
    for name, tensor in split(conv_patches(checkpoint)).items():
        theirs = NAMES.theirs(name) or name
        tensor = tensor[None, None] if name == "class_token" and tensor.ndim == 1 else tensor
        tensor = tensor[None] if name in ("class_token", "positions.learned") else tensor
        foreign[theirs if theirs.startswith("classifier.") else prefix + theirs] = tensor
    return foreign, _config_json(checkpoint), _processor_json(config.preprocessing, config.channels)


def _config_json(checkpoint: Checkpoint) -> dict[str, Any]:
    config = only(checkpoint.config, "Hugging Face's ViT")
    act = {"gelu": "gelu", "gelu-tanh": "gelu_pytorch_tanh", "quick-gelu": "quick_gelu"}[config.activation]
    names = checkpoint.class_names or [f"LABEL_{i}" for i in range(config.classes)]

    def one(size: tuple[int, int]) -> int | list[int]:
        return size[0] if size[0] == size[1] else list(size)

    about: dict[str, Any] = {
        "architectures": ["ViTForImageClassification" if config.classes else "ViTModel"],
        "model_type": "vit",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": act,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": config.norm_eps,
        "image_size": one(config.image_size),
        "patch_size": one(config.patch_size),
        "num_channels": config.channels,
        "qkv_bias": config.qkv_bias,
    }
    if config.classes:
        about["id2label"] = {str(i): name for i, name in enumerate(names)}
        about["label2id"] = {name: i for i, name in enumerate(names)}
    elif config.pre_logits:
        about |= {"pooler_output_size": config.pre_logits, "pooler_act": "tanh"}
    return about


def _processor_json(pre: Preprocessing, channels: int) -> dict[str, Any]:
    h, w = pre.size
    resized = {"height": round(h / pre.crop), "width": round(w / pre.crop)}
    cropped = pre.crop < 1 or pre.fit == "crop"
    return {
        "image_processor_type": "BitImageProcessor" if cropped else "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": resized["height"]} if pre.fit == "crop" else resized,
        "resample": _RESAMPLE.index(pre.interpolation),
        **({"do_center_crop": True, "crop_size": {"height": h, "width": w}} if cropped else {}),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(pre.mean) * (channels if len(pre.mean) == 1 else 1),
        "image_std": list(pre.std) * (channels if len(pre.std) == 1 else 1),
    }
