"""The vision towers of CLIP (also MetaCLIP 2, AltCLIP, Chinese CLIP), SigLIP, SigLIP 2 and AIMv2.

Alone, in a classifier, or inside a model with a text tower, which `vitkit zeroshot` reads.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from vitkit.checkpoints import reading
from vitkit.checkpoints.family import Fields, Table
from vitkit.checkpoints.huggingface.kind import HALF, Kind, has_head, neutral_value, never, refuse
from vitkit.checkpoints.tensors import LazyTensors, NameMap, block
from vitkit.errors import CheckpointError
from vitkit.model.config import ViTConfig
from vitkit.model.patches import conv_to_linear, linear_to_conv

LAYER = "encoder.layers.{i}."
TOWER = [
    ("embeddings.class_embedding", "class_token"),
    ("embeddings.position_embedding.weight", "positions.learned"),
    ("embeddings.patch_embedding.*", "patches.*"),
    ("pre_layrnorm.*", "pre_norm.*"),
    *block(f"{LAYER}self_attn.", query="q_proj.*", key="k_proj.*", value="v_proj.*", out="out_proj.*"),
    *block(LAYER, norm1="layer_norm1.*", norm2="layer_norm2.*", up="mlp.fc1.*", down="mlp.fc2.*"),
    ("post_layernorm.*", "norm.*"),
    ("classifier.*", "head.classifier.*"),
]
CLIP = NameMap(*TOWER, ("visual_projection.weight", "head.projection.weight"))
SIGLIP = NameMap(
    *TOWER,
    ("head.probe", "head.pool.probe"),
    ("head.attention.in_proj_weight", "head.pool.in.weight"),
    ("head.attention.in_proj_bias", "head.pool.in.bias"),
    ("head.attention.out_proj.*", "head.pool.out.*"),
    ("head.layernorm.*", "head.pool.norm.*"),
    ("head.mlp.fc1.*", "head.pool.mlp.up.*"),
    ("head.mlp.fc2.*", "head.pool.mlp.down.*"),
)
AIMV2 = NameMap(
    ("embeddings.position_embedding.weight", "positions.learned"),
    ("embeddings.patch_embed.*", "patches.*"),
    ("embeddings.rms_norm.*", "patches.norm_after.*"),
    *block(f"{LAYER}attention.", query="q_proj.*", key="k_proj.*", value="v_proj.*", out="out_proj.*"),
    *block(LAYER, norm1="rms_norm1.*", norm2="rms_norm2.*"),
    *block(LAYER, gate="ffn.gate_proj.*", gated="ffn.up_proj.*", down="ffn.down_proj.*"),
    ("rms_norm.*", "norm.*"),
    ("head.cls_token", "head.pool.probe"),
    ("head.k_proj.*", "head.pool.key.*"),
    ("head.v_proj.*", "head.pool.value.*"),
    ("head.output_proj.*", "head.pool.out.*"),
    ("classifier.*", "head.classifier.*"),
)
STATISTICS: Fields = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
_CLASSIFIES = "head.classifier.weight"


def _clip(tensors: LazyTensors, about: Table) -> Fields:
    """The class token, normalised and projected; a classifier reads the mean of the patches, not normalised."""
    mean = _CLASSIFIES in tensors and has_head(about)
    fields: Fields = {"patch_bias": False, "pre_norm": True, "qkv_bias": True}
    return fields | {"pooling": "mean" if mean else "cls", "final_norm": not mean}


def _without_norm(tensors: LazyTensors, about: Table) -> LazyTensors:
    """A classifier's post_layernorm is in the file, but nothing reads it."""
    if _CLASSIFIES not in tensors or not has_head(about):
        return tensors
    return tensors.renamed(lambda name: None if name.startswith("norm.") else name)


