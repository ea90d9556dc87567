"""Google's and big_vision's .npz against timm's own reader of them, and positions against scipy."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom

import peers
import vitkit
from vitkit.checkpoints import big_vision, google, writing
from vitkit.checkpoints.family import Checkpoint, Written
from vitkit.checkpoints.load import load as load_any
from vitkit.checkpoints.load import open_checkpoint
from vitkit.checkpoints.writing import write_file
from vitkit.model.positions import resize_grid

timm = peers.import_timm()
from timm.layers import HybridEmbed  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from timm.models.vision_transformer_hybrid import _resnetv2  # noqa: E402

load = partial(load_any, activation="gelu")  # timm runs Google's weights with the exact GELU
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def checkpoint_of(model: torch.nn.Module) -> Checkpoint:
    return Checkpoint(model.config, dict(model.state_dict()))


def as_google(config: vitkit.ViTConfig) -> vitkit.ViTConfig:
    pre = dataclasses.replace(config.preprocessing, interpolation="bilinear-plain")
    return config.replace(activation="gelu-tanh", preprocessing=pre)


def ours_random(**changes) -> torch.nn.Module:
    return peers.randomize(vitkit.create("mu", **changes), scale=0.1)


@torch.no_grad()
def test_timm_reads_what_vitkit_writes_for_google(tmp_path) -> None:
    ours = ours_random()
    writing.write(checkpoint_of(ours), tmp_path / "w.npz", "google")
    theirs = VisionTransformer(**SMALL).eval()
    theirs.load_pretrained(str(tmp_path / "w.npz"))
    images = torch.randn(2, 3, 32, 32)
    close(ours(images), theirs(images))
    # and at a larger size that is not square, with timm's way of resizing an npz
    theirs = VisionTransformer(**{**SMALL, "img_size": (64, 48)}).eval()
    theirs.load_pretrained(str(tmp_path / "w.npz"))
    images = torch.randn(2, 3, 64, 48)
    close(load(tmp_path / "w.npz", image_size=(64, 48), resize="timm-npz")(images), theirs(images))


@torch.no_grad()
def test_vitkit_reads_what_timm_reads(tmp_path) -> None:
    """The other way: arrays named and laid out by hand from a timm model, read by both."""
    theirs = peers.randomize(VisionTransformer(**SMALL), scale=0.1)
    arrays = google_arrays(theirs)
    np.savez(tmp_path / "w.npz", **arrays)
    again = VisionTransformer(**SMALL).eval()
    again.load_pretrained(str(tmp_path / "w.npz"))
    ours = load(tmp_path / "w.npz")
    assert (ours.config.heads, ours.config.position_resize) == (2, "official")
    assert load_any(tmp_path / "w.npz").config.activation == "gelu-tanh"  # Google's own: test_flax.py
    images = torch.randn(2, 3, 32, 32)
    close(again(images), theirs(images))
    close(ours(images), theirs(images))


def google_arrays(model: VisionTransformer) -> dict[str, np.ndarray]:
    heads, state = 2, {k: v.numpy() for k, v in model.state_dict().items()}
    width = state["cls_token"].shape[-1]
    arrays = {
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "cls": state["cls_token"],
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
    }
    for i in range(2):
        block, attention = (
            f"Transformer/encoderblock_{i}",
            f"Transformer/encoderblock_{i}/MultiHeadDotProductAttention_1",
        )
        for n, (kind, weight, bias) in enumerate(
            zip(
                ("query", "key", "value"),
                np.split(state[f"blocks.{i}.attn.qkv.weight"], 3),
                np.split(state[f"blocks.{i}.attn.qkv.bias"], 3),
                strict=True,
            )
        ):
            assert n < 3
            arrays[f"{attention}/{kind}/kernel"] = weight.T.reshape(width, heads, -1)
            arrays[f"{attention}/{kind}/bias"] = bias.reshape(heads, -1)
        arrays[f"{attention}/out/kernel"] = state[f"blocks.{i}.attn.proj.weight"].T.reshape(heads, -1, width)
        arrays[f"{attention}/out/bias"] = state[f"blocks.{i}.attn.proj.bias"]
        for theirs, norm in (("LayerNorm_0", "norm1"), ("LayerNorm_2", "norm2")):
            arrays[f"{block}/{theirs}/scale"] = state[f"blocks.{i}.{norm}.weight"]
            arrays[f"{block}/{theirs}/bias"] = state[f"blocks.{i}.{norm}.bias"]
        for r in (0, 1):
            arrays[f"{block}/MlpBlock_3/Dense_{r}/kernel"] = state[f"blocks.{i}.mlp.fc{r + 1}.weight"].T
            arrays[f"{block}/MlpBlock_3/Dense_{r}/bias"] = state[f"blocks.{i}.mlp.fc{r + 1}.bias"]
    return arrays


@pytest.mark.parametrize("layers", [(), (1, 2)])
@torch.no_grad()
def test_hybrids(layers: tuple[int, ...], tmp_path) -> None:
    """timm standardises weights with other small numbers than the official code, so ours are set to timm's here."""
    stem = vitkit.StemConfig(layers)
    patch = 32 if layers == () else stem.stride
    ours = ours_random(stem=stem, patch_size=patch, image_size=64)
    writing.write(checkpoint_of(ours), tmp_path / "w.npz", "google")
    args = {**SMALL, "img_size": 64, "patch_size": patch // stem.stride}
    theirs = VisionTransformer(**args, embed_layer=partial(HybridEmbed, backbone=_resnetv2(layers))).eval()
    theirs.load_pretrained(str(tmp_path / "w.npz"))
    read = load(tmp_path / "w.npz")
    assert read.config.stem == stem
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(read(images), ours(images))
    like_timm = load(tmp_path / "w.npz", stem=dataclasses.replace(stem, numerics="timm"))
    close(like_timm(images), theirs(images))
    assert (read(images) - theirs(images)).abs().max() < 5e-3  # the official numbers, which differ


@torch.no_grad()
def test_old_hybrids_keep_group_norms_with_four_axes(tmp_path) -> None:
    ours = ours_random(stem=vitkit.StemConfig((1,)), patch_size=8)
    arrays = {k: v.numpy() for k, v in google.write(checkpoint_of(ours)).tensors.items()}
    for name in arrays:
        if "gn" in name:
            arrays[name] = arrays[name].reshape(1, 1, 1, -1)
    np.savez(tmp_path / "w.npz", **arrays)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(load(tmp_path / "w.npz")(images), ours(images))


BIG_VISION = {
    "class token": {"positioned_prefix": "none"},
    "mean": {"pooling": "mean", "class_token": False, "positioned_prefix": "none"},
    "map": {"pooling": "map", "class_token": False, "positioned_prefix": "none"},
}
TIMM_ARGS = {
    "class token": {"no_embed_class": True},
    "mean": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "map": {"global_pool": "map", "class_token": False},
}


def as_by_scan(tensors: dict[str, torch.Tensor], depth: int) -> dict[str, torch.Tensor]:
    """All layers in one array, as flax's scan keeps them."""
    first = "params/Transformer/encoderblock_0/"
    parts = [name.removeprefix(first) for name in tensors if name.startswith(first)]
    rest = {name: t for name, t in tensors.items() if "/encoderblock_" not in name}
    layers = range(depth)
    return rest | {
        f"params/Transformer/encoderblock/{part}": torch.stack(
            [tensors[f"params/Transformer/encoderblock_{i}/{part}"] for i in layers]
        )
        for part in parts
    }


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", BIG_VISION)
@torch.no_grad()
def test_big_vision(name: str, stacked: bool, tmp_path) -> None:
    ours = ours_random(**BIG_VISION[name])
    tensors = dict(big_vision.write(checkpoint_of(ours)).tensors)
    write_file(tmp_path / "w.npz", Written(as_by_scan(tensors, ours.config.depth) if stacked else tensors))
    theirs = VisionTransformer(**SMALL, **TIMM_ARGS[name]).eval()
    theirs.load_pretrained(str(tmp_path / "w.npz"))
    images = torch.randn(2, 3, 32, 32)
    close(ours(images), theirs(images))
    back = open_checkpoint(tmp_path / "w.npz")
    assert back.config == as_google(ours.config)
    assert all(torch.equal(back.tensors[k], t) for k, t in ours.state_dict().items())
    larger = VisionTransformer(**{**SMALL, "img_size": (64, 48)}, **TIMM_ARGS[name]).eval()
    larger.load_pretrained(str(tmp_path / "w.npz"))
    images = torch.randn(2, 3, 64, 48)
    close(load(tmp_path / "w.npz", resize="timm-npz", image_size=(64, 48))(images), larger(images))


@torch.no_grad()
def test_big_vision_sincos_has_no_table(tmp_path) -> None:
    ours = ours_random(positions="sincos-2d", pooling="map", class_token=False, positioned_prefix="none")
    writing.write(checkpoint_of(ours), tmp_path / "w.npz", "big_vision")
    images = torch.randn(2, 3, 32, 32)
    read = load(tmp_path / "w.npz", image_size=32)
    assert read.config == as_google(ours.config).replace(activation="gelu")
    assert torch.equal(read(images), ours(images))
    assert any("sin-cos" in line for line in load(tmp_path / "w.npz").load_report)


@torch.no_grad()
def test_old_positions_become_new_by_moving_the_first_row_into_the_class_token(tmp_path) -> None:
    ours = ours_random()
    notes = writing.write(checkpoint_of(ours), tmp_path / "w.npz", "big_vision")
    assert any("class token" in line for line in notes)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(load(tmp_path / "w.npz")(images), ours(images))


@pytest.mark.parametrize("grid", [(7, 7), (24, 24), (5, 9), (14, 28), (3, 14), (14, 14)])
def test_official_resize_is_scipys_zoom(grid: tuple[int, int]) -> None:
    table = torch.randn(14, 14, 6, dtype=torch.float64)
    theirs = zoom(table.numpy(), (grid[0] / 14, grid[1] / 14, 1), order=1)
    np.testing.assert_allclose(resize_grid(table, grid, "official").numpy(), theirs, atol=1e-12)
    rectangle = torch.randn(4, 10, 6, dtype=torch.float64)
    theirs = zoom(rectangle.numpy(), (grid[0] / 4, grid[1] / 10, 1), order=1)
    np.testing.assert_allclose(resize_grid(rectangle, grid, "official").numpy(), theirs, atol=1e-12)


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_libraries_that_resize_with_pillow_are_told_of_antialiasing(to: str, tmp_path) -> None:
    writing.write(checkpoint_of(ours_random()), tmp_path / "w.npz", "google")
    notes = writing.write(open_checkpoint(tmp_path / "w.npz"), tmp_path / to, to)
    assert any("antialiasing" in line for line in notes)
    assert load_any(tmp_path / to).config.preprocessing.interpolation == "bilinear"
