"""`ViTConfig` -> the architecture and arguments with which timm builds the model: the inverse of `timm_models.known`.

Functions and classes (blocks, MLPs, backbones, epsilons) cannot be written into JSON; they come with an architecture
that has them. What was found is read again and compared: a field that timm cannot hold is refused by its name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from vitkit.checkpoints import timm_models, writing
from vitkit.checkpoints.family import Fields
from vitkit.errors import CheckpointError
from vitkit.model.config import StemConfig, ViTConfig

_PLAIN = ["vit_base_patch16_224", "deit_base_distilled_patch16_224"]  # for models that need nothing special
_ROPE = {"grid": "cat", "box": "dinov3", "mixed": "mixed"}
# What changes no result at the trained size, or is compared otherwise.
_ASIDE = ["preprocessing", "position_resize", "norm_eps", "stem", "patch_embedding", "positioned_prefix", "classes"]
_ASIDE += ["dropout", "embedding_dropout", "mlp_dropout", "attention_dropout", "stochastic_depth", "relative_hidden"]


@dataclass(frozen=True)
class Described:
    architecture: str
    args: Fields  # beside those of the architecture
    norm_eps: float  # that the model will have
    layout: str  # for `timm_names.to_theirs`
    gates_apart: bool


def describe(config: ViTConfig) -> Described:
    kind = _kind(config)
    wanted = _common(config) | {"VisionTransformerRelPos": _relpos, "Beit": _beit, "Eva": _eva}.get(kind, _plain)(
        config
    )
    fixed: Fields = {key: wanted.pop(key) for key in ("block_fn", "mlp_layer", "embed_layer") if key in wanted}
    architecture = _architecture(config, kind, fixed)
    own = timm_models.arguments(architecture)
    args = {key: value for key, value in wanted.items() if key == "global_pool" or own.get(key) != value}
    if kind.startswith("VisionTransformer") and kind != "VisionTransformerRelPos" and own["norm_layer"] != config.norm:
        args["norm_layer"] = config.norm
    read = timm_models.known(architecture, args)
    _check(config, read)
    apart = fixed.get("mlp_layer") == "swiglu" or bool(wanted.get("swiglu_mlp") and (kind == "Beit" or config.mlp_norm))
    layout = "ParallelScalingBlock" if config.block == "parallel" else kind
    eps = read["norm_eps"]
    assert isinstance(eps, float)
    return Described(architecture, args, eps, layout, apart)


def _kind(config: ViTConfig) -> str:
    """The class of timm that has such a model."""
    if config.distillation_token:
        return "VisionTransformerDistilled"
    if "relative" in config.positions:
        mlp = config.positions.startswith("relative-mlp")
        return "VisionTransformerRelPos" if mlp or config.key_bias else "Beit"
    rms_gated = config.norm == "rmsnorm" and config.activation == "swiglu"
    eva = config.rotary or not config.key_bias or (config.activation == "swiglu" and config.mlp_norm and not rms_gated)
    return "Eva" if eva else "VisionTransformer"


def _architecture(config: ViTConfig, kind: str, fixed: Fields) -> str:
    """The first that has the wanted block, MLP and backbone, and the norm or the nearest epsilon."""
    rows = {
        name: timm_models.arguments(name)
        for name in [*_PLAIN, *timm_models.names()]
        if timm_models.class_of(name) == kind
    }
    rows = {name: args for name, args in rows.items() if all(args.get(key) == value for key, value in fixed.items())}
    rows = {
        name: args
        for name, args in rows.items()
        if args.get("num_kv_heads") is None and args.get("attn_layer") != "diff"
    }
    if not rows:
        raise CheckpointError(f"timm has no model with {_words(config, fixed)}; use --to native")
    by_word = kind in ("VisionTransformer", "VisionTransformerDistilled")  # they take a norm's name, with epsilon 1e-6

    def distance(name: str) -> tuple[bool, float]:
        same = rows[name]["norm_layer"] == config.norm
        eps = rows[name]["norm_eps"] if same or not by_word else 1e-6
        assert isinstance(eps, float)
        return not same and not by_word, abs(math.log(eps / config.norm_eps))

    return min(rows, key=distance)


def _words(config: ViTConfig, fixed: Fields) -> str:
    return f"stem.layers={config.stem.layers}" if isinstance(config.stem, StemConfig) else f"such blocks ({fixed})"


def _ratio(width: int, hidden: int) -> float:
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else ratio + 1e-9  # timm cuts the product down to a whole number


def _common(config: ViTConfig) -> Fields:
    words = {ours: theirs for theirs, ours in timm_models.POOLINGS.items()} | {"mean-all": "avg"}
    if (pooling := words.get(config.pooling)) is None:
        only = f"(only {', '.join(words)}); --to native holds every model"
        raise CheckpointError(f"timm cannot hold a model with pooling={config.pooling!r} {only}")
    args: Fields = {"embed_dim": config.width, "depth": config.depth, "num_heads": config.heads, "global_pool": pooling}
    args |= {"img_size": list(config.image_size), "patch_size": writing.one_or_both(config.patch_kernel)}
    args |= {"qkv_bias": config.qkv_bias, "init_values": config.layer_scale}
    args |= {"mlp_ratio": _ratio(config.width, config.mlp_width)}
    return args if config.stem else args | {"in_chans": config.channels}  # a backbone's are beyond reach


def _plain(config: ViTConfig) -> Fields:
    gated, positioned = config.activation == "swiglu", config.positioned_prefix_tokens == config.prefix_tokens
    blocks = {"post-norm": "ResPostBlock", "parallel": "ParallelScalingBlock"}
    block = blocks.get(config.block, "ParallelThingsBlock" if config.branches > 1 else "Block")
    mlp = "Mlp" if not gated else "swiglu-packed" if config.norm == "layernorm" else "swiglu"
    stem = config.stem if isinstance(config.stem, StemConfig) else None
    name = "resnetd" if stem and stem.variant == "d" else "resnetv2"
    hidden = config.mlp_width * (2 if mlp == "swiglu-packed" else 1)
    args: Fields = {"block_fn": block, "mlp_layer": mlp}
    args["embed_layer"] = "-".join([name, *map(str, stem.layers)]) if stem else "PatchEmbed"
    args |= {"mlp_ratio": _ratio(config.width, hidden), "class_token": config.class_token}
    args |= {"reg_tokens": config.registers, "pre_norm": config.pre_norm, "qk_norm": config.qk_norm}
    args |= {"scale_attn_norm": config.attention_norm, "scale_mlp_norm": config.mlp_norm, "proj_bias": config.out_bias}
    args |= {"final_norm": config.final_norm, "fc_norm": config.norm_after_pooling}
    args |= {"act_layer": "silu" if gated else writing.theirs(timm_models.ACTIVATIONS, config.activation)}
    args |= {"pos_embed": "learn" if config.positions == "learned" else "none"}
    args |= {"no_embed_class": config.prefix_tokens > 0 and not positioned}
    args["embed_norm_layer"] = config.norm if config.patch_norms else None
    args["pool_include_prefix"] = config.pooling == "mean-all" or (config.pooling == "map" and config.map_prefix)
    return args


def _relpos(config: ViTConfig) -> Fields:
    args: Fields = {"rel_pos_type": "mlp" if "mlp" in config.positions else "bias", "class_token": config.class_token}
    args |= {"shared_rel_pos": config.positions.endswith("shared"), "fc_norm": config.norm_after_pooling}
    args |= {"rel_pos_dim": config.relative_hidden} if "mlp" in config.positions else {}
    args["block_fn"] = "ResPostRelPosBlock" if config.block == "post-norm" else "RelPosBlock"
    return args | {"qk_norm": config.qk_norm}


def _beit(config: ViTConfig) -> Fields:
    shared = config.positions.endswith("shared")
    args: Fields = {"use_abs_pos_emb": config.positions.startswith("learned")}
    args |= {"use_rel_pos_bias": not shared, "use_shared_rel_pos_bias": shared}
    return args | {"swiglu_mlp": config.activation == "swiglu", "scale_mlp": config.mlp_norm}


def _eva(config: ViTConfig) -> Fields:
    positioned = config.positioned_prefix_tokens == config.prefix_tokens
    args: Fields = {"swiglu_mlp": config.activation == "swiglu", "scale_mlp": config.mlp_norm, "swiglu_align_to": 0}
    args |= {"scale_attn_inner": config.attention_norm, "qk_norm": config.qk_norm, "qkv_fused": True}
    args |= {"attn_type": "rope" if config.key_bias else "eva", "class_token": config.class_token}
    args |= {"num_reg_tokens": config.registers, "no_embed_class": config.prefix_tokens > 0 and not positioned}
    args |= {"use_abs_pos_emb": config.positions == "learned", "use_post_norm": config.block == "post-norm"}
    args |= {"use_pre_transformer_norm": config.pre_norm, "use_fc_norm": config.norm_after_pooling}
    args["use_post_transformer_norm"] = config.final_norm and not config.norm_after_pooling
    if config.pooling == "map":
        args["attn_pool_num_heads"] = config.map_heads or config.heads
        args["attn_pool_mlp_ratio"] = _ratio(config.width, config.map_mlp_width or config.mlp_width)
    args["use_rot_pos_emb"] = config.rotary is not None
    if turned := config.rotary:
        args |= {"rope_type": _ROPE[turned.kind], "rope_temperature": turned.base, "rope_rotate_half": turned.half}
        args |= {"rope_grid_indexing": turned.axes, "rope_grid_offset": turned.offset}
        args |= {f"rope_{word}_coords": getattr(turned, word) or None for word in ("shift", "jitter", "rescale")}
        args["ref_feat_shape"] = list(turned.reference) if turned.reference else None
    return args


def _check(config: ViTConfig, read: Fields) -> None:
    """Whether timm's model would be this one."""
    held = ViTConfig.from_dict({**read, "image_size": config.image_size, "indivisible": config.indivisible})
    for name in [field.name for field in fields(config) if field.name not in _ASIDE]:
        if (ours := getattr(config, name)) != (theirs := getattr(held, name)):
            only = f"(only {theirs!r} in such a model); --to native holds every model"
            raise CheckpointError(f"timm cannot hold a model with {name}={ours!r} {only}")
    if config.positions == "learned" and config.positioned_prefix_tokens != held.positioned_prefix_tokens:
        raise CheckpointError("timm positions all tokens before the patches or none; use --to native")
