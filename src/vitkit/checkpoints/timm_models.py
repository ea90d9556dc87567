"""What timm's names mean: architecture and arguments -> fields of `ViTConfig`.

`timm_models.json` is written by `tests/parity/make_timm_table.py` from timm itself. `known` looks a name up; `alike`
finds the models whose tensors would look like those of a file that has no name, and asks where they differ in
something that no tensor shows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

from vitkit.checkpoints.family import Fields, Table
from vitkit.errors import CheckpointError, VitkitError
from vitkit.model.config import StemConfig, as_size

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu-tanh", "quick_gelu": "quick-gelu", "silu": "silu", "relu": "relu"}
POOLINGS = {"token": "cls", "avg": "mean", "map": "map"}
MLPS = ("Mlp", "swiglu", "swiglu-packed")
NORMS = {"layernorm": "layernorm", "layernormfp32": "layernorm", "rmsnorm": "rmsnorm", "rmsnormfp32": "rmsnorm"}
BLOCKS = {"Block": "pre-norm", "ParallelThingsBlock": "pre-norm", "RelPosBlock": "pre-norm"}
BLOCKS |= {"ResPostBlock": "post-norm", "ResPostRelPosBlock": "post-norm", "ParallelScalingBlock": "parallel"}
# Eva's words for what VisionTransformer calls otherwise.
EVA = {"num_reg_tokens": "reg_tokens", "use_pre_transformer_norm": "pre_norm", "use_fc_norm": "fc_norm"}
EVA |= {"scale_attn_inner": "scale_attn_norm", "scale_mlp": "scale_mlp_norm"}
SAME = {"embed_dim": "width", "depth": "depth", "num_heads": "heads", "qkv_bias": "qkv_bias", "norm_eps": "norm_eps"}
SAME |= {"class_token": "class_token", "reg_tokens": "registers", "pre_norm": "pre_norm", "qk_norm": "qk_norm"}
SAME |= {"scale_attn_norm": "attention_norm", "scale_mlp_norm": "mlp_norm", "proj_bias": "out_bias"}
SAME |= {"in_chans": "channels", "num_classes": "classes"}
# What vitkit has no layer for, by the class or by an argument: the reasons in docs/checkpoints.md.
REFUSED_CLASSES = {
    "NaFlexVit": "NaFlex models, which take batches of patches of several image sizes",
    "VisionTransformerSAM": "SAM's attention in windows",
}
BOTH_TABLES = "relative positions both of each block and shared by all"
REFUSED = {
    ("attn_layer", "diff"): "differential attention",
    ("block_fn", "DiffParallelScalingBlock"): "differential attention",
    ("embed_layer", "ConvStem"): "MobileCLIP's MCI stem",
    ("attn_only_layer_scale", True): "Sapiens2's grouped-query attention and LayerScale of attention alone",
}
# Fields that no tensor shows, and those of a tensor layout that are free: sizes that any model may have been given.
HIDDEN = ("heads", "activation", "norm_eps", "pooling", "block", "rotary", "map_heads", "map_prefix")
SEEN = {"pooling": "map", "block": "parallel", "activation": "swiglu"}
FREE = ("classes", "channels", "image_size", "positioned_prefix", "preprocessing", "indivisible")
SIZES = ("width", "depth", "mlp_width", "patch_size", "registers", "relative_hidden", "map_mlp_width", "stem")


@cache
def _table() -> dict[str, dict[str, dict[str, object]]]:
    value: dict[str, dict[str, dict[str, object]]] = json.loads(
        Path(__file__).with_name("timm_models.json").read_text()
    )
    return value


def names() -> list[str]:
    return list(_table()["models"])


def class_of(architecture: str) -> str:
    return str(_table()["models"][architecture]["class"])


def pretrained_cfg(architecture: str) -> Table:
    return Table(_table()["models"].get(architecture, {}), "timm's table").table("pretrained_cfg")


def arguments(architecture: str) -> Table:
    """All arguments of the class with which timm builds it; Eva's are called as VisionTransformer's."""
    row = Table(_table()["models"][architecture])
    return Table(_table()["classes"][row.text("class")] | row.table("args"), f"the arguments of {architecture}")


def known(architecture: str, model_args: Mapping[str, object]) -> Fields:
    """The fields of a model that timm builds by this name with these arguments, or a refusal in words."""
    args, kind = arguments(architecture), class_of(architecture)
    if kind in REFUSED_CLASSES:
        raise CheckpointError(f"not supported: {REFUSED_CLASSES[kind]} ({architecture})")
    if unknown := [key for key in model_args if key not in args and not key.startswith(("dynamic_", "weight_init"))]:
        raise CheckpointError(f"model_args in config.json: timm's {kind} takes no {unknown[0]!r}; remove it")
    if "norm_layer" in model_args:
        args["norm_eps"] = 1e-6  # a norm by its word has timm's own epsilon
    args |= model_args
    for (key, value), reason in REFUSED.items():
        if args.get(key) == value:
            raise CheckpointError(f"not supported: {reason} ({architecture})")
    return _fields(kind, Table({EVA.get(key, key): value for key, value in args.items()}, args.name))


def _fields(kind: str, args: Table) -> Fields:
    pooling = POOLINGS[args.one_of("global_pool", POOLINGS)]
    fields: Fields = {ours: args[theirs] for theirs, ours in SAME.items() if args.get(theirs) is not None}
    after = args.get("fc_norm") if args.get("fc_norm") is not None else pooling == "mean"
    fields |= {
        "class_token": args.get("class_token", True),  # Beit always has one
        "distillation_token": kind == "VisionTransformerDistilled",
        "norm": NORMS[args.one_of("norm_layer", NORMS)],
        "pooling": "mean-all" if pooling == "mean" and args.get("pool_include_prefix") else pooling,
        "mlp_bias": args.get("proj_bias", True),
        "layer_scale": _layer_scale(args),
        "patch_bias": not args.get("pre_norm"),
        "patch_norms": ("after",) if args.get("embed_norm_layer") else (),
        "norm_after_pooling": bool(after),
        "final_norm": args.get("final_norm") is not False,
        "position_resize": "timm",
    }
    fields |= _mlp(args) | _block(args) | _positions(args) | _stem(args)
    if kind == "Eva":
        fields |= _eva(args)
    fields["key_bias"] = not (fields["qkv_bias"] and (kind == "Beit" or args.get("attn_type") == "eva"))
    return fields | (_map_head(fields, args) if pooling == "map" else {})


def _layer_scale(args: Table) -> object:
    """None without one; a block whose norms come after has none, its norms start at that value."""
    post = args.get("use_post_norm") or BLOCKS.get(str(args.get("block_fn"))) == "post-norm"
    return None if post else args.get("init_values") or None


def _mlp(args: Table) -> Fields:
    hidden = int(args.whole("embed_dim") * _number(args, "mlp_ratio"))
    if not args.get("swiglu_mlp") and args.one_of("mlp_layer", MLPS, "Mlp") == "Mlp":
        return {"mlp_width": hidden, "activation": ACTIVATIONS[args.one_of("act_layer", ACTIVATIONS, "gelu")]}
    if args.get("act_layer") not in (None, "silu"):
        raise CheckpointError(f"not supported: an MLP gated by {args['act_layer']!r}; vitkit has SwiGLU")
    packed = args.get("mlp_layer") == "swiglu-packed"  # counts both halves
    hidden += -hidden % int(_number(args, "swiglu_align_to") or 1)
    return {"mlp_width": hidden // 2 if packed else hidden, "activation": "swiglu"}


def _number(args: Table, key: str) -> float:
    value = args.get(key) or 0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise args.wrong(key, "a number")
    return value


def _block(args: Table) -> Fields:
    word = args.one_of("block_fn", BLOCKS, "Block")
    block = "post-norm" if args.get("use_post_norm") else BLOCKS[word]
    return {"block": block, "branches": 2 if word == "ParallelThingsBlock" else 1}


def _positions(args: Table) -> Fields:
    if "rel_pos_type" in args:
        word = "relative-mlp" if args.text("rel_pos_type").startswith("mlp") else "relative"
        hidden = args.whole("rel_pos_dim", 128)
        return {"positions": word + "-shared" * bool(args.get("shared_rel_pos")), "relative_hidden": hidden}
    if args.get("use_rel_pos_bias") or args.get("use_shared_rel_pos_bias"):
        if args.get("use_rel_pos_bias") and args.get("use_shared_rel_pos_bias"):
            raise CheckpointError(f"not supported: {BOTH_TABLES}")
        word = "relative-shared" if args.get("use_shared_rel_pos_bias") else "relative"
        return {"positions": "learned+" * bool(args.get("use_abs_pos_emb")) + word}
    learned = args.get("use_abs_pos_emb", args.get("pos_embed") == "learn")
    prefix = "none" if args.get("no_embed_class") else "all"
    return {"positions": "learned" if learned else "none", "positioned_prefix": prefix}


def _stem(args: Table) -> Fields:
    """resnetv2-3-4-9 is BiT's ResNet with so many blocks in its stages, resnetd-… timm's ResNet-D."""
    kind, *layers = args.text("embed_layer").split("-")
    patch = as_size(args["patch_size"])
    if kind not in ("resnetv2", "resnetd"):
        return {"stem": None, "patch_size": patch}
    stages = tuple(map(int, layers))
    stem = StemConfig(stages, variant="d") if kind == "resnetd" else StemConfig(stages, numerics="timm")
    return {"stem": stem, "patch_size": (patch[0] * stem.stride, patch[1] * stem.stride)}


def _eva(args: Table) -> Fields:
    final = args.get("use_post_transformer_norm")
    fields: Fields = {"rotary": _rotary(args) if args.get("use_rot_pos_emb") else None}
    after = bool(args.get("fc_norm")) if args.get("fc_norm") is not None else args["global_pool"] == "avg"
    if final and after:
        raise CheckpointError("not supported: a norm before and another after pooling")
    return fields | {"final_norm": after or final is not False}


def _rotary(args: Table) -> Fields:
    kind = {"cat": "grid", "dinov3": "box", "mixed": "mixed"}[args.one_of("rope_type", ("cat", "dinov3", "mixed"))]
    half = bool(args.get("rope_rotate_half"))
    if half != (kind == "box"):
        raise CheckpointError(f"not supported: rope_rotate_half={half} with rope_type={args['rope_type']!r}")
    rotary: Fields = {"kind": kind, "base": float(_number(args, "rope_temperature")), "half": half}
    rotary |= {"axes": args.text("rope_grid_indexing"), "offset": float(_number(args, "rope_grid_offset"))}
    varied = {word: float(_number(args, f"rope_{word}_coords")) for word in ("shift", "jitter", "rescale")}
    reference = as_size(args["ref_feat_shape"]) if args.get("ref_feat_shape") else None
    own: dict[str, Fields] = {
        "grid": {"reference": reference},
        "mixed": {"offset": 0.0},
        "box": {"axes": "ij", **varied},
    }
    return rotary | own[kind]  # timm does not look at what is left out


def _map_head(fields: Fields, args: Table) -> Fields:
    """Eva's sees all tokens, VisionTransformer's the patches; 0 means: as the encoder."""
    heads, ratio = args.get("attn_pool_num_heads") or 0, _number(args, "attn_pool_mlp_ratio")
    width = int(args.whole("embed_dim") * (ratio or _number(args, "mlp_ratio")))
    seen = bool(args.get("pool_include_prefix") or "attn_type" in args)
    own = width if width != fields["mlp_width"] or fields["activation"] == "swiglu" else 0
    return {"map_heads": 0 if heads == fields["heads"] else heads, "map_mlp_width": own, "map_prefix": seen}


@cache
def _all() -> dict[str, Fields]:
    """Every architecture that vitkit has."""
    found: dict[str, Fields] = {}
    for name in names():
        try:
            found[name] = known(name, {})
        except VitkitError:
            continue
    return found


def alike(shown: Fields, kinds: Collection[str], mixed: bool, stated: Fields) -> Fields:
    """The fields that no tensor shows, for a file without a name: those on which all published models of its layout
    agree. Where they do not, raise the question. `kinds` are timm's classes with such names of tensors; `mixed`:
    there are learned frequencies."""
    traits = [*_traits(shown)[:-1], mixed]
    free = (*FREE, "norm_after_pooling") if "pooling" in stated else FREE  # chosen later, and its norm with it
    every = {name: row for name, row in _all().items() if class_of(name) in kinds and _traits(row) == traits}
    rows = {name: row for name, row in every.items() if _same_layout(row, shown, free)}
    published = bool(rows)
    if not published:
        if "heads" not in stated:
            raise CheckpointError(unknown_heads(shown))
        rows = {name: row for name, row in every.items() if _same_layout(row, shown, (*free, *SIZES))}
    fitting = {n: r for n, r in rows.items() if all(_get(r, key) == stated[key] for key in HIDDEN if key in stated)}
    rows = fitting or rows
    hidden: Fields = {}
    asked = HIDDEN if "pooling" in shown else HIDDEN[:-2]  # the last two are of a MAP head
    for key in [key for key in asked if key not in stated and key not in shown]:
        values = {name: _get(row, key) for name, row in rows.items()}
        words = {json.dumps(value) for value in values.values()}
        if len(words) > 1 or (key == "rotary" and not published and words != {"null"} and words):
            raise CheckpointError(_question(key, values))
        hidden[key] = next(iter(values.values()), DEFAULTS.get(key))
    return {key: value for key, value in hidden.items() if value is not None}


# Where no model of timm has the layout: what its classes have by themselves.
DEFAULTS: Fields = {"activation": "gelu", "norm_eps": 1e-6, "block": "pre-norm", "map_heads": 0, "map_prefix": False}


def _get(row: Fields, key: str) -> object:
    return row.get(key, DEFAULTS.get(key) if key.startswith("map") else None)


def _traits(fields: Fields) -> list[bool]:
    """What tensors show of fields that they else hide."""
    rotary = fields.get("rotary")
    mixed = isinstance(rotary, dict) and rotary["kind"] == "mixed"
    return [fields.get(key) == word for key, word in SEEN.items()] + [mixed]


def _same_layout(row: Fields, shown: Fields, free: tuple[str, ...]) -> bool:
    def plain(value: object) -> object:
        return value is not None if isinstance(value, float) else value  # LayerScale: there or not

    return all(plain(row[key]) == plain(value) for key, value in shown.items() if key in row and key not in free)


def unknown_heads(shown: Fields) -> str:
    unknown = f"the file does not say how many heads its layers of width {shown['width']} have"
    return f"{unknown}, and timm has no model of these sizes: pass heads=N (--heads N)"


def _question(key: str, values: dict[str, object]) -> str:
    words = sorted({json.dumps(value) for value in values.values()})
    option = f"{key}=… (--{key} …)" if key in ("heads", "activation") else f"{key}=… (--set {key}=…)"
    some = [next(n for n, v in values.items() if json.dumps(v) == word) for word in words]
    pairs = ", ".join(f"{word} in {name}" for word, name in zip(words, some, strict=True))
    beside = 'or put {"architecture": NAME} into a config.json beside model.safetensors'
    return (
        f"the file does not say its {key}, and models with the same tensors differ ({pairs}): pass {option}, {beside}"
    )
