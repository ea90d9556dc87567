"""How training varies its pictures: the knobs, the presets, and the random crop.

`Augment` holds every knob; `preset("medium")` is a point to start from and
`dataclasses.replace(preset("medium"), mixup=0.2)` turns one knob. What is done to a sample depends on
its key only (`keys.py`), so any process that is asked for it makes the same pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import numpy as np

from vitkit.errors import ConfigError, did_you_mean

Crop = Literal["auto", "resized", "pad", "none"]
Policy = Literal["none", "randaugment", "trivial"]
Box = tuple[int, int, int, int]  # left, top, right, bottom, in pixels of the upright picture

SMALL = 64  # pictures up to this size are padded and cropped rather than zoomed into


@dataclass(frozen=True)
class Augment:
    """Every knob of training augmentation. The defaults do nothing at all."""

    crop: Crop = "none"  # "resized": RandomResizedCrop; "pad": shift by padding; "auto": by the size of the picture
    scale: tuple[float, float] = (0.08, 1.0)  # share of the picture's area that "resized" keeps
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # its width / height
    padding: float = 0.125  # share of the side that "pad" shifts by: 4 pixels of 32
    flip: float = 0.0  # probability of a left-right mirror image
    policy: Policy = "none"  # "randaugment": `operations` of strength `magnitude`; "trivial": one, of any strength
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
            if value not in words:
                hint = did_you_mean(str(value), words)
                raise ConfigError(f"augment.{name}={value!r} is not known.{hint} Choose one of: {', '.join(words)}")
        for name in ("flip", "erase", "jitter", "padding"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"augment.{name}={getattr(self, name)} must be between 0 and 1")
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"augment.smoothing={self.smoothing} must be at least 0 and below 1; 0.1 is usual")
        if self.mixup < 0 or self.cutmix < 0:
            raise ConfigError("augment.mixup and augment.cutmix are alphas and must not be negative; 0 is off")
        if not 0 <= self.magnitude <= 30 or self.operations < 0:
            raise ConfigError(f"augment.magnitude={self.magnitude} must be in 0..30 and operations at least 0")
        low, high = self.scale
        if not 0 < low <= high <= 1 or not 0 < self.ratio[0] <= self.ratio[1]:
            raise ConfigError(f"augment.scale={self.scale} must rise within 0..1, and ratio={self.ratio} must rise")
        object.__setattr__(self, "scale", tuple(self.scale))
        object.__setattr__(self, "ratio", tuple(self.ratio))

    @property
    def soft_targets(self) -> bool:
        """True when targets become shares of classes instead of class numbers."""
        return bool(self.mixup or self.cutmix or self.smoothing)


PRESETS: dict[str, Augment] = {
    "none": Augment(),
    "light": Augment(crop="auto", scale=(0.35, 1.0), padding=0.0625, flip=0.5),
    "medium": Augment(crop="auto", flip=0.5, policy="randaugment", magnitude=9, mixup=0.2, smoothing=0.1),
    "strong": Augment(
        crop="auto",
        flip=0.5,
        policy="randaugment",
        magnitude=12,
        jitter=0.3,
        erase=0.25,
        mixup=0.8,
        cutmix=1.0,
        smoothing=0.1,
    ),
}


def preset(name: str, **knobs: object) -> Augment:
    """A preset by name, with single knobs turned: preset("light", flip=0.0)."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS)
        raise ConfigError(f"there is no augmentation preset {name!r}.{hint} Choose one of: {', '.join(PRESETS)}")
    values = {f.name: getattr(PRESETS[name], f.name) for f in fields(Augment)}
    for knob in knobs:
        if knob not in values:
            raise ConfigError(f"augmentation has no knob {knob!r}.{did_you_mean(knob, values)}")
    return Augment(**{**values, **knobs})


def suited(augment: Augment, mirrors: bool) -> Augment:
    """The same without mirror images for sets (`Source.mirrors`) in which they mean something else."""
    return augment if mirrors or not augment.flip else replace(augment, flip=0.0)


def crop_kind(augment: Augment, size: tuple[int, int]) -> Crop:
    """What "auto" means for pictures that end up at `size` (height, width)."""
    return augment.crop if augment.crop != "auto" else ("pad" if max(size) <= SMALL else "resized")


def random_box(draws: np.ndarray, width: int, height: int, augment: Augment) -> Box:
    """RandomResizedCrop: a box of random area and shape, the same law as torchvision's.

    `draws` are 40 numbers in [0, 1): four for each of ten attempts to fit a box into the picture.
    """
    low, high = math.log(augment.ratio[0]), math.log(augment.ratio[1])
    for area, shape, x, y in draws.reshape(10, 4).tolist():
        area = width * height * (augment.scale[0] + area * (augment.scale[1] - augment.scale[0]))
        ratio = math.exp(low + shape * (high - low))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return left, top, left + w, top + h
    return _largest_box(width, height, augment.ratio)


def _largest_box(width: int, height: int, ratio: tuple[float, float]) -> Box:
    """The largest centred box whose shape is allowed."""
    w, h = width, height
    if width / height < ratio[0]:
        h = max(1, min(height, round(width / ratio[0])))
    elif width / height > ratio[1]:
        w = max(1, min(width, round(height * ratio[1])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
