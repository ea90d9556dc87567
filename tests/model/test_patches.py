"""Patch embedding: one function in two forms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vitkit
from peers import randomize
from vitkit.errors import InputError
from vitkit.model.patches import PatchEmbedding, conv_to_linear, linear_to_conv

sizes = st.integers(1, 5)


@given(sizes, sizes, sizes, sizes, sizes)
def test_two_forms_are_equal(channels: int, p: int, q: int, h: int, w: int) -> None:
    conv = randomize(PatchEmbedding(channels, (p, q), 6, "conv"))
    linear = PatchEmbedding(channels, (p, q), 6, "linear")
    linear.load_state_dict({"weight": conv_to_linear(conv.weight), "bias": conv.bias})
    images = torch.randn(2, channels, h * p, w * q)
    (a, grid), (b, same) = conv(images), linear(images)
    assert grid == same == (h, w)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert torch.equal(linear_to_conv(linear.weight, (p, q)), conv.weight)


def test_tokens_are_row_by_row() -> None:
    """The mean of each patch, by a weight of ones, equals the mean computed by slicing."""
    embed = PatchEmbedding(1, (2, 3), 1)
    embed.load_state_dict({"weight": torch.full((1, 1, 2, 3), 1 / 6), "bias": torch.zeros(1)})
    image = torch.randn(1, 1, 4, 9)
    tokens, grid = embed(image)
    expected = [image[0, 0, 2 * y : 2 * y + 2, 3 * x : 3 * x + 3].mean() for y in range(2) for x in range(3)]
    torch.testing.assert_close(tokens[0, :, 0], torch.stack(expected))
    assert grid == (2, 3)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.zeros(3, 32, 32), r"images\[None\]"),
        (torch.zeros(1, 1, 32, 32), "expected 3 channels.*channels=1"),
        (torch.zeros(1, 3, 33, 50), "nearest sizes are 32x48 and 40x56, or call the model with pad=True"),
        (torch.zeros(1, 3, 4, 8), "nearest sizes are 8x8 and 8x8"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), r"floating-point.*images / 255"),
        (torch.zeros(1, 3, 0, 32), "no pixels"),
    ],
)
@pytest.mark.parametrize("name", ["mu", "resnet-32px"])
def test_bad_images(name: str, images: torch.Tensor, words: str) -> None:
    if name.startswith("resnet") and "nearest" in words:
        images, words = torch.zeros(1, 3, 33, 50), "nearest sizes are 32x48 and 36x52"
    with pytest.raises(InputError, match=words):
        vitkit.create(name)(images)


@pytest.mark.parametrize("name", ["mu", "resnet-32px", "r+ti/16"])
def test_padding_equals_zeros_by_hand(name: str) -> None:
    model = randomize(vitkit.create(name)).eval()
    images = torch.randn(2, 3, 33, 37)
    filled = torch.nn.functional.pad(images, (0, 27, 0, 31))  # 64 x 64
    with torch.no_grad():
        padded = model(images, pad=True)
        stride = 32 if name == "r+ti/16" else (8 if name == "mu" else 4)
        by_hand = filled[:, :, : -(-33 // stride) * stride, : -(-37 // stride) * stride]
        assert torch.equal(padded, model(by_hand))
