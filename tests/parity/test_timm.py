"""With the same weights, vitkit and timm compute the same numbers.

The map of names below is written out here rather than taken from `vitkit.checkpoints`, so that a
mistake there cannot hide one in the model. Every weight is random: zeros would hide a part.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peers
from vitkit.model import zoo
from vitkit.model.config import StemConfig, ViTConfig
from vitkit.model.vit import ViT

timm = peers.import_timm()

# States after the final norm and logits are of order 1. fp32 carries 6e-8 of that per operation, and two
# orders of summation drift apart by about the square root of the number of operations in a row: 1e-6 to
# 5e-6 after twelve blocks. A mistaken epsilon, GELU or scale shows from 1e-4 up. Logits of wide models reach
# 4 and more, so that theirs is a share of the largest (B/32: 1.2e-5 apart in fp32, 1e-14 in float64).
TOLERANCE = 1e-5

RENAMES = (
    (r"^patch_embed\.backbone\.stem\.conv\.", "stem.root."),
    (r"^patch_embed\.backbone\.conv\.", "stem.root."),
    (r"^patch_embed\.backbone\.(stem\.)?norm\.", "stem.norm."),
    (r"^patch_embed\.backbone\.stages\.(\d+)\.blocks\.", r"stem.stages.\1."),
    (r"\.downsample\.conv\.", ".shortcut.0."),
    (r"\.downsample\.norm\.", ".shortcut.1."),
    (r"^patch_embed\.proj\.", "patches."),
    (r"^cls_token$", "class_token"),
    (r"^dist_token$", "distillation_token"),
    (r"^reg_token$", "registers"),
    (r"^pos_embed$", "positions.learned"),
    (r"^norm_pre\.", "pre_norm."),
    (r"^blocks\.", "encoder.blocks."),
    (r"\.attn\.qkv\.", ".attention.qkv."),
    (r"\.attn\.proj\.", ".attention.out."),
    (r"\.mlp\.fc1\.", ".mlp.up."),
    (r"\.mlp\.fc2\.", ".mlp.down."),
    (r"\.ls([12])\.gamma$", r".scale\1"),
    (r"^attn_pool\.latent$", "head.pool.probe"),
    (r"^attn_pool\.q\.", "head.pool.query."),
    (r"^attn_pool\.kv\.", "head.pool.key_value."),
    (r"^attn_pool\.proj\.", "head.pool.out."),
    (r"^attn_pool\.", "head.pool."),
    (r"^fc_norm\.", "head.norm."),
    (r"^head\.(weight|bias)$", r"head.classifier.\1"),
    (r"^head_dist\.", "head.distilled."),
)
TOKENS = ("class_token", "distillation_token", "registers", "positions.learned", "head.pool.probe")


def from_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in state.items():
        for pattern, ours in RENAMES:
            name = re.sub(pattern, ours, name)
        renamed[name] = tensor[0] if name in TOKENS else tensor  # timm keeps a batch axis of one
    return renamed


def twins(theirs: Any, config: ViTConfig) -> tuple[Any, ViT]:
    peers.randomize(theirs, seed=1)
    ours = ViT(config).eval()
    ours.load_state_dict(from_timm(theirs.state_dict()))  # strict: nothing missing, nothing left over
    return theirs, ours


def assert_equal(theirs: Any, ours: ViT, images: Tensor) -> None:
    with torch.inference_mode():
        theirs_tokens, ours_tokens = theirs.forward_features(images), ours.tokens(images)
        assert theirs_tokens.std() > 0.1  # something is being compared
        torch.testing.assert_close(ours_tokens, theirs_tokens, rtol=TOLERANCE, atol=TOLERANCE)
        logits = theirs(images)
        atol = TOLERANCE * max(1.0, logits.abs().max().item())
        torch.testing.assert_close(ours(images), logits, rtol=TOLERANCE, atol=atol)


def images_for(config: ViTConfig, batch: int = 2) -> Tensor:
    random = torch.Generator().manual_seed(2)
    return torch.randn(batch, config.channels, *config.image_size, generator=random)


@pytest.mark.parametrize(
    ("name", "ours", "size", "depth"),
    [
        ("vit_tiny_patch16_224", "vit-ti/16", 224, 12),
        ("vit_small_patch16_224", "vit-s/16", 96, 12),
        ("vit_base_patch32_224", "vit-b/32", 128, 4),
        ("vit_base_patch16_224", "vit-b/16", 64, 6),
        pytest.param("vit_base_patch16_224", "vit-b/16", 224, 12, marks=pytest.mark.slow),
    ],
)
def test_published_sizes(name: str, ours: str, size: int, depth: int) -> None:
    config = zoo.config(ours, image_size=size, depth=depth)
    assert isinstance(config, ViTConfig)
    theirs = timm.create_model(name, img_size=size, depth=depth)
    assert_equal(*twins(theirs, config), images_for(config))


SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4, "num_classes": 7}
OURS = ViTConfig(32, 8, width=64, depth=3, heads=4, mlp_width=256, classes=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("timm_options", "changes"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({"in_chans": 5}, {"channels": 5}, id="five-channels"),
        pytest.param({"qkv_bias": False}, {"qkv_bias": False}, id="no-qkv-bias"),
        pytest.param({"img_size": (32, 48)}, {"image_size": (32, 48)}, id="rectangular"),
        pytest.param({"patch_size": (8, 4)}, {"patch_size": (8, 4)}, id="rectangular-patch"),
        pytest.param({"global_pool": "avg"}, {"pooling": "mean", "norm_after_pooling": True}, id="mean-fc-norm"),
        pytest.param({"global_pool": "avg", "fc_norm": False}, {"pooling": "mean"}, id="mean"),
        pytest.param(
            {"global_pool": "avg", "fc_norm": False, "class_token": False},
            {"pooling": "mean", "class_token": False},
            id="mean-without-class-token",
        ),
        pytest.param({"reg_tokens": 4}, {"registers": 4}, id="registers"),
        pytest.param(
            {"reg_tokens": 4, "no_embed_class": True},
            {"registers": 4, "positioned_prefix": "none"},
            id="registers-without-positions",
        ),
        pytest.param({"no_embed_class": True}, {"positioned_prefix": "none"}, id="class-without-position"),
        pytest.param({"init_values": 1e-5}, {"layer_scale": 1e-5}, id="layer-scale"),
        pytest.param({"pos_embed": "none"}, {"positions": "none"}, id="no-positions"),
        pytest.param(
            {"global_pool": "map", "class_token": False, "act_layer": "gelu_tanh"},
            {"pooling": "map", "class_token": False, "activation": "gelu-tanh"},
            id="map-pooling-tanh-gelu",
        ),
        pytest.param({"pre_norm": True}, {"pre_norm": True}, id="pre-norm"),
    ],
)
def test_options(timm_options: dict[str, Any], changes: dict[str, Any]) -> None:
    config = OURS.replace(**changes)
    theirs = timm.models.vision_transformer.VisionTransformer(**SMALL | timm_options)
    if theirs.patch_embed.proj.bias is None:
        theirs.patch_embed.proj.bias = nn.Parameter(torch.empty(64))  # timm leaves it out before a norm; ours keeps it
    assert_equal(*twins(theirs, config), images_for(config))


def test_quick_gelu() -> None:
    config = OURS.replace(activation="quick-gelu", pre_norm=True, norm_eps=1e-5)
    theirs = timm.create_model("vit_base_patch16_clip_quickgelu_224", **SMALL)
    theirs.patch_embed.proj.bias = nn.Parameter(torch.empty(64))
    assert_equal(*twins(theirs, config), images_for(config))


def test_distilled() -> None:
    config = OURS.replace(distillation_token=True)
    theirs, ours = twins(timm.create_model("deit_tiny_distilled_patch16_224", **SMALL), config)
    images = images_for(config)
    assert_equal(theirs, ours, images)
    theirs.set_distilled_training(True)
    theirs.train()  # the two sets of logits come apart only in training; nothing here is random
    for a, b in zip(ours.head.both(ours.tokens(images)), theirs(images), strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "stem", "patch"),
    [("vit_small_r26_s32_224", (2, 2, 2, 2), 32), ("vit_tiny_r_s16_p8_224", (), 32)],
)
def test_hybrid(name: str, stem: tuple[int, ...], patch: int) -> None:
    """At 96 pixels SAME padding of even sizes puts the odd row at the bottom.

    Exact in float64. In fp32 both sides stray 4e-5 from that with a gain of 1 at the end of each unit,
    the rounding of 26 convolutions in a row; with a trained network's small gain they agree to 1e-5.
    """
    theirs = timm.create_model(name, img_size=96, depth=3, num_classes=7)
    width, heads = theirs.embed_dim, theirs.blocks[0].attn.num_heads
    config = OURS.replace(image_size=96, patch_size=patch, width=width, heads=heads, mlp_width=4 * width)
    theirs, ours = twins(theirs, config.replace(stem=StemConfig(stem, numerics="timm")))
    images = images_for(config)
    with torch.inference_mode():
        tokens = ours.double().tokens(images.double())
        torch.testing.assert_close(tokens, theirs.double().forward_features(images.double()), rtol=1e-10, atol=1e-10)
    for model in (theirs.float(), ours.float()):
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm3.weight"):
                parameter.data.mul_(0.2)
    assert_equal(theirs, ours, images)


@pytest.mark.parametrize("size", [(48, 80), (16, 32)])
def test_other_image_sizes(size: tuple[int, int]) -> None:
    """timm's dynamic_img_size resizes the positions on the fly, as ours always does."""
    config = OURS.replace(position_resize="timm")
    theirs = timm.models.vision_transformer.VisionTransformer(**SMALL, dynamic_img_size=True)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(3))
    assert_equal(*twins(theirs, config), images)


