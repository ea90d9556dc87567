"""The hybrid's ResNet in the official numerics, against closed forms in numpy with no library behind them.

The forms below follow the official code: filters brought to (w - mean) / (std + 1e-5), GroupNorm with
epsilon 1e-6, TensorFlow's SAME padding. `tests/parity/test_timm.py` holds `numerics="timm"`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import peers
from vitkit import create, save
from vitkit.checkpoints.load import open_checkpoint
from vitkit.checkpoints.writing import write
from vitkit.errors import CheckpointError, ConfigError
from vitkit.model.config import ConvStemConfig, StemConfig, ViTConfig, WhitenedStemConfig
from vitkit.model.stem import (
    Bottleneck,
    ConvStem,
    ResNetStem,
    StdConv,
    WhitenedStem,
    Whitening,
    group_norm,
    same_padding,
)

Array = NDArray[np.float64]


def np_standardize(w: Array) -> Array:
    """Per filter of D C P Q: mean 0; divided by (std + 1e-5), not by sqrt(var + epsilon)."""
    mean, std = w.mean((1, 2, 3), keepdims=True), w.std((1, 2, 3), keepdims=True)
    return (w - mean) / (std + 1e-5)


def np_conv_same(x: Array, w: Array, stride: int) -> Array:
    """C H W -> D ceil(H / stride) ceil(W / stride), the odd row and column of zeros at the bottom right."""
    kernel, (_, height, width) = w.shape[-1], x.shape
    out_h, out_w = -(-height // stride), -(-width // stride)
    pad_h = max((out_h - 1) * stride + kernel - height, 0)
    pad_w = max((out_w - 1) * stride + kernel - width, 0)
    x = np.pad(x, ((0, 0), (pad_h // 2, pad_h - pad_h // 2), (pad_w // 2, pad_w - pad_w // 2)))
    out = np.zeros((len(w), out_h, out_w))
    for i in range(out_h):
        for j in range(out_w):
            window = x[:, i * stride : i * stride + kernel, j * stride : j * stride + kernel]
            out[:, i, j] = np.tensordot(w, window, 3)
    return out


def np_group_norm(x: Array, weight: Array, bias: Array, groups: int, eps: float = 1e-6) -> Array:
    grouped = x.reshape(groups, -1)
    mean, var = grouped.mean(1, keepdims=True), grouped.var(1, keepdims=True)
    normed = ((grouped - mean) / np.sqrt(var + eps)).reshape(x.shape)
    return normed * weight[:, None, None] + bias[:, None, None]


def np_max_pool_same(x: Array) -> Array:
    """3x3, stride 2; what is padded never wins."""
    out_h, out_w = -(-x.shape[1] // 2), -(-x.shape[2] // 2)
    pad_h, pad_w = max((out_h - 1) * 2 + 3 - x.shape[1], 0), max((out_w - 1) * 2 + 3 - x.shape[2], 0)
    pads = ((0, 0), (pad_h // 2, pad_h - pad_h // 2), (pad_w // 2, pad_w - pad_w // 2))
    x = np.pad(x, pads, constant_values=-np.inf)
    rows = [[x[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max((1, 2)) for j in range(out_w)] for i in range(out_h)]
    return np.array(rows).transpose(2, 0, 1)


def weights(module: torch.nn.Module) -> dict[str, Array]:
    return {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}


def np_bottleneck(block: Bottleneck, x: Array, stride: int) -> Array:
    w = weights(block)

    def conv_norm(x: Array, conv: str, norm: str, stride: int) -> Array:
        y = np_conv_same(x, np_standardize(w[f"{conv}.weight"]), stride)
        return np_group_norm(y, w[f"{norm}.weight"], w[f"{norm}.bias"], np.gcd(32, len(y)))

    y = np.maximum(conv_norm(x, "conv1", "norm1", 1), 0)
    y = np.maximum(conv_norm(y, "conv2", "norm2", stride), 0)
    y = conv_norm(y, "conv3", "norm3", 1)
    shortcut = conv_norm(x, "shortcut.0", "shortcut.1", stride) if block.shortcut is not None else x
    return np.maximum(y + shortcut, 0)


def image(channels: int, height: int, width: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(height * 100 + width)
    return torch.randn(1, channels, height, width, generator=random, dtype=torch.float64)


# Both sides compute in float64, so that what remains is rounding: 1e-12 for values of order 1.
def close(ours: torch.Tensor, theirs: Array) -> None:
    np.testing.assert_allclose(ours.detach().numpy()[0], theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2), (1, 2), (7, 2)])
@pytest.mark.parametrize("size", [(8, 8), (9, 9), (7, 10)])
def test_convolution(kernel: int, stride: int, size: tuple[int, int]) -> None:
    conv = StdConv(3, 4, kernel, stride, "official").double()
    peers.randomize(conv)
    x = image(3, *size)
    close(conv(x), np_conv_same(x.numpy()[0], np_standardize(weights(conv)["weight"]), stride))


def test_the_two_numerics_differ_for_small_weights() -> None:
    """With filters of deviation 1e-3 the official +1e-5 is a percent; timm's 1e-8 under the root half a percent."""
    official, timm = (StdConv(3, 4, 3, 1, numerics).double() for numerics in ("official", "timm"))
    peers.randomize(official, scale=1e-3)
    timm.load_state_dict(official.state_dict())
    difference = (official.standardized() - timm.standardized()).abs().max()
    assert 1e-3 < difference < 5e-2


