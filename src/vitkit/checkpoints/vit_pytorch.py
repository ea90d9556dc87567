"""vit-pytorch's `ViT` and `SimpleViT`, also behind its distillation wrapper <-> vitkit.

Its files are bare state dicts. They do not say how many heads there are, which is asked for; patches are square
unless stated otherwise. Versions before 1.0 hold the norms elsewhere (`fn.to_qkv`, `mlp_head.0`) and may take the mean
over all tokens, which no tensor shows.
"""

from __future__ import annotations

import math

from einops import rearrange
from torch import Tensor

from vitkit.checkpoints import reading, writing
from vitkit.checkpoints.family import Checkpoint, Fields, Opened, Written
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import LazyTensors, NameMap, Row, block
from vitkit.errors import CheckpointError
from vitkit.model.config import Size, ViTConfig
from vitkit.model.patches import conv_to_linear, linear_to_conv

ATTENTION, MLP = "transformer.layers.{i}.0.", "transformer.layers.{i}.1."
_VIT: list[Row] = [
    ("cls_token", "class_token"),
    ("pos_embedding", "positions.learned"),
    *block(ATTENTION, norm1="norm.*", qkv="to_qkv.*", out="to_out.0.*"),
    *block(MLP, norm2="net.0.*", up="net.1.*", down="net.4.*"),
    ("transformer.norm.*", "norm.*"),
    ("mlp_head.*", "head.classifier.*"),
]
_SIMPLE = [*block(ATTENTION, out="to_out.*"), *block(MLP, down="net.3.*"), ("linear_head.*", "head.classifier.*")]
_OLD = [*block(ATTENTION, qkv="fn.to_qkv.*", out="fn.to_out.0.*"), *block(MLP, norm2="norm.*", up="fn.net.0.*")]
_OLD += [*block(MLP, down="fn.net.3.*"), ("mlp_head.0.*", "head.norm.*"), ("mlp_head.1.*", "head.classifier.*")]
_OLD += [("linear_head.0.*", "head.norm.*"), ("linear_head.1.*", "head.classifier.*")]
_PATCHES = [
    (f"to_patch_embedding.{n}.*", f"patches.{ours}*") for n, ours in enumerate(("norm_before.", "", "norm_after."), 1)
]
NAMES, SIMPLE = NameMap(*_PATCHES, *_VIT, *_SIMPLE, *_OLD), NameMap(*_PATCHES, *_SIMPLE, *_VIT)
UNNORMED = NameMap(("to_patch_embedding.1.*", "patches.*"), *_VIT, *_SIMPLE, *_OLD)  # before 1.0
QKV, OUT = "encoder.blocks.0.attention.qkv.weight", "encoder.blocks.0.attention.out.weight"


def matches(opened: Opened) -> bool:
    first = "transformer.layers.0.0."
    qkv = f"{first}to_qkv.weight" in opened.tensors or f"{first}fn.to_qkv.weight" in opened.tensors
    return qkv and "to_patch_embedding.1.weight" in opened.tensors


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    notes: list[str] = []
    normed = "to_patch_embedding.2.weight" in opened.tensors
    names = NAMES if normed else UNNORMED
    tensors = opened.tensors.renamed(lambda name: _kept(opened.tensors, names, name)).converted(_two_axes)
    channels, patch = _patch_of(tensors.need("patches.weight", 2)[1], options)
    conv = tensors.converted(lambda name, t: linear_to_conv(t, patch) if name == "patches.weight" else t)
    _, width, fields = reading.body_of(conv)
    fields |= {"channels": channels, "patch_embedding": "linear", **_heads(tensors, width, options)}
    fields |= {"pooling": _pooling(opened.tensors, options), "norm_eps": 1e-5}
    fields |= _positions(tensors, patch, options, notes)
    notes.append(f"patches of {patch[0]}x{patch[1]} and {channels} channels: the file shows their product alone")
    notes.append("preprocessing: not in the file, vit-pytorch has none; (x - 0.5) / 0.5 is assumed")
    return reading.make_checkpoint(tensors, options, notes, names.theirs, **fields)


def _kept(tensors: LazyTensors, names: NameMap, name: str) -> str | None:
    """An empty class token (with mean pooling) and what the distillation wrapper leaves beside the student go."""
    return None if 0 in tensors.outlines[name].shape or name.startswith("teacher.") else names.ours(name)


