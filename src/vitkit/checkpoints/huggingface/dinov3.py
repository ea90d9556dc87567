"""DINOv3 ViT: rotary positions over patch centres in [-1, 1], registers, no biases of keys."""

from __future__ import annotations

from dataclasses import replace

from vitkit.checkpoints.family import Fields, Table
from vitkit.checkpoints.huggingface.kind import Kind, refuse
from vitkit.checkpoints.tensors import LazyTensors, NameMap, block
from vitkit.model.config import RotaryConfig, ViTConfig

LAYER = "layer.{i}."
DINOV3 = [
    ("embeddings.cls_token", "class_token"),
    ("embeddings.register_tokens", "registers"),
    ("embeddings.patch_embeddings.*", "patches.*"),
    *block(f"{LAYER}attention.", query="q_proj.*", key="k_proj.*", value="v_proj.*", out="o_proj.*"),
    *block(LAYER, norm1="norm1.*", norm2="norm2.*", scale1="layer_scale1.lambda1", scale2="layer_scale2.lambda1"),
    *block(f"{LAYER}mlp.", up="up_proj.*", gate="gate_proj.*", down="down_proj.*"),
    ("norm.*", "norm.*"),
    ("classifier.*", "head.classifier.*"),
]
GATED = block(f"{LAYER}mlp.", gate="gate_proj.*", gated="up_proj.*")
MEMORY = (r"^(model\.)?layer(?=\.\d+\.)", "layer")


def _dinov3(tensors: LazyTensors, about: Table) -> Fields:
    refuse(about, query_bias=about["value_bias"])  # both or neither
    training = {ours: about[f"pos_embed_{ours}"] or 0.0 for ours in ("shift", "jitter", "rescale")}
    gated = bool(about["use_gated_mlp"])
    if gated:
        refuse(about, hidden_act="silu")
    return {
        "positions": "none",
        "rotary": RotaryConfig("box", base=about["rope_theta"], half=True, **training),  # type: ignore[arg-type]
        "qkv_bias": about["query_bias"],
        "key_bias": about["key_bias"] if about["query_bias"] else True,
        "out_bias": about["proj_bias"],
        "mlp_bias": about["mlp_bias"],
        "layer_scale": about["layerscale_value"],
        **({"activation": "swiglu"} if gated else {}),
    }


def _about(config: ViTConfig) -> Fields:
    rotary = config.rotary or RotaryConfig()
    about: Fields = {f"pos_embed_{name}": getattr(rotary, name) or None for name in ("shift", "jitter", "rescale")}
    about |= {"rope_theta": rotary.base, "query_bias": config.qkv_bias, "value_bias": config.qkv_bias}
    about |= {"key_bias": config.qkv_bias and config.key_bias, "proj_bias": config.out_bias}
    about |= {"mlp_bias": config.mlp_bias}
    about |= {"layerscale_value": config.layer_scale, "num_register_tokens": config.registers}
    return about | {"use_gated_mlp": config.activation == "swiglu"}


def _unpack(tensors: LazyTensors, about: Table) -> LazyTensors:
    """Without registers there is an empty tensor of them; with gates `up` is what they gate."""
    none, gated = not about["num_register_tokens"], bool(about["use_gated_mlp"])

    def rename(name: str) -> str | None:
        return None if none and name == "registers" else name.replace("mlp.up.", "mlp.value.") if gated else name

    return tensors.renamed(rename)


_DEFAULTS: Fields = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "layer_norm_eps": 1e-5}
_DEFAULTS |= {"layerscale_value": 1.0, "num_register_tokens": 0, "rope_theta": 100.0, "use_gated_mlp": False}
_DEFAULTS |= {"query_bias": True, "key_bias": False, "value_bias": True, "proj_bias": True, "mlp_bias": True}
_DEFAULTS |= {"pos_embed_shift": None, "pos_embed_jitter": None, "pos_embed_rescale": 2.0}
_kind = Kind("dinov3_vit", NameMap(*DINOV3), _dinov3, "DINOv3ViTModel", about=_about, defaults=_DEFAULTS, alias=MEMORY)
_kind = replace(_kind, unpack=_unpack)
KINDS = [
    replace(_kind, holds=lambda c: c.rotary is not None and c.activation != "swiglu"),
    replace(_kind, names=NameMap(*GATED, *DINOV3), holds=lambda c: c.rotary is not None and c.activation == "swiglu"),
]