def test_constant_filter_has_finite_gradient() -> None:
    conv = StdConv(3, 4, 3, 1, "official")
    torch.nn.init.constant_(conv.weight, 0.5)
    conv(torch.ones(1, 3, 4, 4)).sum().backward()
    assert conv.weight.grad is not None
    assert conv.weight.grad.isfinite().all()


@pytest.mark.parametrize(("numerics", "eps"), [("official", 1e-6), ("timm", 1e-5)])
def test_group_norm(numerics: str, eps: float) -> None:
    """On values of order 1e-3 the two epsilons give visibly different results."""
    norm = group_norm(64, numerics).double()
    peers.randomize(norm)
    w, x = weights(norm), image(64, 3, 3) * 1e-3
    close(norm(x), np_group_norm(x.numpy()[0], w["weight"], w["bias"], 32, eps))


def test_same_padding_is_not_symmetric() -> None:
    x = torch.ones(1, 1, 8, 8)
    padded = same_padding(x, 3, 2)
    assert padded.shape[-2:] == (9, 9)
    assert padded[0, 0, 0, 0] == 1  # nothing at the top left
    assert padded[0, 0, -1].sum() == 0
    assert padded[0, 0, :, -1].sum() == 0


@pytest.mark.parametrize(("channels", "stride"), [(16, 1), (8, 1), (16, 2)])
def test_bottleneck(channels: int, stride: int) -> None:
    block = Bottleneck(channels, 4, stride, "official").double()
    peers.randomize(block)
    assert (block.shortcut is None) == (channels == 16 and stride == 1)
    x = image(channels, 6, 7)
    close(block(x), np_bottleneck(block, x.numpy()[0], stride))


def test_whole_stem() -> None:
    stem = ResNetStem(StemConfig((1, 2), width=8), channels=3).double()
    peers.randomize(stem)
    x = image(3, 20, 17)
    w = weights(stem)
    y = np_conv_same(x.numpy()[0], np_standardize(w["root.weight"]), 2)
    y = np_max_pool_same(np.maximum(np_group_norm(y, w["norm.weight"], w["norm.bias"], 8), 0))
    for i, stage in enumerate(stem.stages):
        assert isinstance(stage, torch.nn.Sequential)
        for j, block in enumerate(stage):
            assert isinstance(block, Bottleneck)
            y = np_bottleneck(block, y, 2 if i and not j else 1)
    close(stem(x), y)


def test_blocks_start_as_their_shortcut() -> None:
    """Official initialisation: the last norm of each unit starts at zero."""
    stem = ResNetStem(StemConfig((2,), width=8), channels=3)
    stem.init_weights()
    assert all(not m.norm3.weight.any() for m in stem.modules() if isinstance(m, Bottleneck))


def test_resnet_classifier_is_trunk_mean_linear() -> None:
    model = create("resnet-8px")
    peers.randomize(model)
    x = torch.randn(2, 1, 8, 8)
    stem, head = model.get_submodule("stem"), model.get_submodule("head")
    torch.testing.assert_close(model(x), head(stem(x).mean((-2, -1))))


