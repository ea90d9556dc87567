"""With the same weights, vitkit and Hugging Face's models compute the same numbers.

As in `test_timm.py` the map of names is written out here, and every weight is random.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import peers
from vitkit.model import zoo
from vitkit.model.config import ViTConfig
from vitkit.model.vit import ViT

hf = peers.import_transformers()

# States after the final norm and logits are of order 1, and fp32 rounding in another order of summation
# leaves 1e-6 to 5e-6 after twelve blocks; a mistaken epsilon, GELU or scale shows from 1e-4 up.
TOLERANCE = 1e-5

RENAMES = (
    (r"^(vit|deit|dinov2|dinov2_with_registers|vision_model)\.", ""),
    (r"^embeddings\.(cls_token|class_embedding)$", "class_token"),
    (r"^embeddings\.distillation_token$", "distillation_token"),
    (r"^embeddings\.register_tokens$", "registers"),
    (r"^embeddings\.(position_embeddings|position_embedding\.weight)$", "positions.learned"),
    (r"^embeddings\.patch_embedding(s\.projection)?\.", "patches."),
    (r"^pre_layrnorm\.", "pre_norm."),
    (r"^(encoder\.)?layers?\.(\d+)\.", r"encoder.blocks.\2."),
    (r"\.(layernorm_before|layer_norm1)\.", ".norm1."),
    (r"\.(layernorm_after|layer_norm2)\.", ".norm2."),
    (r"(?<!^head)\.(attention|self_attn)\.(o_proj|out_proj)\.", ".attention.out."),
    (r"\.self_attn\.", ".attention."),
    (r"\.layer_scale([12])\.lambda1$", r".scale\1"),
    (r"\.mlp\.fc1\.", ".mlp.up."),
    (r"\.mlp\.(fc2|down_proj)\.", ".mlp.down."),
    (r"^(layernorm|post_layernorm)\.", "norm."),
    (r"^head\.probe$", "head.pool.probe"),
    (r"^head\.attention\.out_proj\.", "head.pool.out."),
    (r"^head\.attention\.", "head.pool.attention."),
    (r"^head\.layernorm\.", "head.pool.norm."),
    (r"^head\.mlp\.", "head.pool.mlp."),
    (r"^visual_projection\.", "head.projection."),
    (r"^(cls_)?classifier\.", "head.classifier."),
    (r"^distillation_classifier\.", "head.distilled."),
)


def from_huggingface(state: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for pattern, ours in RENAMES:
            name = re.sub(pattern, ours, name)
        renamed[name] = tensor
    renamed.pop("embeddings.mask_token", None)  # used in pre-training only
    for name in ("class_token", "distillation_token", "registers", "positions.learned", "head.pool.probe"):
        if name in renamed:
            renamed[name] = renamed[name].reshape(-1, width)
    for fused, parts in (("attention.qkv", ("q_proj", "k_proj", "v_proj")), ("mlp.up", ("gate_proj", "up_proj"))):
        prefix = fused.split(".")[0]
        for name in [n for n in renamed if f".{prefix}.{parts[0]}." in n]:
            tensors = [renamed.pop(name.replace(parts[0], part)) for part in parts]
            renamed[name.replace(f"{prefix}.{parts[0]}", fused)] = torch.cat(tensors)
    for kind in ("weight", "bias"):
        if (fused_tensor := renamed.pop(f"head.pool.attention.in_proj_{kind}", None)) is not None:
            renamed[f"head.pool.query.{kind}"] = fused_tensor[:width]
            renamed[f"head.pool.key_value.{kind}"] = fused_tensor[width:]
    renamed.setdefault("patches.bias", torch.zeros(width))  # CLIP has none
    return renamed


def twins(theirs: Any, config: ViTConfig) -> tuple[Any, ViT]:
    peers.randomize(theirs, seed=1)
    ours = ViT(config).eval()
    ours.load_state_dict(from_huggingface(theirs.state_dict(), config.width))
    return theirs, ours


def images_for(config: ViTConfig) -> Tensor:
    return torch.randn(2, config.channels, *config.image_size, generator=torch.Generator().manual_seed(2))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.1  # something is being compared
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


SMALL: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
OURS = ViTConfig(32, 8, width=64, depth=3, heads=4, mlp_width=256, classes=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "size", "depth"),
    [
        ("vit-ti/16", 224, 12),
        ("vit-s/16", 96, 12),
        ("vit-b/16", 64, 6),
        pytest.param("vit-b/16", 224, 12, marks=pytest.mark.slow),
    ],
)
def test_published_sizes(name: str, size: int, depth: int) -> None:
    config = zoo.config(name, image_size=size, depth=depth, norm_eps=1e-12)  # Hugging Face's epsilon
    assert isinstance(config, ViTConfig)
    theirs = hf.ViTForImageClassification(
        hf.ViTConfig(
            image_size=size, patch_size=config.patch_size[0], hidden_size=config.width, num_hidden_layers=depth,
            num_attention_heads=config.heads, intermediate_size=config.mlp_width, num_labels=1000,
        )
    )  # fmt: skip
    theirs, ours = twins(theirs, config)
    images = images_for(config)
    with torch.inference_mode():
        assert_close(ours.tokens(images), theirs.vit(images).last_hidden_state)
        assert_close(ours(images), theirs(images).logits)


@pytest.mark.parametrize(
    ("hf_options", "changes"),
    [
        pytest.param({"hidden_act": "gelu_pytorch_tanh"}, {"activation": "gelu-tanh"}, id="tanh-gelu"),
        pytest.param({"hidden_act": "quick_gelu"}, {"activation": "quick-gelu"}, id="quick-gelu"),
        pytest.param({"qkv_bias": False}, {"qkv_bias": False}, id="no-qkv-bias"),
        pytest.param({"num_channels": 1}, {"channels": 1}, id="grey"),
        pytest.param({"layer_norm_eps": 1e-2}, {"norm_eps": 1e-2}, id="epsilon"),
    ],
)
def test_options(hf_options: dict[str, Any], changes: dict[str, Any]) -> None:
    config = OURS.replace(norm_eps=1e-12).replace(**changes)
    theirs, ours = twins(hf.ViTForImageClassification(hf.ViTConfig(**SMALL | hf_options, num_labels=7)), config)
    images = images_for(config)
    with torch.inference_mode():
        assert_close(ours.tokens(images), theirs.vit(images).last_hidden_state)
        assert_close(ours(images), theirs(images).logits)


@pytest.mark.parametrize("size", [(48, 80), (16, 64), (24, 8)])
def test_other_image_sizes(size: tuple[int, int]) -> None:
    """(16, 64) has as many patches as (32, 32) in another shape."""
    config = OURS.replace(norm_eps=1e-12, position_resize="huggingface")
    theirs, ours = twins(hf.ViTForImageClassification(hf.ViTConfig(**SMALL, num_labels=7)), config)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = theirs.vit(images, interpolate_pos_encoding=True).last_hidden_state
        assert_close(ours.tokens(images), expected)


def test_features() -> None:
    """What follows each block equals `hidden_states`, whose first entry is what the first block sees."""
    config = OURS.replace(norm_eps=1e-12)
    theirs, ours = twins(hf.ViTForImageClassification(hf.ViTConfig(**SMALL, num_labels=7)), config)
    images = images_for(config)
    with torch.inference_mode():
        expected = theirs.vit(images, output_hidden_states=True).hidden_states
        assert_close(ours.embedded(images)[0], expected[0])
        for layer, state in enumerate(ours.features(images, range(config.depth))):
            assert_close(state, expected[layer + 1])


def test_attention_weights() -> None:
    """What `on_weights` is handed equals `output_attentions` of the plain Hugging Face path."""
    theirs = hf.ViTModel(hf.ViTConfig(**SMALL, attn_implementation="eager"), add_pooling_layer=False)
    theirs, ours = twins(theirs, OURS.replace(norm_eps=1e-12, classes=0))
    images = images_for(OURS)
    seen: list[Tensor] = []
    with torch.inference_mode():
        ours(images, on_weights=seen.append)
        expected = theirs(images, output_attentions=True).attentions
    for a, b in zip(seen, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # probabilities: at most 1


def test_deit_distilled() -> None:
    theirs = hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**SMALL, num_labels=7))
    config = OURS.replace(norm_eps=1e-12, distillation_token=True)
    theirs, ours = twins(theirs, config)
    images = images_for(config)
    with torch.inference_mode():
        expected = theirs(images)
        tokens = ours.tokens(images)
        assert_close(tokens, theirs.deit(images).last_hidden_state)
        assert_close(ours(images), expected.logits)
        for a, b in zip(ours.head.both(tokens), (expected.cls_logits, expected.distillation_logits), strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2(swiglu: bool, registers: int) -> None:
    options = {k: v for k, v in SMALL.items() if k != "intermediate_size"} | {"use_swiglu_ffn": swiglu, "num_labels": 7}
    if registers:
        theirs: Any = hf.Dinov2WithRegistersConfig(**options, num_register_tokens=registers)
        theirs = hf.Dinov2WithRegistersForImageClassification(theirs)
    else:
        theirs = hf.Dinov2ForImageClassification(hf.Dinov2Config(**options))
    mlp: dict[str, Any] = {"activation": "gelu", "mlp_width": 256}
    if swiglu:
        mlp = {"activation": "swiglu", "mlp_width": 176}  # two thirds of 256, up to a multiple of 8
    shared: dict[str, Any] = {"positioned_prefix": "class", "layer_scale": 1.0, "pooling": "cls+mean"}
    config = OURS.replace(registers=registers, **shared, **mlp)
    theirs, ours = twins(theirs, config)
    images = images_for(config)
    with torch.inference_mode():
        assert_close(ours.tokens(images), theirs.base_model(images).last_hidden_state)
        assert_close(ours(images), theirs(images).logits)


def test_clip() -> None:
    """A norm before the blocks, no bias in the patches, quick GELU, and a projection of the class token."""
    theirs = hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**SMALL, projection_dim=24))
    config = OURS.replace(pre_norm=True, activation="quick-gelu", norm_eps=1e-5, projection=24, classes=0)
    theirs, ours = twins(theirs, config)
    images = images_for(config)
    with torch.inference_mode():
        expected = theirs(images)
        last = theirs.vision_model.post_layernorm(expected.last_hidden_state)  # HF returns the states before it
        assert_close(ours.tokens(images), last)
        assert_close(ours(images), expected.image_embeds)


def test_siglip() -> None:
    """Attention (MAP) pooling over patches, no class token, tanh GELU."""
    theirs = hf.SiglipVisionModel(hf.SiglipVisionConfig(**SMALL))
    config = OURS.replace(pooling="map", class_token=False, activation="gelu-tanh", classes=0)
    theirs, ours = twins(theirs, config)
    images = images_for(config)
    with torch.inference_mode():
        expected = theirs(images)
        assert_close(ours.tokens(images), expected.last_hidden_state)
        assert_close(ours(images), expected.pooler_output)
