"""Evaluation pixels are those of timm and Hugging Face for their models."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from PIL import Image

import peers
from vitkit.data import denormalise, normalise, prepare, to_tensor
from vitkit.data.preprocess import PLAIN, RESAMPLING, prepare_pixels, resized_to
from vitkit.model.config import Preprocessing

skimage_data = pytest.importorskip("skimage.data", reason="photographs come from scikit-image")
HALF, IMAGENET = ((0.5,) * 3, (0.5,) * 3), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@lru_cache
def photographs() -> list[Image.Image]:
    """Twenty views of real photographs, of many sizes and shapes."""
    originals = [
        Image.fromarray(getattr(skimage_data, n)()).convert("RGB") for n in ("chelsea", "coffee", "astronaut", "rocket")
    ]
    views = []
    for i in range(20):
        image = originals[i % 4]
        rng = np.random.default_rng(i)
        width, height = rng.integers(90, image.width), rng.integers(90, image.height)
        left, top = rng.integers(0, image.width - width), rng.integers(0, image.height - height)
        views.append(image.crop((int(left), int(top), int(left + width), int(top + height))))
    return views


def ours(image: Image.Image, pre: Preprocessing) -> torch.Tensor:
    return normalise(to_tensor(prepare(image, pre)), pre)


@pytest.mark.parametrize(
    ("interpolation", "crop", "fit", "size"),
    [
        ("bicubic", 0.9, "crop", 224),
        ("bilinear", 0.875, "crop", 224),
        ("bicubic", 1.0, "crop", 160),
        ("lanczos", 0.95, "squash", 96),
        ("bilinear", 1.0, "squash", 96),
    ],
)
def test_equal_to_timm(interpolation: str, crop: float, fit: str, size: int) -> None:
    peers.import_timm()
    from timm.data.transforms_factory import transforms_imagenet_eval

    mode = "squash" if fit == "squash" else "center"
    theirs = transforms_imagenet_eval(size, crop, mode, interpolation=interpolation, mean=IMAGENET[0], std=IMAGENET[1])
    pre = Preprocessing((size, size), crop, fit, interpolation, *IMAGENET)  # type: ignore[arg-type]
    for image in photographs():
        assert torch.equal(ours(image, pre), theirs(image)), image.size


def test_equal_to_timm_for_oblong_input() -> None:
    peers.import_timm()
    from timm.data.transforms_factory import transforms_imagenet_eval

    theirs = transforms_imagenet_eval((192, 256), 0.9, "center", interpolation="bilinear", mean=HALF[0], std=HALF[1])
    pre = Preprocessing((192, 256), 0.9, "crop", "bilinear", *HALF)
    for image in photographs():
        assert torch.equal(ours(image, pre), theirs(image)), image.size


def hugging_face(module: str, name: str) -> type:
    peers.import_transformers()
    import importlib

    try:
        return getattr(importlib.import_module(f"transformers.models.{module}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this version of transformers has no {name}")


def test_equal_to_hugging_face_with_pillow() -> None:
    processor = hugging_face("vit.image_processing_pil_vit", "ViTImageProcessorPil")()
    for image in photographs():
        theirs = processor(image, return_tensors="pt")["pixel_values"][0]
        assert (ours(image, Preprocessing()) - theirs).abs().max() < 1e-6


def test_within_one_level_of_hugging_face_with_tensors() -> None:
    """Their default resizes tensors, with other roundings than Pillow's."""
    processor = hugging_face("vit.image_processing_vit", "ViTImageProcessor")()
    pre = Preprocessing()
    for image in photographs():
        theirs = processor(image, return_tensors="pt")["pixel_values"][0]
        levels = denormalise(theirs, pre).int() - to_tensor(prepare(image, pre)).int()
        assert levels.abs().max() <= 1