def _with_norm(tensors: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    like = tensors["pre_norm.weight"]
    unread = {} if config.final_norm else {"norm.weight": torch.ones_like(like), "norm.bias": torch.zeros_like(like)}
    return unread | tensors


def _siglip(tensors: LazyTensors, about: Table) -> Fields:
    """Attention pooling; a classifier reads the mean of the patches."""
    fields: Fields = {"qkv_bias": True, "positioned_prefix": "none"}
    return fields | {"pooling": "map" if "head.pool.probe" in tensors else "mean"}


def _siglip_head(tensors: LazyTensors, about: Table) -> LazyTensors:
    """The head's query apart; nothing where a classifier stands in the head's place."""
    if _CLASSIFIES in tensors and has_head(about):
        return tensors.renamed(lambda name: None if name.startswith("head.pool.") else name)
    return reading.pool_apart(tensors)


def _siglip_pack(tensors: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    for part in ("weight", "bias") if config.pooling == "map" else ():
        pieces = [tensors.pop(f"head.pool.{name}.{part}") for name in ("query", "key", "value")]
        tensors[f"head.pool.in.{part}"] = torch.cat(pieces)
    return tensors


def _siglip_about(config: ViTConfig) -> Fields:
    return {"vision_use_head": config.pooling == "map"}


def _siglip2_about(config: ViTConfig) -> Fields:
    return _siglip_about(config) | {"num_patches": config.grid[0] * config.grid[1]}


def _linear_patches(tensors: LazyTensors, about: Table) -> LazyTensors:
    patch = about.size("patch_size")
    tensors = _siglip_head(tensors, about)
    return tensors.converted(lambda name, t: linear_to_conv(t, patch) if name == "patches.weight" else t)


def _linear_pack(tensors: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    return _siglip_pack(tensors, config) | {"patches.weight": conv_to_linear(tensors["patches.weight"])}


def _aimv2(tensors: LazyTensors, about: Table) -> Fields:
    refuse(about, hidden_act="silu", is_native=False)  # native: sin-cos positions
    fields: Fields = {"norm": "rmsnorm", "norm_eps": about["rms_norm_eps"], "patch_norms": ("after",)}
    fields |= {"out_bias": about["qkv_bias"], "mlp_bias": about["mlp_bias"], "activation": "swiglu"}
    return fields | {"positioned_prefix": "none", "pooling": "map" if about["use_head"] else "mean", "map_mlp_width": 1}


def _aimv2_about(config: ViTConfig) -> Fields:
    about: Fields = {"rms_norm_eps": config.norm_eps, "mlp_bias": config.mlp_bias, "is_native": False}
    return about | {"use_head": config.pooling == "map"}


def _aimv2_pack(tensors: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Its head has neither a query map nor an MLP: ours may go where they do nothing."""
    extra = [name for name in tensors if re.fullmatch(_PLAIN_HEAD, name)]
    if trained := [name for name in extra if not torch.equal(tensors[name], neutral_value(name, tensors[name]))]:
        raise CheckpointError(f"{trained[0]}, which was trained")
    return {name: tensor for name, tensor in tensors.items() if name not in extra}


_VISION: Fields = {"patch_size": 32, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}
_SIGLIP: Fields = {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
_AIMV2: Fields = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "intermediate_size": 2816}
_AIMV2 |= {"patch_size": 14, "rms_norm_eps": 1e-5, "hidden_act": "silu", "qkv_bias": False, "mlp_bias": False}
_AIMV2 |= {"use_head": True, "is_native": False}
_PLAIN_HEAD = r"head\.pool\.(query|norm|mlp)\..*|head\.pool\.(key_value|key|value)\.bias"
_FLAT = {"class_token": 1, "positions.learned": 2}
_UNUSED = r"embeddings\.position_ids"
_clip_kind = Kind("clip_vision_model", CLIP, _clip, "CLIPVisionModel", "CLIPForImageClassification", "vision_model.")
_clip_kind = replace(_clip_kind, defaults=_VISION, axes=_FLAT, left_out=_UNUSED, statistics=STATISTICS)
_clip_kind = replace(_clip_kind, unpack=_without_norm, pack=_with_norm, holds=lambda c: c.pre_norm)
_clip_kind = replace(_clip_kind, about=lambda c: {"projection_dim": c.projection} if c.projection else {})
_clip_kind = replace(_clip_kind, projected="CLIPVisionModelWithProjection")
_siglip_kind = Kind("siglip_vision_model", SIGLIP, _siglip, "SiglipVisionModel", "SiglipForImageClassification")
_siglip_kind = replace(_siglip_kind, prefix="vision_model.", about=_siglip_about, defaults=_SIGLIP, axes=_FLAT)
_siglip_kind = replace(_siglip_kind, unpack=_siglip_head, pack=_siglip_pack, left_out=_UNUSED, statistics=HALF)
_siglip_kind = replace(_siglip_kind, holds=lambda c: c.position_resize != "siglip2")
_siglip2_kind = replace(_siglip_kind, about=_siglip2_about, type="siglip2_vision_model", base="Siglip2VisionModel")
_siglip2_kind = replace(_siglip2_kind, fields=lambda *of: _siglip(*of) | {"position_resize": "siglip2"})
_siglip2_kind = replace(
    _siglip2_kind, unpack=_linear_patches, pack=_linear_pack, holds=lambda c: c.position_resize == "siglip2"
)
_aimv2_kind = Kind("aimv2_vision_model", AIMV2, _aimv2, "Aimv2VisionModel", about=_aimv2_about, defaults=_AIMV2)
_aimv2_kind = replace(_aimv2_kind, axes={"positions.learned": 2}, left_out=_UNUSED, statistics=STATISTICS)
KINDS = [
    _clip_kind,
    *(
        replace(_clip_kind, type=f"{name}_vision_model", holds=never)
        for name in ("metaclip_2", "altclip", "chinese_clip")
    ),
    _siglip_kind,
    replace(_siglip2_kind, classifier="Siglip2ForImageClassification", defaults=_SIGLIP | {"num_patches": 256}),
    replace(_aimv2_kind, pack=_aimv2_pack, neutral=_PLAIN_HEAD, holds=lambda c: c.norm == "rmsnorm"),
]