def _two_axes(name: str, tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if name in ("class_token", "positions.learned") else tensor


def _patch_of(values: int, options: ModelOptions) -> tuple[int, Size]:
    """Channels and patch size from their product: square patches of what is stated, else of 3 channels, else of 1."""
    if options.channels and options.patch_size and math.prod((options.channels, *options.patch_size)) == values:
        return options.channels, options.patch_size
    for channels in filter(None, (options.channels, 3, 1)):
        side = math.isqrt(values // channels)
        if channels * side * side == values:
            return channels, (side, side)
    stated = "state both, patch_size=(height, width) and channels=N (--patch-size HxW --channels N)"
    raise CheckpointError(f"patches of {values} values are not square patches of 3 channels or of 1: {stated}")


def _heads(tensors: LazyTensors, width: int, options: ModelOptions) -> Fields:
    wide = tensors.need(QKV, 2)[0] // 3
    if OUT not in tensors:  # vit-pytorch leaves the projection out where one head has the model's width
        return {"heads": 1, "attention_out": False, "out_bias": True}
    if options.heads is None:
        usual = f"; vit-pytorch's own dim_head=64 would make {wide // 64}" if wide % 64 == 0 else ""
        unknown = f"the file does not say how many heads share the {wide} channels of its queries{usual}"
        raise CheckpointError(f"{unknown}: pass heads=N (--heads N)")
    if wide % options.heads:
        raise CheckpointError(
            f"heads={options.heads} must divide the {wide} channels of the queries (heads * dim_head)"
        )
    return {"heads": options.heads, "head_width": 0 if wide == width else wide // options.heads}


def _pooling(tensors: LazyTensors, options: ModelOptions) -> object:
    """Today a class token is there only where it is read; versions before had one with mean pooling too."""
    if "cls_token" not in tensors or 0 in tensors.outlines["cls_token"].shape:
        return "mean"
    if tensors.outlines["cls_token"].ndim == 3 and "pooling" not in options.fields:
        old = "older versions of vit-pytorch have a class token with pool='mean' too, and the file does not say which"
        asked = "pooling='cls' or pooling='mean-all' (--set pooling=cls)"
        raise CheckpointError(f"{old} pooling it has: pass {asked}")
    return "cls"


def _positions(tensors: LazyTensors, patch: Size, options: ModelOptions, notes: list[str]) -> Fields:
    if "positions.learned" in tensors:
        prefix = int("class_token" in tensors)
        return {"image_size": reading.image_size_of(tensors, [prefix], patch, options.image_size)[0]}
    if "class_token" in tensors:
        raise CheckpointError("the tensor 'pos_embedding' is missing: the file is incomplete; save it again")
    return {"positions": "sincos-2d", "image_size": reading.assumed_size(patch, options.image_size, notes)}


def write(checkpoint: Checkpoint) -> Written:
    """As version 1.26 names them: with a position table a `ViT`, with sin-cos positions a `SimpleViT`."""
    simple = checkpoint.config.to_dict().get("positions") == "sincos-2d"
    what = "vit-pytorch's SimpleViT" if simple else "vit-pytorch's ViT"
    can = writing.PAPER | {"stem": None, "positions": ("learned", "sincos-2d"), "activation": "gelu", "pre_logits": 0}
    can |= {"qkv_bias": False, "patch_norms": (("before", "after"),), "pooling": ("cls", "mean", "mean-all")}
    can |= {"attention_out": (True, False), "out_bias": not simple, "class_token": False if simple else (True, False)}
    can["head_width"] = getattr(checkpoint.config, "head_width", 0)  # any
    config, tensors = writing.held(checkpoint, what, **can)
    if config.class_token and config.pooling != "cls":
        raise CheckpointError(f"{what} has a class token only with pooling='cls'; use --to native")
    if config.patch_embedding == "conv":
        for name in ("patches.norm_before.weight", "patches.norm_before.bias"):
            kernel = dict(zip("pq", config.patch_kernel, strict=True))
            tensors[name] = rearrange(tensors[name], "(c p q) -> (p q c)", **kernel)
    tensors["patches.weight"] = conv_to_linear(tensors["patches.weight"])
    names = SIMPLE if simple else NAMES
    foreign = {names.theirs(name): tensor for name, tensor in tensors.items()}
    if not simple and not config.class_token:
        foreign["cls_token"] = tensors["positions.learned"][:0]
    notes = writing.not_kept(config, what, {"norm_eps": 1e-5, "position_resize": "official"})
    return Written(foreign, [*notes, f"load it into {_constructor(config, simple)}"])


def _constructor(config: ViTConfig, simple: bool) -> str:
    """The call that builds the model: the file itself holds tensors alone."""
    args: Fields = {"image_size": config.image_size, "patch_size": config.patch_size, "num_classes": config.classes}
    args |= {"dim": config.width, "depth": config.depth, "heads": config.heads, "mlp_dim": config.mlp_width}
    args |= {"channels": config.channels, "dim_head": config.attention_width // config.heads}
    if not simple:
        args["pool"] = "cls" if config.class_token else "mean"
    called = ", ".join(f"{name}={value!r}" for name, value in args.items())
    return f"vit_pytorch.{'SimpleViT' if simple else 'ViT'}({called})"