def test_convolutions_by_loops() -> None:
    """3x3 with a border of one zero, then ReLU: an odd size is rounded up, as the patches expect."""
    stem = ConvStem(ConvStemConfig((4, 6), (1, 2)), channels=2).double()
    peers.randomize(stem)
    x = image(2, 7, 10)
    y = x.numpy()[0]
    for conv, stride in zip(stem.convs, (1, 2), strict=True):
        weight, bias = (p.detach().numpy() for p in (conv.weight, conv.bias))
        padded = np.pad(y, ((0, 0), (1, 1), (1, 1)))
        down, across = -(-y.shape[1] // stride), -(-y.shape[2] // stride)
        out = np.zeros((len(weight), down, across))
        for i in range(down):
            for j in range(across):
                window = padded[:, i * stride : i * stride + 3, j * stride : j * stride + 3]
                out[:, i, j] = (weight * window).sum((1, 2, 3)) + bias
        y = np.maximum(out, 0)
    close(stem(x), y)


@pytest.mark.parametrize("channels", [1, 3])
def test_fitted_whitening_makes_patches_white(channels: int) -> None:
    """Its responses are uncorrelated, and of variance v / (v + 5e-4) for the principal variances v of the patches."""
    mixed = torch.randn(channels, channels).double()
    images = (torch.randn(64, channels, 9, 9).double().cumsum(-1) * 0.3).transpose(1, 3) @ mixed
    images = images.transpose(1, 3)
    layer = Whitening(channels, 8 * channels).double()
    layer.fit(images)
    seen = layer(images)[..., :-1, :-1].transpose(0, 1).flatten(1)[: 4 * channels]  # without the replicated border
    patches = [images.numpy()[:, :, i : i + 2, j : j + 2].reshape(64, -1) for i in range(8) for j in range(8)]
    v = np.linalg.eigvalsh(np.mean([p.T @ p / 64 for p in patches], axis=0))[::-1]
    torch.testing.assert_close(seen @ seen.mT / seen.shape[1], torch.from_numpy(np.diag(v / (v + 5e-4))))
    assert torch.equal(layer.weight[: 4 * channels], -layer.weight[4 * channels :])


def test_whitening_before_it_is_fitted_shows_the_pixels() -> None:
    images = image(3, 6, 5)
    seen = Whitening(3, 24).double()(images)
    assert seen.shape == (1, 24, 6, 5)
    assert torch.equal(seen[0, 0], images[0, 0])  # the first pixel of the first channel, and its negative
    assert torch.equal(seen[0, 12], -images[0, 0])


def test_more_filters_than_directions_repeat_them() -> None:
    layer = Whitening(1, 16)
    layer.fit(torch.rand(9, 1, 8, 8))
    assert torch.equal(layer.weight[:4], layer.weight[4:8])


@pytest.mark.parametrize("pool", ["before", "behind"])
def test_a_block_of_convolutions_in_plain_words(pool: Literal["before", "behind"]) -> None:
    """Convolution, BatchNorm, GELU, as often as said; the third adds what it was given. Max-pooling by the first."""
    stem = WhitenedStem(WhitenedStemConfig((4, 6), (1, 3), 8, pool), channels=2).double().eval()
    peers.randomize(stem)
    x = torch.nn.functional.gelu(stem.whitening(image(2, 8, 12)))
    for block in stem.blocks:
        x = torch.nn.functional.max_pool2d(x, 2) if pool == "before" else x
        for turn, (conv, norm) in enumerate(zip(block.convs, block.norms, strict=True)):
            y = torch.nn.functional.conv2d(x, conv.weight, padding=1)
            y = torch.nn.functional.max_pool2d(y, 2) if pool == "behind" and not turn else y
            mean, var, weight, bias = (
                t[:, None, None] for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
            )
            y = torch.nn.functional.gelu((y - mean) / (var + 1e-5).sqrt() * weight + bias)
            x = y + x if turn == 2 else y
    torch.testing.assert_close(stem(image(2, 8, 12)), x)
    assert x.shape == (1, 6, 2, 3)


def test_stems_come_back_from_json() -> None:
    for stem in (ConvStemConfig((4, 8)), WhitenedStemConfig((4, 8), (1, 2), pool="behind"), StemConfig((1, 1), 8)):
        config = ViTConfig(32, 8, stem=stem)
        assert ViTConfig.from_json(config.to_json()).stem == stem


@pytest.mark.parametrize(
    ("values", "words"),
    [({"convs": (1,)}, "must be as many"), ({"widths": ()}, "for every block"), ({"filters": 7}, "must be even")],
)
def test_wrong_whitened_stems(values: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WhitenedStemConfig(**values)


@pytest.mark.parametrize("stem", [ConvStemConfig(), WhitenedStemConfig()], ids=["plain", "whitened"])
@pytest.mark.parametrize("to", ["timm", "google"])
def test_only_our_own_format_holds_plain_convolutions(to: str, stem: object, tmp_path) -> None:
    model = create("mu", stem=stem)
    save(model, tmp_path / "ours.safetensors")
    with pytest.raises(CheckpointError, match="--to native"):
        write(open_checkpoint(tmp_path / "ours.safetensors"), tmp_path / ("x.npz" if to == "google" else "x.pth"), to)
