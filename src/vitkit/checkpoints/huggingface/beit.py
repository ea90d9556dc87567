"""BEiT, Data2VecVision and the vision tower of InternVL: no biases of keys, relative positions, LayerScale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vitkit.checkpoints.family import Fields, Table
from vitkit.checkpoints.huggingface.kind import HALF, Kind, refuse
from vitkit.checkpoints.huggingface.vit import ATTENTION, EMBEDDINGS, HEAD, IN_MEMORY, LAYER, MLP, NORMS
from vitkit.checkpoints.tensors import LazyTensors, NameMap, block
from vitkit.model.config import ViTConfig

TABLE = "relative_position_bias.relative_position_bias_table"
BEIT = NameMap(
    *EMBEDDINGS,
    *ATTENTION,
    *NORMS,
    *MLP,
    *IN_MEMORY,
    *block(LAYER, scale1="lambda_1", scale2="lambda_2"),
    (f"{LAYER}attention.attention.{TABLE}", "encoder.blocks.{i}.relative.table"),
    (f"{LAYER}{TABLE}", "encoder.blocks.{i}.relative.table"),
    (f"encoder.{TABLE}", "positions.relative.table"),
    ("shared_position_bias.relative_position_bias_table", "positions.relative.table"),
    ("pooler.layernorm.*", "head.norm.*"),
    *HEAD,
)
INTERNVL = NameMap(
    *EMBEDDINGS,
    *block(f"{LAYER}attention.", query="q_proj.*", key="k_proj.*", value="v_proj.*", out="projection_layer.*"),
    *block(LAYER, scale1="lambda_1", scale2="lambda_2", up="mlp.fc1.*", down="mlp.fc2.*"),
    *NORMS,
    *HEAD,
)
_NORMS = {"layer_norm": "layernorm", "rms_norm": "rmsnorm"}
_POSITIONS: dict[tuple[bool, ...], str] = {  # absolute, in every block, shared
    (False, False, False): "none",
    (True, False, False): "learned",
    (False, True, False): "relative",
    (False, False, True): "relative-shared",
    (True, True, False): "learned+relative",
    (True, False, True): "learned+relative-shared",
}
_USES = ("use_absolute_position_embeddings", "use_relative_position_bias", "use_shared_relative_position_bias")


def _beit(tensors: LazyTensors, about: Table) -> Fields:
    uses = tuple(bool(about[key]) for key in _USES)
    if uses not in _POSITIONS:
        refuse(about, use_shared_relative_position_bias=False)  # beside tables of the blocks
    mean = bool(about["use_mean_pooling"])
    return {
        "key_bias": False,
        "positions": _POSITIONS[uses],
        "layer_scale": about["layer_scale_init_value"] or None,
        "pooling": "mean" if mean else "cls",
        "norm_after_pooling": mean,
    }


def _beit_about(config: ViTConfig) -> Fields:
    uses = next((uses for uses, word in _POSITIONS.items() if word == config.positions), (True, True, True))
    about: Fields = dict(zip(_USES, uses, strict=True)) | {"layer_scale_init_value": config.layer_scale or 0.0}
    return about | {"use_mean_pooling": config.norm_after_pooling, "use_mask_token": False}


def _unpack(tensors: LazyTensors, about: Table) -> LazyTensors:
    """Relative tables: rows by offset, then class to patch, patch to class, class to class."""
    (h, w), (p, q) = about.size("image_size"), about.size("patch_size")
    grid = (2 * (h // p) - 1, 2 * (w // q) - 1)

    recipes: dict[str, tuple[tuple[str], Callable[[Tensor], Tensor]]] = {}
    for name in [n for n in tensors if n.endswith(".table")]:
        owner = name.removesuffix("table")
        recipes[f"{owner}by_offset"] = ((name,), lambda t: t[:-3].T.unflatten(1, grid).contiguous())
        recipes[f"{owner}with_prefix"] = ((name,), lambda t: t[[-2, -3, -1]].T.contiguous())
    return tensors.rebuilt(recipes)


def _pack(tensors: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    for name in [n for n in tensors if n.endswith(".by_offset")]:
        owner = name.removesuffix("by_offset")
        offsets, prefix = tensors.pop(name).flatten(1).T, tensors.pop(f"{owner}with_prefix").T
        tensors[f"{owner}table"] = torch.cat([offsets, prefix[[1, 0, 2]]]).contiguous()
    return tensors


def _internvl(tensors: LazyTensors, about: Table) -> Fields:
    refuse(about, use_qk_norm=False)  # over all heads at once
    mean, norm = bool(about["use_mean_pooling"]), _NORMS[about.one_of("norm_type", _NORMS)]
    if norm == "rmsnorm":
        refuse(about, use_mean_pooling=True)  # else a LayerNorm follows RMSNorms
    return {
        "qkv_bias": about["attention_bias"],
        "norm": norm,
        "layer_scale": about["layer_scale_init_value"],
        "positions": "learned" if about["use_absolute_position_embeddings"] else "none",
        "final_norm": not mean,
    }


def _internvl_about(config: ViTConfig) -> Fields:
    about: Fields = {name: list(getattr(config, name)) for name in ("image_size", "patch_size")}
    about |= {"attention_bias": config.qkv_bias, "norm_type": "rms_norm" if config.norm == "rmsnorm" else "layer_norm"}
    about |= {"layer_scale_init_value": config.layer_scale, "use_mean_pooling": not config.final_norm}
    return about | {"use_absolute_position_embeddings": config.positions == "learned", "use_qk_norm": False}


_LARGE: Fields = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_LARGE |= {"image_size": (448, 448), "patch_size": (14, 14), "layer_norm_eps": 1e-6, "attention_bias": False}
_LARGE |= {"use_qk_norm": False, "norm_type": "layer_norm", _USES[0]: True}
_BOTH: Fields = {"layer_scale_init_value": 0.1, "use_mean_pooling": True}
_beit_kind = Kind("beit", BEIT, _beit, "BeitModel", "BeitForImageClassification", "beit.", _beit_about)
_beit_kind = replace(_beit_kind, defaults=_BOTH | dict.fromkeys(_USES, False), unpack=_unpack, pack=_pack)
_beit_kind = replace(_beit_kind, statistics=HALF, holds=lambda c: not c.key_bias)
_data2vec = replace(_beit_kind, type="data2vec-vision", base="Data2VecVisionModel", prefix="data2vec_vision.")
_internvl_kind = Kind("internvl_vision", INTERNVL, _internvl, "InternVLVisionModel", about=_internvl_about)
KINDS = [
    _beit_kind,
    replace(_data2vec, classifier="Data2VecVisionForImageClassification"),
    replace(_internvl_kind, defaults=_LARGE | _BOTH, holds=lambda c: c.layer_scale is not None),
]
