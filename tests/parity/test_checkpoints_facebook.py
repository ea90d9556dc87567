"""DINO, DINOv2 and MAE as facebookresearch nests and names them, against timm's and transformers' outputs."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import peers
from vitkit.checkpoints.load import load

timm = peers.import_timm()
transformers = peers.import_transformers()
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def peer(**more) -> torch.nn.Module:
    return peers.randomize(VisionTransformer(**SMALL, **more, dynamic_img_size=True), scale=0.1)


def dino_table(table: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """DINO's and DINOv2's own resizing, written out from its definition."""
    patches = table[:, 1:].reshape(1, 4, 4, -1).permute(0, 3, 1, 2)
    scale = ((grid[0] + 0.1) / 4, (grid[1] + 0.1) / 4)
    resized = F.interpolate(patches, scale_factor=scale, mode="bicubic")
    assert resized.shape[-2:] == grid
    return torch.cat([table[:, :1], resized.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


@pytest.mark.parametrize("prefix", ["backbone.", "module.backbone.", "module."])
@torch.no_grad()
def test_dino_inside_teacher(prefix: str, tmp_path) -> None:
    theirs = peer()
    state = {f"{prefix}{k}": v for k, v in theirs.state_dict().items()}
    extra = {f"{prefix.replace('backbone.', '')}head.mlp.0.weight": torch.randn(8, 32)}
    student = {k: torch.randn_like(v) for k, v in state.items()}
    full = {"student": student, "teacher": {**state, **extra}, "epoch": 3, "args": argparse.Namespace(lr=1e-3)}
    torch.save(full, tmp_path / "dino.pth")
    ours = load(tmp_path / "dino.pth", heads=2)
    assert ours.config.classes == 0
    assert ours.config.preprocessing.mean == (0.485, 0.456, 0.406)
    assert any("'teacher'" in line for line in ours.load_report)
    images = torch.randn(2, 3, 32, 32)
    close(ours(images), theirs(images))
    larger = VisionTransformer(**{**SMALL, "img_size": (64, 48)}).eval()
    larger.load_state_dict({**theirs.state_dict(), "pos_embed": dino_table(theirs.pos_embed, (8, 6))})
    images = torch.randn(2, 3, 64, 48)
    close(ours(images), larger(images))


@torch.no_grad()
def test_mae_pretraining_drops_its_decoder(tmp_path) -> None:
    theirs = peer()
    decoder = {"mask_token": torch.randn(1, 1, 8), "decoder_embed.weight": torch.randn(8, 32)}
    decoder["decoder_blocks.0.norm1.weight"] = torch.randn(8)
    torch.save({"model": {**theirs.state_dict(), **decoder}}, tmp_path / "mae.pth")
    ours = load(tmp_path / "mae.pth", heads=2)
    images = torch.randn(2, 3, 32, 32)
    close(ours(images), theirs(images))
    assert any("left out: 3 tensors" in line for line in ours.load_report)
    assert load(tmp_path / "mae.pth", heads=2, classes=4)(images).shape == (2, 4)


@torch.no_grad()
def test_mae_fine_tuned_pools_the_mean(tmp_path) -> None:
    theirs = peers.randomize(VisionTransformer(**{**SMALL, "num_classes": 5}, global_pool="avg"), scale=0.1)
    torch.save(
        {"model": theirs.state_dict(), "optimizer": {"state": {0: {"step": torch.ones(1)}}}}, tmp_path / "mae.pth"
    )
    ours = load(tmp_path / "mae.pth", heads=2)
    assert (ours.config.pooling, ours.config.norm_after_pooling) == ("mean", True)
    images = torch.randn(2, 3, 32, 32)
    close(ours(images), theirs(images))


def dinov2_state(folder, registers: int, swiglu: bool, chunks: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """transformers' DINOv2, and its weights under facebookresearch's names."""
    kind = "Dinov2WithRegisters" if registers else "Dinov2"
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    more = {"num_register_tokens": registers} if registers else {}
    config = getattr(transformers, f"{kind}Config")(**sizes, **more, use_swiglu_ffn=swiglu)
    theirs = peers.randomize(getattr(transformers, f"{kind}Model")(config), scale=0.1)
    theirs.save_pretrained(folder)
    old = load_file(folder / "model.safetensors")
    state = {
        "cls_token": old["embeddings.cls_token"],
        "mask_token": old["embeddings.mask_token"],
        "pos_embed": old["embeddings.position_embeddings"],
        "patch_embed.proj.weight": old["embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": old["embeddings.patch_embeddings.projection.bias"],
        "norm.weight": old["layernorm.weight"],
        "norm.bias": old["layernorm.bias"],
    }
    if registers:
        state["register_tokens"] = old["embeddings.register_tokens"]
    mlp = {"w12": "weights_in", "w3": "weights_out"} if swiglu else {"fc1": "fc1", "fc2": "fc2"}
    for i in range(2):
        block, layer = (f"blocks.0.{i}" if chunks else f"blocks.{i}"), f"encoder.layer.{i}"
        for part in ("weight", "bias"):
            qkv = [old[f"{layer}.attention.attention.{one}.{part}"] for one in ("query", "key", "value")]
            state[f"{block}.attn.qkv.{part}"] = torch.cat(qkv)
            state[f"{block}.attn.proj.{part}"] = old[f"{layer}.attention.output.dense.{part}"]
            for norm in ("norm1", "norm2"):
                state[f"{block}.{norm}.{part}"] = old[f"{layer}.{norm}.{part}"]
            for ours, name in mlp.items():
                state[f"{block}.mlp.{ours}.{part}"] = old[f"{layer}.mlp.{name}.{part}"]
        for n in (1, 2):
            state[f"{block}.ls{n}.gamma"] = old[f"{layer}.layer_scale{n}.lambda1"]
    return theirs, state


@pytest.mark.parametrize(("registers", "swiglu", "chunks"), [(0, False, False), (4, False, False), (0, True, True)])
@torch.no_grad()
def test_dinov2(registers: int, swiglu: bool, chunks: bool, tmp_path) -> None:
    theirs, state = dinov2_state(tmp_path / "theirs", registers, swiglu, chunks)
    torch.save(state, tmp_path / "dinov2.pth")
    ours = load(tmp_path / "dinov2.pth", heads=2)
    assert ours.config.registers == registers
    assert ours.config.positioned_prefix == ("class" if registers else "all")
    assert (ours.config.activation == "swiglu") == swiglu
    assert ours.config.position_resize == ("timm" if registers else "dinov2")
    images = torch.randn(2, 3, 32, 32)
    close(ours(images), theirs(images).pooler_output)
    images = torch.randn(2, 3, 64, 48)
    # transformers resizes without DINOv2's offset; with registers it is the original's way
    like_theirs = load(tmp_path / "dinov2.pth", heads=2, resize="timm" if registers else "huggingface")
    close(like_theirs(images), theirs(images).pooler_output)
    close(load(tmp_path / "dinov2.pth", heads=2, classes=3)(images), torch.zeros(2, 3))


@torch.no_grad()
def test_published_sizes_of_mae_tell_the_heads_of_a_fine_tuned_one(tmp_path) -> None:
    """timm has these models with the class token read; MAE's own code fine-tunes them with the mean."""
    theirs = timm.create_model("vit_tiny_patch16_224", global_pool="avg", img_size=32, num_classes=3).eval()
    torch.save({"model": theirs.state_dict()}, tmp_path / "mae.pth")
    ours = load(tmp_path / "mae.pth")
    assert (ours.config.pooling, ours.config.heads) == ("mean", 3)
    images = torch.randn(2, 3, 32, 32)
    close(ours(images), theirs(images))


@torch.no_grad()
@pytest.mark.parametrize("wrapped", ["weights/", "model/model_ema.backbone.", "state_dict/_orig_mod.module."])
def test_weights_in_other_wrappings(wrapped: str, tmp_path) -> None:
    theirs, (container, prefix) = peer(), wrapped.split("/")
    torch.save({container: {f"{prefix}{k}": v for k, v in theirs.state_dict().items()}}, tmp_path / "w.pth")
    images = torch.randn(2, 3, 32, 32)
    close(load(tmp_path / "w.pth", heads=2)(images), theirs(images))


@torch.no_grad()
def test_dinov2_with_its_linear_classifier(tmp_path) -> None:
    theirs, state = dinov2_state(tmp_path / "theirs", 0, False, False)
    weight, bias = torch.randn(5, 64), torch.randn(5)
    whole = {f"backbone.{name}": tensor for name, tensor in state.items()}
    torch.save(whole | {"linear_head.weight": weight, "linear_head.bias": bias}, tmp_path / "lc.pth")
    images = torch.randn(2, 3, 32, 32)
    tokens = theirs(images).last_hidden_state
    pooled = torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1)
    close(load(tmp_path / "lc.pth", heads=2)(images), pooled @ weight.T + bias)
