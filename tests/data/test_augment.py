"""Presets and knobs; the batch operations against Pillow's and torchvision's."""

from __future__ import annotations

import making
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

import peers
from vitkit.data import PRESETS, Augment, class_weights, drop_unsafe_flip, mix, preset, soft_targets
from vitkit.data import vary as op
from vitkit.data.augment import crop_kind, random_box
from vitkit.data.keys import sample_keys, uniforms
from vitkit.data.vary import crop_and_flip, flips, shift_and_flip, vary
from vitkit.errors import ConfigError


def batch(count: int = 6, size: tuple[int, int] = (40, 32)) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.array(making.photo(i, size))).permute(2, 0, 1) for i in range(count)])


def as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


ENHANCERS = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
    "sharpness": ImageEnhance.Sharpness,
}


@pytest.mark.parametrize("name", list(ENHANCERS))
@pytest.mark.parametrize("share", [0.1, 0.6, 1.0, 1.7])
def test_enhancements_are_pillows(name: str, share: float) -> None:
    images = [making.photo(i, (40, 32)) for i in range(6)]
    got = op.COLOUR[name](batch(), torch.full((6,), share, dtype=torch.float64)).int()
    expected = torch.stack([as_tensor(ENHANCERS[name](p).enhance(share)) for p in images]).int()
    assert (got - expected).abs().max() <= 2  # Pillow rounds down here and there


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
def test_histogram_operations_are_pillows(name: str) -> None:
    images = [making.photo(i, (40, 32)) for i in range(6)]
    got = op.COLOUR[name](batch(), torch.zeros(6)).int()
    expected = torch.stack([as_tensor(getattr(ImageOps, name)(p)) for p in images]).int()
    assert (got - expected).abs().max() <= (1 if name == "autocontrast" else 0)


def test_posterize_and_solarize_are_pillows() -> None:
    image = making.photo(0, (40, 32))
    for bits in (1, 4, 8):
        got = op.posterize(batch(1), torch.tensor([float(bits)]))[0]
        assert torch.equal(got, as_tensor(ImageOps.posterize(image, bits)))
    for threshold in (0, 100, 255):
        got = op.solarize(batch(1), torch.tensor([float(threshold)]))[0]
        assert torch.equal(got, as_tensor(ImageOps.solarize(image, threshold)))


def test_flat_images_survive_everything() -> None:
    flat = torch.full((14, 3, 8, 8), 77, dtype=torch.uint8)
    for name, operation in op.COLOUR.items():
        strength = op.colour_strength(name, np.full(14, 0.5), np.ones(14), wide=True)
        assert operation(flat, strength).shape == flat.shape


def test_warp_turns_by_a_quarter() -> None:
    square = batch(1, (32, 32))
    quarter = op.geometry_matrices(["rotate"], np.array([1.0]), (32, 32), wide=False) * 0
    quarter[0, 0, 1], quarter[0, 1, 0] = 1.0, -1.0
    assert torch.equal(op.warp(square, quarter), torch.rot90(square, -1, (2, 3))) or torch.equal(
        op.warp(square, quarter), torch.rot90(square, 1, (2, 3))
    )


def test_warp_shifts_and_fills_with_black() -> None:
    images = batch(1, (32, 32))
    matrices = op.geometry_matrices(["translate-x"], np.array([1.0]), (32, 32), wide=True)
    moved = op.warp(images, matrices)
    assert torch.equal(moved[..., :16], images[..., 16:])
    assert not moved[..., 16:].any()


