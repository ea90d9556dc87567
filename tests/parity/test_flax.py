"""Against flax: the official architecture written with flax's own layers, and jax's own resize and initialisers.

The models below are what vit_jax documents, in a few lines: names of parameters are those that flax gives today.
Weights are random, nothing at a neutral value. Tolerance 3e-6 of the output's range: two libraries sum in another
order; a wrong GELU would show at 3e-4.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import zoom

import vitkit
from vitkit.data.preprocess import prepare, to_tensor
from vitkit.model.base import lecun_normal_
from vitkit.model.config import Preprocessing
from vitkit.model.resizing import resize_grid

jax = pytest.importorskip("jax")
flax = pytest.importorskip("flax")
import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402

WIDTH, HEADS, MLP, PATCH, SIZE = 32, 2, 64, 8, 32


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.gelu(nn.Dense(MLP)(x))  # Dense_0: names are given in this order
        return nn.Dense(x.shape[-1])(hidden)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(y, y)
        y = nn.LayerNorm()(x)
        return x + MlpBlock()(y)


class Positions(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param("pos_embedding", nn.initializers.normal(0.02), (1, *x.shape[1:]))


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Positions(name="posembed_input")(x)
        for i in range(2):
            x = Block(name=f"encoderblock_{i}")(x)
        return nn.LayerNorm(name="encoder_norm")(x)


class StdConv(nn.Conv):
    def param(self, name, *args, **kwargs):
        param = super().param(name, *args, **kwargs)
        if name == "kernel":
            param = (param - param.mean(axis=(0, 1, 2))) / (param.std(axis=(0, 1, 2)) + 1e-5)
        return param


class Unit(nn.Module):
    features: int
    strides: tuple = (1, 1)

    @nn.compact
    def __call__(self, x):
        shortcut = x
        if x.shape[-1] != 4 * self.features or self.strides != (1, 1):
            shortcut = StdConv(4 * self.features, (1, 1), self.strides, use_bias=False, name="conv_proj")(x)
            shortcut = nn.GroupNorm(name="gn_proj")(shortcut)
        y = nn.relu(nn.GroupNorm(name="gn1")(StdConv(self.features, (1, 1), use_bias=False, name="conv1")(x)))
        y = StdConv(self.features, (3, 3), self.strides, use_bias=False, name="conv2")(y)
        y = StdConv(4 * self.features, (1, 1), use_bias=False, name="conv3")(nn.relu(nn.GroupNorm(name="gn2")(y)))
        return nn.relu(shortcut + nn.GroupNorm(name="gn3", scale_init=nn.initializers.zeros)(y))


class Stage(nn.Module):
    features: int
    strides: tuple

    @nn.compact
    def __call__(self, x):
        return Unit(self.features, self.strides, name="unit1")(x)


class OfficialViT(nn.Module):
    pooling: str = "token"
    pre_logits: bool = False
    hybrid: bool = False

    @nn.compact
    def __call__(self, x):
        patch = (PATCH, PATCH)
        if self.hybrid:
            x = nn.relu(nn.GroupNorm(name="gn_root")(StdConv(64, (7, 7), (2, 2), use_bias=False, name="conv_root")(x)))
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            x = Stage(64, (1, 1), name="block1")(x)
            patch = (1, 1)
        x = nn.Conv(WIDTH, patch, strides=patch, padding="VALID", name="embedding")(x)
        x = x.reshape(x.shape[0], -1, WIDTH)
        if self.pooling == "token":
            cls = self.param("cls", nn.initializers.zeros, (1, 1, WIDTH))
            x = jnp.concatenate([jnp.tile(cls, [x.shape[0], 1, 1]), x], axis=1)
        x = Encoder(name="Transformer")(x)
        x = x[:, 0] if self.pooling == "token" else x.mean(axis=1)
        if self.pre_logits:
            x = nn.tanh(nn.Dense(WIDTH, name="pre_logits")(x))
        return nn.Dense(5, name="head", kernel_init=nn.initializers.zeros)(x)


def saved(model: nn.Module, path: Path) -> dict:
    """Random weights, written as vit_jax does: one array for each parameter, by its path."""
    size = (1, SIZE, SIZE, 3)
    shapes = jax.eval_shape(model.init, jax.random.PRNGKey(0), jnp.zeros(size))["params"]
    rng = np.random.default_rng(0)

    def fill(where, leaf):
        around = 1.0 if "scale" in str(where[-1]) else 0.0
        return (around + rng.normal(0, 0.2, leaf.shape)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(fill, shapes)
    flat = {"/".join(k.key for k in where): leaf for where, leaf in jax.tree_util.tree_leaves_with_path(params)}
    np.savez(path, **flat)
    return params


@pytest.mark.parametrize(
    "options", [{}, {"pre_logits": True}, {"pooling": "gap"}, {"hybrid": True}], ids=["plain", "pre", "gap", "hybrid"]
)
def test_equal_with_what_the_file_implies(options: dict, tmp_path: Path) -> None:
    model = OfficialViT(**options)
    params = saved(model, tmp_path / "model.npz")
    images = np.random.default_rng(1).normal(0, 1, (3, SIZE, SIZE, 3)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        theirs = np.asarray(model.apply({"params": params}, images))
    ours = vitkit.load(tmp_path / "model.npz")
    assert ours.config.activation == "gelu-tanh"
    assert ours.config.preprocessing.interpolation == "bilinear-plain"
    with torch.inference_mode():
        found = ours(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    assert np.abs(found - theirs).max() <= 3e-6 * np.ptp(theirs)


def test_the_names_of_older_files_mean_the_same(tmp_path: Path) -> None:
    saved(OfficialViT(), tmp_path / "new.npz")
    older = {"LayerNorm_1": "LayerNorm_2", "MlpBlock_0": "MlpBlock_3"}
    older["MultiHeadDotProductAttention_0"] = "MultiHeadDotProductAttention_1"
    arrays = {}
    for name, array in np.load(tmp_path / "new.npz").items():
        arrays["/".join(older.get(part, part) for part in name.split("/"))] = array
    np.savez(tmp_path / "old.npz", **arrays)
    new, old = (vitkit.load(tmp_path / f"{which}.npz").state_dict() for which in ("new", "old"))
    assert all(torch.equal(old[name], tensor) for name, tensor in new.items())


def test_lecun_normal_is_cut_where_jax_cuts_it() -> None:
    weight = torch.empty(512, 256)
    torch.manual_seed(0)
    lecun_normal_(weight)
    theirs = np.asarray(nn.initializers.lecun_normal()(jax.random.PRNGKey(0), (256, 512)))
    sigma = 256**-0.5
    assert weight.abs().max() <= 2 * sigma / 0.8796 + 1e-6
    assert abs(float(weight.abs().max()) - np.abs(theirs).max()) < 0.01 * sigma  # both reach the cut
    assert abs(weight.std().item() - theirs.std()) < 0.01 * sigma


def test_the_bias_of_the_classifier_starts_as_stated() -> None:
    model = vitkit.create("vit-ti/16", classes=7, depth=1, head_bias_init=-10.0)
    assert torch.equal(model.classifiers[0].bias, torch.full((7,), -10.0))
    assert not model.classifiers[0].weight.any()


@pytest.mark.parametrize("size", [(20, 33), (100, 150), (48, 48), (7, 200)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_images_shrink_without_antialiasing(size: tuple[int, int], mode: str) -> None:
    """jax.image.resize(antialias=False) is TensorFlow's default; ours is rounded to whole levels: half a level."""
    shape = (*size, 3) if mode == "RGB" else size
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    wanted = (48, 32, *shape[2:])
    theirs = np.asarray(jax.image.resize(pixels.astype(np.float32), wanted, "bilinear", antialias=False))
    pre = Preprocessing(size=(48, 32), interpolation="bilinear-plain")
    ours = to_tensor(prepare(Image.fromarray(pixels, mode), pre)).permute(1, 2, 0).numpy()
    assert np.abs(ours.reshape(theirs.shape).astype(float) - theirs).max() <= 0.5 + 1e-3


@pytest.mark.parametrize(("old", "new"), [(16, 30), (28, 14), (32, 16), (14, 24), (7, 9), (24, 14), (2, 5)])
def test_positions_are_zoomed_as_scipy_does_bit_by_bit(old: int, new: int) -> None:
    """float64 on both sides; scipy sums the four corners in another order, hence 1e-15."""
    table = np.random.default_rng(0).normal(size=(old, old, 3))
    theirs = zoom(table, (new / old, new / old, 1), order=1)
    ours = resize_grid(torch.from_numpy(table), (new, new), "official-exact").numpy()
    np.testing.assert_allclose(ours, theirs, atol=4e-15, rtol=0)
    lost = np.abs(theirs[-1]).max() == 0
    assert lost == ((old, new) in [(16, 30), (28, 14), (32, 16)])
    if lost:  # what "official" keeps
        assert np.abs(resize_grid(torch.from_numpy(table), (new, new), "official").numpy()[-1]).min() > 0
