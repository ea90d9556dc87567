"""timm: the same logits from the same file, at its own size and at a larger one that is not square, both ways."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

import peers
from vitkit.checkpoints import writing
from vitkit.checkpoints.load import load, open_checkpoint

timm = peers.import_timm()
from timm.layers import HybridEmbed, SwiGLUPacked  # noqa: E402
from timm.models.deit import VisionTransformerDistilled  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from timm.models.vision_transformer_hybrid import _resnetv2  # noqa: E402

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
QUICK = {"act_layer": "quick_gelu", "norm_layer": partial(torch.nn.LayerNorm, eps=1e-5)}
VARIANTS = {
    "plain": {},
    "mean pooling": {"global_pool": "avg"},
    "mean pooling without class token": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "map": {"global_pool": "map", "class_token": False},
    "layer scale": {"init_values": 0.1},
    "registers": {"reg_tokens": 4, "no_embed_class": True},
    "positioned registers": {"reg_tokens": 2, "no_embed_class": False, "img_size": 40},
    "deit3": {"no_embed_class": True, "init_values": 1e-4},
    "clip": {"pre_norm": True, **QUICK},
    "no qkv bias": {"qkv_bias": False},
    "swiglu": {"mlp_layer": SwiGLUPacked, "act_layer": torch.nn.SiLU, "mlp_ratio": 5.0},
    "no positions": {"pos_embed": "none"},
    "no head": {"num_classes": 0},
    "grey": {"in_chans": 1},
    "not square": {"img_size": (32, 48)},
}


def stated(variant: dict) -> dict:
    """What a state dict does not tell."""
    told = {"heads": 2, "image_size": variant.get("img_size", 32)}
    told |= {"positions": "none"} if "pos_embed" in variant else {}
    told |= {"activation": "gelu"} if variant.get("class_token") is False else {}  # some of SigLIP have the tanh form
    return told | ({"activation": "quick-gelu"} if "norm_layer" in variant else {})


def peer(variant: dict) -> torch.nn.Module:
    return peers.randomize(VisionTransformer(**{**SMALL, **variant}, dynamic_img_size=True), scale=0.1)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_same_logits_at_both_sizes(name: str, tmp_path) -> None:
    theirs = peer(VARIANTS[name])
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = load(tmp_path / "weights.pth", **stated(VARIANTS[name]))
    channels = VARIANTS[name].get("in_chans", 3)
    native = VARIANTS[name].get("img_size", 32)
    sizes = [native if isinstance(native, tuple) else (native, native), (64, 48)]
    for size in sizes:
        images = torch.randn(2, channels, *size)
        close(ours(images), theirs(images))


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "no head"])
@torch.no_grad()
def test_written_for_timm_and_read_back_by_it(name: str, tmp_path) -> None:
    theirs = peer(VARIANTS[name])
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    checkpoint = open_checkpoint(tmp_path / "weights.pth", **stated(VARIANTS[name]))
    writing.write(checkpoint, tmp_path / "folder", "timm")
    again = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    size = checkpoint.config.image_size
    images = torch.randn(2, checkpoint.config.channels, *size)
    close(again(images), theirs(images))
    back = open_checkpoint(tmp_path / "folder")
    assert back.config == checkpoint.config.replace(preprocessing=back.config.preprocessing)
    assert back.config.preprocessing.crop == checkpoint.config.preprocessing.crop
    for key, tensor in checkpoint.tensors.items():
        assert torch.equal(back.tensors[key], tensor), key


@torch.no_grad()
def test_distilled_deit(tmp_path) -> None:
    theirs = peers.randomize(VisionTransformerDistilled(**SMALL, dynamic_img_size=True))
    torch.save({"model": theirs.state_dict()}, tmp_path / "deit.pth")
    ours = load(tmp_path / "deit.pth", heads=2, resize="timm")
    assert ours.config.distillation_token
    for size in ((32, 32), (64, 48)):
        images = torch.randn(2, 3, *size)
        close(ours(images), theirs(images))
    writing.write(open_checkpoint(tmp_path / "deit.pth", heads=2), tmp_path / "folder", "timm")
    again = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32)
    close(again(images), theirs(images))


@pytest.mark.parametrize("layers", [(), (1, 2), pytest.param((3, 4, 9), marks=pytest.mark.slow)])
@torch.no_grad()
def test_hybrids(layers: tuple[int, ...], tmp_path) -> None:
    embed = partial(HybridEmbed, backbone=_resnetv2(layers))
    size, patch = (64, 8 if layers == () else 1)
    theirs = VisionTransformer(
        **{**SMALL, "img_size": size, "patch_size": patch}, embed_layer=embed, dynamic_img_size=True
    )
    theirs = peers.randomize(theirs)
    torch.save(theirs.state_dict(), tmp_path / "hybrid.pth")
    ours = load(tmp_path / "hybrid.pth", heads=2)
    assert ours.config.stem.layers == layers
    assert ours.config.stem.numerics == "timm"
    for shape in ((64, 64), (64, 96)):
        images = torch.randn(2, 3, *shape)
        close(ours(images), theirs(images))
    if layers != (1, 2):
        writing.write(open_checkpoint(tmp_path / "hybrid.pth", heads=2), tmp_path / "folder", "timm")
        again = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
        close(again(torch.ones(1, 3, 64, 64)), theirs(torch.ones(1, 3, 64, 64)))


@torch.no_grad()
def test_hub_folder_written_by_timm_itself(tmp_path) -> None:
    """save_for_hf writes config.json with architecture, labels and preprocessing; all of it arrives."""
    from timm.models import save_for_hf

    args = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 3}
    theirs = peers.randomize(timm.create_model("vit_base_patch16_224", **args, dynamic_img_size=True))
    labels = ["cat", "dog", "eel"]
    save_for_hf(theirs, str(tmp_path / "m"), {"label_names": labels}, args, safe_serialization=True)
    ours = load(tmp_path / "m")
    assert (ours.config.heads, ours.config.classes, ours.class_names) == (4, 3, ("cat", "dog", "eel"))
    assert ours.config.preprocessing.mean == (0.5, 0.5, 0.5)
    assert ours.config.preprocessing.interpolation == "bicubic"
    assert (
        ours.config.preprocessing.crop
        == json.loads((tmp_path / "m/config.json").read_text())["pretrained_cfg"]["crop_pct"]
    )
    for size in ((32, 32), (64, 48)):
        images = torch.randn(2, 3, *size)
        close(ours(images), theirs(images))


@torch.no_grad()
def test_resized_when_loading_equals_timm_resizing(tmp_path) -> None:
    theirs = peer({})
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = load(tmp_path / "weights.pth", image_size=(64, 48), heads=2)
    assert ours.config.image_size == (64, 48)
    assert any("positions: grid 4x4 -> 8x6" in line for line in ours.load_report)
    images = torch.randn(2, 3, 64, 48)
    close(ours(images), theirs(images))