def test_equal_to_hugging_face_with_a_crop() -> None:
    processor = hugging_face("deit.image_processing_pil_deit", "DeiTImageProcessorPil")()
    pre = Preprocessing((224, 224), 0.875, "squash", "bicubic", *HALF)
    for image in photographs():
        theirs = processor(image, return_tensors="pt")["pixel_values"][0]
        assert (ours(image, pre) - theirs).abs().max() < 1e-6


@pytest.mark.parametrize("size", [(50_000, 2), (3, 40_001)])
def test_a_strip_is_cut_before_it_is_enlarged(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Enlarged whole it would take a gigabyte; its middle is all that is left in the end."""
    enlarged = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, to, *how: (enlarged.append(to[0] * to[1]), resize(self, to, *how))[1]
    )
    strip = Image.new("RGB", size, (10, 20, 30))
    left, top = (n // 2 - 8 if n > 9 else 0 for n in size)
    strip.paste((200, 100, 50), (left, top, size[0] - left, size[1] - top))
    found = prepare(strip, Preprocessing((224, 224), 1.0, "crop", "bicubic"))
    assert found.size == (224, 224)
    assert max(enlarged) <= 224 * 224 * 70
    assert found.getpixel((112, 112)) == (200, 100, 50)


def test_sets_in_memory_are_prepared_alike() -> None:
    image = photographs()[0].resize((60, 50))
    pre = Preprocessing((32, 32), 0.875, "crop", "bicubic")
    pixels = to_tensor(image)[None]
    assert torch.equal(prepare_pixels(pixels, pre)[0], to_tensor(prepare(image, pre)))
    many = torch.randint(0, 256, (7, 3, 50, 60), dtype=torch.uint8)  # their planes do not fill the last image of four
    found = prepare_pixels(many, pre)
    for planes, prepared in zip(many, found, strict=True):
        for plane, result in zip(planes, prepared, strict=True):
            assert torch.equal(result, to_tensor(prepare(Image.fromarray(plane.numpy()), pre))[0])


def test_a_image_of_the_right_size_is_not_touched() -> None:
    image = photographs()[0].resize((224, 224))
    assert prepare(image, Preprocessing()) is image


def test_there_and_back() -> None:
    pre = Preprocessing(mean=IMAGENET[0], std=IMAGENET[1])
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(3, 1, 1)
    assert torch.equal(denormalise(normalise(pixels, pre), pre), pixels)


@pytest.mark.parametrize(("height", "width"), [(1, 5000), (5000, 1), (3, 2), (224, 224)])
def test_extreme_shapes(height: int, width: int) -> None:
    for fit in ("crop", "squash"):
        pre = Preprocessing((32, 48), 0.9, fit)  # type: ignore[arg-type]
        assert all(n >= wanted for n, wanted in zip(resized_to(height, width, pre), pre.size, strict=True))
        assert prepare(Image.new("RGB", (width, height)), pre).size == (48, 32)


def test_cutting_between_the_passes_changes_no_pixel() -> None:
    """Pillow's own resize of the whole image, then the centre: whichever pass it begins with."""
    rng = np.random.default_rng(0)
    sizes = [tuple(rng.integers(1, 200, 2)) for _ in range(300)] + [(375, 500), (1500, 2000), (2000, 1500), (40, 900)]
    kinds = [kind for kind in RESAMPLING if kind != PLAIN]
    for number, (height, width) in enumerate(sizes):
        kind, fit = kinds[number % len(kinds)], ("crop", "squash")[number % 2]
        pre = Preprocessing(((48, 48), (32, 56))[number % 5 == 0], (1.0, 0.875)[number % 3 == 0], fit, kind)
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        h, w = resized_to(height, width, pre)
        top, left = round((h - pre.size[0]) / 2), round((w - pre.size[1]) / 2)
        whole = image.resize((w, h), RESAMPLING[kind]).crop((left, top, left + pre.size[1], top + pre.size[0]))
        assert (np.asarray(whole) == np.asarray(prepare(image, pre))).all(), (height, width, pre)
