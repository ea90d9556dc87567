"""ViT, DeiT, ViT-MAE, ViT-MSN, I-JEPA, DINOv2 with and without registers, Pixio and the backbone of YOLOS."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vitkit.checkpoints.family import Fields, Table
from vitkit.checkpoints.huggingface.kind import HALF, Kind, has_head, never, refuse
from vitkit.checkpoints.tensors import LazyTensors, NameMap, block
from vitkit.errors import CheckpointError
from vitkit.model.config import ViTConfig

LAYER = "encoder.layer.{i}."
EMBEDDINGS = [
    ("embeddings.cls_token", "class_token"),
    ("embeddings.distillation_token", "distillation_token"),
    ("embeddings.register_tokens", "registers"),
    ("embeddings.position_embeddings", "positions.learned"),
    ("embeddings.patch_embeddings.projection.*", "patches.*"),
]
ATTENTION = [
    *block(f"{LAYER}attention.", query="attention.query.*", key="attention.key.*", value="attention.value.*"),
    *block(f"{LAYER}attention.", out="output.dense.*"),
    *block(f"{LAYER}attention.", query="q_proj.*", key="k_proj.*", value="v_proj.*", out="o_proj.*"),  # in memory
]
MLP = block(LAYER, up="intermediate.dense.*", down="output.dense.*")
NORMS = block(LAYER, norm1="layernorm_before.*", norm2="layernorm_after.*")
GATED = block(LAYER, up="mlp.weights_in.*", down="mlp.weights_out.*")
IN_MEMORY = block(LAYER, up="mlp.fc1.*", down="mlp.fc2.*")
HEAD = [
    ("layernorm.*", "norm.*"),
    ("pooler.dense.*", "head.pre_logits.*"),
    ("classifier.*", "head.classifier.*"),
    ("cls_classifier.*", "head.classifier.*"),
    ("distillation_classifier.*", "head.distilled.*"),
]
NAMES = NameMap(*EMBEDDINGS, *ATTENTION, *NORMS, *MLP, *IN_MEMORY, *HEAD)
DISTILLED = NameMap(HEAD[3], *EMBEDDINGS, *ATTENTION, *NORMS, *MLP, *IN_MEMORY, *HEAD)
PIXIO = NameMap(
    *EMBEDDINGS, *ATTENTION, *block(LAYER, norm1="norm1.*", norm2="norm2.*"), *MLP, *NORMS, *IN_MEMORY, *HEAD
)
YOLOS = NameMap(("embeddings.detection_tokens", "registers"), *NAMES.rows)
DINOV2 = NameMap(
    *EMBEDDINGS,
    *ATTENTION,
    *block(LAYER, scale1="layer_scale1.lambda1", scale2="layer_scale2.lambda1"),
    *block(LAYER, norm1="norm1.*", norm2="norm2.*", up="mlp.fc1.*", down="mlp.fc2.*"),
    *GATED,
    *HEAD,
)
SWIGLU = NameMap(*GATED, *DINOV2.rows)


def _plain(tensors: LazyTensors, about: Table) -> Fields:
    if "head.pre_logits.weight" in tensors:
        refuse(about, pooler_act="tanh")
    return {}


def _pooler(config: ViTConfig) -> Fields:
    return {"pooler_output_size": config.pre_logits, "pooler_act": "tanh"} if config.pre_logits else {}


def _one_head(tensors: LazyTensors, about: Table) -> LazyTensors:
    """DeiT with one classifier, or none, never reads its distillation token: for us that is a register."""
    one = "head.distilled.weight" not in tensors
    return tensors.renamed(lambda name: "registers" if one and name == "distillation_token" else name)


def _distillation_token(tensors: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    if config.registers == 1 and not config.distillation_token:
        tensors = {("distillation_token" if name == "registers" else name): t for name, t in tensors.items()}
    return tensors


def _dinov2(tensors: LazyTensors, about: Table) -> Fields:
    classifies = "head.classifier.weight" in tensors and has_head(about)
    fields: Fields = {"layer_scale": about["layerscale_value"], "positioned_prefix": "class"}
    if about["use_swiglu_ffn"]:
        fields["activation"] = "swiglu"
    # transformers resizes the table with antialiasing only when there are registers
    fields["position_resize"] = "timm" if "num_register_tokens" in about else "huggingface"
    return fields | {"pooling": "cls+mean" if classifies else "cls"}


def _whole_ratio(config: ViTConfig, gated: bool) -> int:
    """The mlp_ratio of a kind that computes the width of its MLP from it."""
    widths = {r: (int(r * config.width * 2 / 3) + 7) // 8 * 8 if gated else r * config.width for r in range(1, 17)}
    ratio = next((r for r, width in widths.items() if width == config.mlp_width), None)
    if ratio is None:
        raise CheckpointError(f"mlp_width={config.mlp_width} is no whole mlp_ratio of width={config.width}")
    return ratio


def _dinov2_about(config: ViTConfig) -> Fields:
    gated = config.activation == "swiglu"
    about: Fields = {"mlp_ratio": _whole_ratio(config, gated), "use_swiglu_ffn": gated}
    about["layerscale_value"] = config.layer_scale or 1.0
    return about | ({"num_register_tokens": config.registers} if config.registers else {})


def _pixio_tokens(tensors: LazyTensors, about: Table) -> LazyTensors:
    """Several class tokens: the first is ours, the others are registers."""
    if about.whole("n_cls_tokens") == 1:
        return tensors
    token = ("class_token",)
    return tensors.rebuilt({"class_token": (token, lambda t: t[:1]), "registers": (token, lambda t: t[1:])})


def _pixio_pack(tensors: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    tokens = [tensors.pop(name) for name in ("class_token", "registers") if name in tensors]
    return {**tensors, "class_token": torch.cat(tokens)}


def _yolos(tensors: LazyTensors, about: Table) -> Fields:
    refuse(about, use_mid_position_embeddings=False)  # a table added after each block
    return {}


def _yolos_about(config: ViTConfig) -> Fields:
    sizes: Fields = {"image_size": list(config.image_size), "num_detection_tokens": config.registers}
    return sizes | {"use_mid_position_embeddings": False}


def _detection_first(tensors: LazyTensors, about: Table) -> LazyTensors:
    """The detection tokens stand after the patches; attention does not mind, and ours stand before: registers."""
    count = about.whole("num_detection_tokens")

    def moved(name: str, tensor: Tensor) -> Tensor:
        order = (tensor[:1], tensor[-count:], tensor[1:-count])
        return torch.cat(order) if name == "positions.learned" else tensor

    return tensors.converted(moved)


def _detection_last(tensors: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    table, count = tensors["positions.learned"], config.registers
    back = torch.cat([table[:1], table[1 + count :], table[1 : 1 + count]])
    return tensors | {"positions.learned": back}


_EPSILON: Fields = {"layer_norm_eps": 1e-6}
_DINOV2: Fields = {**_EPSILON, "layerscale_value": 1.0, "use_swiglu_ffn": False, "mlp_ratio": 4}
_YOLOS: Fields = {"image_size": (512, 864), "num_detection_tokens": 100, "use_mid_position_embeddings": True}
_PIXIO: Fields = {**_EPSILON, "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16}
_PIXIO |= {"image_size": 256, "n_cls_tokens": 8, "mlp_ratio": 4}
_TANH: Fields = {"pooler_act": "tanh"}
_MASKED = r"embeddings\.mask_token|decoder\..*"
_DETECTION = r"class_labels_classifier\..*|bbox_predictor\..*"
_vit = Kind("vit", NAMES, _plain, "ViTModel", "ViTForImageClassification", "vit.", _pooler)
_deit = Kind("deit", NAMES, _plain, "DeiTModel", "DeiTForImageClassification", "deit.", _pooler, _TANH)
_deit = replace(_deit, unpack=_one_head, pack=_distillation_token, left_out=_MASKED)
_dino = Kind("dinov2", DINOV2, _dinov2, "Dinov2Model", "Dinov2ForImageClassification", "dinov2.", _dinov2_about)
_dino = replace(
    _dino, defaults=_DINOV2 | {"patch_size": 14}, holds=lambda c: not c.registers and c.activation != "swiglu"
)
_registers = Kind("dinov2_with_registers", DINOV2, _dinov2, "Dinov2WithRegistersModel", about=_dinov2_about)
_registers = replace(_registers, prefix="dinov2_with_registers.", defaults=_DINOV2 | {"num_register_tokens": 4})
_registers = replace(_registers, classifier="Dinov2WithRegistersForImageClassification")
_ijepa = Kind("ijepa", NAMES, lambda *_: {"pooling": "mean"}, "IJepaModel", prefix="ijepa.", defaults=_TANH)
_yolos_kind = Kind("yolos", YOLOS, _yolos, "YolosModel", "", "vit.", _yolos_about, _YOLOS, left_out=_DETECTION)
_pixio_kind = Kind("pixio", PIXIO, lambda *_: {"pooling": "mean-prefix"}, "PixioModel", defaults=_PIXIO)
_pixio_kind = replace(
    _pixio_kind, about=lambda c: {"n_cls_tokens": c.prefix_tokens, "mlp_ratio": _whole_ratio(c, False)}
)
KINDS = [
    replace(_vit, defaults=_TANH, left_out=_MASKED, statistics=HALF),
    replace(_deit, holds=lambda c: c.registers == 1),
    replace(_deit, names=DISTILLED, classifier=f"{_deit.classifier}WithTeacher", holds=lambda c: c.distillation_token),
    Kind("vit_mae", NAMES, _plain, "ViTMAEModel", left_out=_MASKED, holds=never),
    Kind("vit_msn", NAMES, _plain, "ViTMSNModel", defaults=_EPSILON, holds=never),
    replace(_ijepa, classifier="IJepaForImageClassification"),
    _dino,
    replace(_dino, names=SWIGLU, holds=lambda c: not c.registers and c.activation == "swiglu"),
    replace(_registers, holds=lambda c: c.registers > 0 and c.activation != "swiglu"),
    replace(_registers, names=SWIGLU, holds=lambda c: c.registers > 0 and c.activation == "swiglu"),
    replace(_yolos_kind, unpack=_detection_first, pack=_detection_last, holds=lambda c: c.registers > 1),
    replace(_pixio_kind, unpack=_pixio_tokens, pack=_pixio_pack, holds=lambda c: c.pooling == "mean-prefix"),
]
