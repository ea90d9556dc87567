"""How training varies its images and targets: the knobs, the presets, the random crop, mixup and cutmix.

`preset("medium", mixup=0.2)` is a point to start from with one knob turned. What is done to a sample depends on
its key only (`keys.py`), so any process that is asked for it makes the same pixels.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.data.keys import Keys, uniforms
from vitkit.errors import ConfigError, check_one_of, did_you_mean

Crop = Literal["auto", "resized", "pad", "none"]
Policy = Literal["none", "randaugment", "trivial", "three"]
Box = tuple[int, int, int, int]  # left, top, right, bottom, in pixels of the upright image

SMALL = 64  # images up to this size are padded and cropped rather than zoomed into


@dataclass(frozen=True)
class Augment:
    """Every knob of training augmentation. The defaults do nothing at all."""

    crop: Crop = "none"  # "resized": RandomResizedCrop; "pad": shift by padding; "auto": by the size of the image
    scale: tuple[float, float] = (0.08, 1.0)  # share of the image's area that "resized" keeps
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # its width / height
    padding: float = 0.125  # share of the side that "pad" shifts by: 4 pixels of 32
    flip: float = 0.0  # probability of a left-right mirror image
    # "randaugment": `operations` of strength `magnitude`; "trivial": one, of any strength; "three": grey, solarised or
    # blurred, as DeiT III does
    policy: Policy = "none"
    operations: int = 2
    magnitude: float = 9.0  # of 30
    jitter: float = 0.0  # brightness, contrast and saturation change by up to this share
    erase: float = 0.0  # probability that a rectangle is replaced by noise
    mixup: float = 0.0  # alpha of the Beta distribution; 0: off
    cutmix: float = 0.0  # alpha of the Beta distribution; 0: off
    smoothing: float = 0.0  # share of the target spread over all classes

    def __post_init__(self) -> None:
        for name, words in (("crop", get_args(Crop)), ("policy", get_args(Policy))):
            value = getattr(self, name)
            check_one_of(value, words, f"augment.{name}={value!r} is not known")
        for name in ("flip", "erase", "jitter", "padding"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"augment.{name}={getattr(self, name)} must be between 0 and 1")
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"augment.smoothing={self.smoothing} must be at least 0 and below 1; 0.1 is usual")
        if self.mixup < 0 or self.cutmix < 0:
            raise ConfigError("augment.mixup and augment.cutmix are alphas and must not be negative; 0 is off")
        if not 0 <= self.magnitude <= 30 or self.operations < 0:
            raise ConfigError(f"augment.magnitude={self.magnitude} must be in 0..30 and operations at least 0")
        if not 0 < self.scale[0] <= self.scale[1] <= 1 or not 0 < self.ratio[0] <= self.ratio[1]:
            raise ConfigError(f"augment.scale={self.scale} must rise within 0..1, and ratio={self.ratio} must rise")
        for name in ("scale", "ratio"):  # from JSON they come as lists
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def soft_targets(self) -> bool:
        """True when targets become shares of classes instead of class numbers."""
        return bool(self.mixup or self.cutmix or self.smoothing)


_MEDIUM = Augment(crop="auto", flip=0.5, policy="randaugment", magnitude=9, mixup=0.2, smoothing=0.1)
PRESETS: dict[str, Augment] = {
    "none": Augment(),
    "light": Augment(crop="auto", scale=(0.35, 1.0), padding=0.0625, flip=0.5),
    "medium": _MEDIUM,
    "strong": replace(_MEDIUM, magnitude=12, jitter=0.3, erase=0.25, mixup=0.8, cutmix=1.0),
}


def preset(name: str, **knobs: object) -> Augment:
    """A preset by name, with single knobs turned: preset("light", flip=0.0)."""
    check_one_of(name, PRESETS, f"there is no augmentation preset {name!r}")
    values = vars(PRESETS[name])
    for knob in knobs:
        if knob not in values:
            raise ConfigError(f"augmentation has no knob {knob!r}.{did_you_mean(knob, values)}")
    return Augment(**{**values, **knobs})


def drop_unsafe_flip(augment: Augment, flip_safe: bool) -> Augment:
    """The same without mirror images for sets (`Source.flip_safe`) in which they mean something else."""
    return augment if flip_safe or not augment.flip else replace(augment, flip=0.0)


def crop_kind(augment: Augment, size: tuple[int, int]) -> Crop:
    """What "auto" means for images that end up at `size` (height, width)."""
    return augment.crop if augment.crop != "auto" else ("pad" if max(size) <= SMALL else "resized")


def random_box(draws: np.ndarray, width: int, height: int, augment: Augment) -> Box:
    """RandomResizedCrop: a box of random area and shape, the same law as torchvision's.

    `draws` are 40 numbers in [0, 1): four for each of ten attempts to fit a box into the image.
    """
    low, high = math.log(augment.ratio[0]), math.log(augment.ratio[1])
    for area, shape, x, y in draws.reshape(10, 4).tolist():
        area = width * height * (augment.scale[0] + area * (augment.scale[1] - augment.scale[0]))
        ratio = math.exp(low + shape * (high - low))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return left, top, left + w, top + h
    narrow, broad = augment.ratio  # none fitted: the largest centred box whose shape is allowed
    w, h = min(width, max(1, round(height * broad))), min(height, max(1, round(width / narrow)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def soft_targets(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Class numbers (B,) or zeros and ones (B, classes) -> float (B, classes)."""
    if labels.ndim == 2:  # several labels per image: each is a question of its own
        return labels.float() * (1 - smoothing) + smoothing / 2
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes


def mix(images: Tensor, labels: Tensor, keys: Keys, augment: Augment, classes: int) -> tuple[Tensor, Tensor]:
    """Float images and labels -> mixed images and soft targets (B, classes), on the images' device.

    Neighbours of the global batch are mixed, the first with the second and so on, by a weight from the key of the
    first: however a batch is divided among ranks, the result is the same if each has an even number of samples.
    """
    targets = soft_targets(labels, classes, augment.smoothing).to(images.device)
    pairs = len(images) // 2
    if not pairs or not (augment.mixup or augment.cutmix):
        return images, targets
    weights, masks = _pair_weights(keys[: 2 * pairs : 2], augment, (images.shape[-2], images.shape[-1]))
    mask = masks.to(images).repeat_interleave(2, dim=0)[:, None]  # B 1 H W: the share of its own image at each pixel
    share = weights.to(targets).repeat_interleave(2)[:, None]  # B 1
    mixed, blended = images.clone(), targets.clone()
    for own, values in ((mask, mixed), (share, blended)):
        paired = values[: 2 * pairs]
        partners = paired.view(-1, 2, *paired.shape[1:]).flip(1).flatten(0, 1)
        paired.copy_(own * paired + (1 - own) * partners)
    return mixed, blended


def _pair_weights(keys: Keys, augment: Augment, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The weight of each pair (P,) and its mask over the pixels (P, H, W), both in 0..1."""
    height, width = size
    weights, masks = np.empty(len(keys)), np.empty((len(keys), height, width))
    for i, draws in enumerate(uniforms(keys, "mix", 3)):
        cut = bool(augment.cutmix) and (not augment.mixup or draws[0] < 0.5)
        alpha = augment.cutmix if cut else augment.mixup
        weight = random.Random(int(keys[i])).betavariate(alpha, alpha)
        masks[i] = 1.0 if cut else weight
        if cut:
            h, w = (round(n * (1 - weight) ** 0.5) for n in size)
            top, left = int(draws[1] * (height - h + 1)), int(draws[2] * (width - w + 1))
            masks[i, top : top + h, left : left + w] = 0.0
            weight = 1 - h * w / (height * width)
        weights[i] = weight
    return torch.from_numpy(weights), torch.from_numpy(masks)


def class_weights(counts: np.ndarray) -> Tensor:
    """Weights for the loss that make every class count the same: mean 1 over the samples, 0 for a class without."""
    counts = np.asarray(counts, dtype=np.float64)
    present = counts > 0
    weights = np.where(present, counts.sum() / np.maximum(counts, 1) / max(1, present.sum()), 0.0)
    return torch.from_numpy(weights).float()