def test_gradients() -> None:
    """The same loss gives the same gradient of every weight."""
    theirs, ours = twins(timm.models.vision_transformer.VisionTransformer(**SMALL), OURS)
    images = images_for(OURS)
    for model in (theirs, ours):
        model(images).square().sum().backward()
    expected = from_timm({name: p.grad for name, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        # gradients sum over all tokens of the batch and reach 10 to 100: relative, with a floor for the small ones
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-4, msg=f"gradient of {name}")


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("timm_options", "changes"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({"reg_tokens": 4, "init_values": 1e-1}, {"registers": 4, "layer_scale": 1e-1}, id="registers"),
        pytest.param({"global_pool": "avg"}, {"pooling": "mean", "norm_after_pooling": True}, id="mean-fc-norm"),
    ],
)
def test_features(timm_options: dict[str, Any], changes: dict[str, Any], norm: bool) -> None:
    """Maps and tokens of chosen blocks equal `forward_intermediates`, at another size too; see TOLERANCE."""
    config = OURS.replace(position_resize="timm", **changes)
    theirs, ours = twins(
        timm.models.vision_transformer.VisionTransformer(**SMALL | timm_options, dynamic_img_size=True), config
    )
    for size in [(32, 32), (48, 24)]:
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(4))
        with torch.inference_mode():
            expected = theirs.forward_intermediates(images, indices=[0, 2], norm=norm, intermediates_only=True)
            found = ours.features(images, [0, -1], norm=norm, grid=True)
            torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
            whole = theirs.forward_intermediates(
                images, indices=[1], norm=norm, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
            )
            (patches, prefix), (tokens,) = whole[0], ours.features(images, [1], norm=norm)
            torch.testing.assert_close(tokens, torch.cat([prefix, patches], 1), rtol=TOLERANCE, atol=TOLERANCE)