def test_shift_and_flip() -> None:
    images, keys = batch(64, (16, 16)), sample_keys(0, 0, np.arange(64))
    augment = Augment(crop="pad", padding=0.25, flip=0.5)
    moved = shift_and_flip(images.clone(), keys, augment, shift=True)
    mirrored = flips(keys, augment)
    assert 16 < mirrored.sum() < 48
    draws = (uniforms(keys, "shift", 2) * 9).astype(int)
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    for i, (top, left) in enumerate(draws):
        expected = padded[i, :, top : top + 16, left : left + 16]
        source = images[i].flip(-1) if mirrored[i] else images[i]
        if mirrored[i]:  # the image is mirrored, and shifted the other way
            expected = torch.nn.functional.pad(source, (4, 4, 4, 4))[:, top : top + 16, 8 - left : 24 - left]
        assert torch.equal(moved[i], expected), i


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 10**6))
def test_random_boxes_lie_inside(width: int, height: int, seed: int) -> None:
    draws = uniforms(sample_keys(seed, 0, [0]), "crop", 40)[0]
    left, top, right, bottom = random_box(draws, width, height, Augment(crop="resized"))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_random_boxes_follow_torchvisions_law() -> None:
    transforms = pytest.importorskip("torchvision.transforms") if peers.import_torchvision() else None
    image = torch.empty(3, 375, 500)
    theirs = np.array(
        [transforms.RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(4000)]
    )
    draws = uniforms(sample_keys(0, 0, np.arange(4000)), "crop", 40)
    ours = np.array([random_box(d, 500, 375, Augment(crop="resized")) for d in draws])
    our_sizes = np.stack([ours[:, 3] - ours[:, 1], ours[:, 2] - ours[:, 0]], axis=1)
    for quantile in (0.1, 0.5, 0.9):
        assert np.allclose(
            np.quantile(our_sizes, quantile, axis=0), np.quantile(theirs[:, 2:], quantile, axis=0), atol=15
        )
        assert np.allclose(
            np.quantile(ours[:, [1, 0]], quantile, axis=0), np.quantile(theirs[:, :2], quantile, axis=0), atol=15
        )


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("augment", [*PRESETS.values(), preset("strong", policy="trivial", crop="resized")])
def test_presets_keep_shape_and_type(channels: int, augment: Augment) -> None:
    images = torch.randint(0, 256, (32, channels, 12, 10), dtype=torch.uint8)
    keys = sample_keys(0, 0, np.arange(32))
    out = vary(crop_and_flip(images, keys, augment, (12, 10)), keys, augment)
    assert out.shape == images.shape
    assert out.dtype == torch.uint8
    assert torch.equal(out, images) == (augment == Augment())


def test_auto_crop_by_size() -> None:
    assert crop_kind(PRESETS["light"], (32, 32)) == "pad"
    assert crop_kind(PRESETS["light"], (224, 224)) == "resized"
    assert crop_kind(preset("light", crop="none"), (224, 224)) == "none"


def test_digits_are_not_mirrored() -> None:
    assert drop_unsafe_flip(PRESETS["medium"], flip_safe=False).flip == 0
    assert drop_unsafe_flip(PRESETS["medium"], flip_safe=True) is PRESETS["medium"]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"flip": 2.0}, "flip=2.0"),
        ({"crop": "centre"}, "crop='centre'"),
        ({"policy": "randaug"}, "Did you mean randaugment"),
        ({"smoothing": 1.0}, "smoothing"),
        ({"mixup": -1.0}, "mixup"),
        ({"scale": (0.5, 0.2)}, "scale"),
        ({"magnitude": 31}, "magnitude"),
        ({"flips": 0.5}, "Did you mean flip"),
    ],
)
def test_wrong_knobs(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preset("light", **knobs)
    with pytest.raises(ConfigError, match="Did you mean light"):
        preset("ligth")


# --- targets ---------------------------------------------------------------------------------------


def test_soft_targets() -> None:
    assert torch.allclose(soft_targets(torch.tensor([1]), 4, 0.2), torch.tensor([[0.05, 0.85, 0.05, 0.05]]))
    several = soft_targets(torch.tensor([[1.0, 0.0]]), 2, 0.2)
    assert torch.allclose(several, torch.tensor([[0.9, 0.1]]))


@pytest.mark.parametrize("knobs", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_targets_are_the_shares_of_the_pixels(knobs: dict[str, float], count: int) -> None:
    """Images of one colour each: the mean of the mixture says how much of each went in."""
    labels = torch.arange(count)
    images = torch.zeros(count, count, 20, 20)
    images[labels, labels] = 1.0  # image i is full in channel i
    mixed, targets = mix(images, labels, sample_keys(0, 0, np.arange(count)), Augment(**knobs), count)
    assert torch.allclose(mixed.mean(dim=(2, 3)), targets, atol=1e-5)
    assert torch.allclose(targets.sum(dim=1), torch.ones(count))
    if count % 2:
        assert torch.equal(mixed[-1], images[-1])
    assert torch.equal(images[labels, labels], torch.ones(count, 20, 20))  # the input is not changed


def test_class_weights_make_classes_equal() -> None:
    counts = np.array([90, 10, 0])
    weights = class_weights(counts)
    assert weights[2] == 0
    assert torch.allclose(weights[:2] * torch.tensor([90.0, 10.0]), torch.tensor([50.0, 50.0]))
