"""The parts of a configuration that stand for themselves: sizes, preprocessing, stems, rotary positions. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

from vitkit.errors import ConfigError, InputError, VitkitError
from vitkit.model.jsonable import Jsonable

Size = tuple[int, int]  # (height, width), always in this order

# "bilinear-plain" reads the four nearest pixels, however much an image shrinks: no antialiasing, as TensorFlow does
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming", "bilinear-plain"]


def as_size(value: object, what: str = "image_size") -> Size:
    """224, "224", "224x448" (height x width) or (224, 448) -> (height, width)."""
    sides = value
    if isinstance(value, str):
        numbers = [int(n) if n.strip().isdecimal() and len(n) < 10 else 0 for n in value.lower().split("x")]
        sides = numbers if len(numbers) > 1 else numbers[0]
    pair = tuple(sides) if isinstance(sides, (tuple, list)) else (sides, sides)
    if len(pair) != 2 or not all(type(n) is int and n > 0 for n in pair):
        raise ConfigError(f"{what}={value!r} is not a size; write 224, 224x448 (height x width) or (224, 448)")
    return pair


@dataclass(frozen=True)
class Preprocessing(Jsonable):
    """How an image becomes the tensor a model was trained for.

    `crop` < 1 resizes to size / crop first and cuts the centre out; `fit` says how the resize treats
    the image's shape: "squash" to the exact size (the official code, Hugging Face) or "crop": the
    shorter side to the size, then the centre (timm, torchvision, DINOv2). Then pixels in 0..1 become
    (x - mean) / std, one value per channel or one for all. The official models want 0.5 and 0.5.
    """

    size: Size = (224, 224)
    crop: float = 1.0
    fit: Literal["squash", "crop"] = "squash"
    interpolation: Interpolation = "bilinear"
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        self._set("size", as_size(self.size, "preprocessing.size"))
        for name in ("mean", "std"):
            values = getattr(self, name)
            values = values if isinstance(values, (tuple, list)) else (values,)
            if not values or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in values):
                raise ConfigError(f"preprocessing.{name}={values!r} must be numbers, one per channel or one for all")
            self._set(name, tuple(float(v) for v in values))
        self.check_fields()
        if not 0 < self.crop <= 1:
            raise ConfigError(f"preprocessing.crop={self.crop} must be above 0 and at most 1; 1 keeps all")
        if min(self.std) <= 0:
            raise ConfigError(f"preprocessing.std={self.std} must be above 0")


@dataclass(frozen=True)
class StemConfig(Jsonable):
    """The ResNet before the patches of a hybrid, and the trunk of the CNN baseline.

    `root` "imagenet" is the official 7x7 convolution of stride 2 and a max-pool (stride 4 in all);
    "small" is one 3x3 convolution of stride 1, for images of a few dozen pixels. Every stage after
    the first halves the map. `numerics` says whose small numbers are used: the official code divides
    standardised weights by (std + 1e-5) with GroupNorm epsilon 1e-6; timm divides by sqrt(var + 1e-8)
    with epsilon 1e-5. With real weights the two differ by about 1e-4. `variant` "v2" is BiT's ResNet,
    "d" is timm's ResNet-D: a root of three 3x3 convolutions, BatchNorm, shortcuts that average.
    """

    later: ClassVar[Collection[str]] = ("variant",)
    layers: tuple[int, ...] = (3, 4, 9)
    width: int = 64
    root: Literal["imagenet", "small"] = "imagenet"
    numerics: Literal["official", "timm"] = "official"
    variant: Literal["v2", "d"] = "v2"

    def __post_init__(self) -> None:
        self.check_fields()
        if not all(type(n) is int and n > 0 for n in self.layers):
            raise ConfigError(f"stem.layers={self.layers!r} must list blocks per stage, such as (3, 4, 9)")
        if self.width < 4 or self.width % 4:
            raise ConfigError(f"stem.width={self.width} must be a positive multiple of 4; the official one is 64")
        if self.variant == "d" and (self.root, self.numerics) != ("imagenet", "official"):
            raise ConfigError("stem.variant='d' has one root and BatchNorm; leave stem.root and stem.numerics out")

    @property
    def stride(self) -> int:
        """Pixels of the image per position of the feature map."""
        return (4 if self.root == "imagenet" else 1) << max(0, len(self.layers) - 1)

    @property
    def out_channels(self) -> int:
        return self.width * 4 * 2 ** (len(self.layers) - 1) if self.layers else self.width

    @property
    def blocks(self) -> int:
        return sum(self.layers)


@dataclass(frozen=True)
class ConvStemConfig(Jsonable):
    """A few plain 3x3 convolutions with ReLU before the patches: a small ViT learns far sooner with them."""

    variant: ClassVar[str] = "plain"
    widths: tuple[int, ...] = (16, 32)
    strides: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        self.check_fields()
        for name in ("widths", "strides"):
            if not (values := getattr(self, name)) or not all(type(n) is int and n > 0 for n in values):
                raise ConfigError(f"stem.{name}={values!r} must list a number for every convolution, such as (16, 32)")
        if len(self.widths) != len(self.strides):
            raise ConfigError(f"stem.widths={self.widths} and stem.strides={self.strides} must be as many")

    @property
    def stride(self) -> int:
        return math.prod(self.strides)

    @property
    def out_channels(self) -> int:
        return self.widths[-1]

    @property
    def blocks(self) -> int:
        return len(self.widths)


@dataclass(frozen=True)
class WhitenedStemConfig(Jsonable):
    """A whitening 2x2 convolution, then blocks that halve the map: 3x3 convolutions, max-pooling, BatchNorm, GELU.

    After the speed records on CIFAR-10 (Jordan 2024, airbench). `widths` are the channels of each block, `convs` its
    convolutions, `filters` the channels of the whitening convolution, which is frozen. `pool` says where a block halves
    the map: behind its first convolution, as there, or before it, which then costs a quarter and sees less.
    """

    later: ClassVar[Collection[str]] = ("pool",)
    variant: ClassVar[str] = "whitened"
    widths: tuple[int, ...] = (48, 96, 128)
    convs: tuple[int, ...] = (2, 2, 1)
    filters: int = 24
    pool: Literal["before", "behind"] = "before"

    def __post_init__(self) -> None:
        self.check_fields()
        for name in ("widths", "convs"):
            if not (values := getattr(self, name)) or not all(type(n) is int and n > 0 for n in values):
                raise ConfigError(f"stem.{name}={values!r} must list a number for every block, such as (2, 2, 1)")
        if len(self.widths) != len(self.convs):
            raise ConfigError(f"stem.widths={self.widths} and stem.convs={self.convs} must be as many")
        if self.filters < 2 or self.filters % 2:
            raise ConfigError(f"stem.filters={self.filters} must be even: each filter comes with its negative")

    @property
    def stride(self) -> int:
        return int(2 ** len(self.widths))

    @property
    def out_channels(self) -> int:
        return self.widths[-1]

    @property
    def blocks(self) -> int:
        return sum(self.convs)


@dataclass(frozen=True)
class RotaryConfig(Jsonable):
    """Rotary positions: queries and keys are turned by angles that grow with the row and the column.

    `kind` says what is turned by: "grid", the number of the row and column; "box", patch centres in -1 .. 1 (DINOv3);
    "mixed", learned frequencies of both, by block and head. `base` is the temperature of the wavelengths; with
    `pixels` coordinates span -1 .. 1, and frequencies grow from pi to pi `max_res` / 2. `half` turns channel i with
    i + K/2 instead of its neighbour. `axes` is the order of the two halves: rows first ("ij") or columns first ("xy").
    `offset` is added to grid coordinates, which are scaled to a `reference` grid if one is given. The last three vary
    them in training.
    """

    kind: Literal["grid", "box", "mixed"] = "grid"
    base: float = 10_000.0
    half: bool = False
    axes: Literal["ij", "xy"] = "ij"
    offset: float = 0.0
    pixels: bool = False
    max_res: int = 224
    reference: Size | None = None
    shift: float = 0.0
    jitter: float = 0.0
    rescale: float = 0.0

    def __post_init__(self) -> None:
        if self.reference is not None:
            self._set("reference", as_size(self.reference, "rotary.reference"))
        self.check_fields()
        if self.base <= 0 or self.max_res < 1:
            raise ConfigError(f"rotary.base={self.base} and rotary.max_res={self.max_res} must be above 0")
        for name, readers in ROTARY_KINDS.items():
            if getattr(self, name) != getattr(type(self), name) and self.kind not in readers:
                raise ConfigError(
                    f"rotary.{name} goes with kind={' or '.join(readers)}, not with {self.kind}; leave it out"
                )
        if self.shift < 0 or not all(most == 0 or most >= 1 for most in (self.jitter, self.rescale)):
            raise ConfigError("rotary.shift must not be negative; jitter and rescale are 0 (off) or factors from 1 up")


ROTARY_KINDS = {  # which kinds read a field
    "offset": ("grid", "box"),
    "pixels": ("grid",),
    "max_res": ("grid",),
    "reference": ("grid",),
    "shift": ("box",),
    "jitter": ("box",),
    "rescale": ("box",),
}


AnyStem = StemConfig | ConvStemConfig | WhitenedStemConfig


def stem_from_dict(values: dict[str, object]) -> AnyStem:
    """Which of them it is, is told by its fields."""
    kind: type[AnyStem] = WhitenedStemConfig if "convs" in values else ConvStemConfig
    return (kind if "widths" in values else StemConfig).from_dict(values)


def check_divisible(image: Size, patch: Size, error: type[VitkitError] = ConfigError) -> None:
    """Patches must tile the image; otherwise name the nearest sizes that work."""
    if any(n % p for n, p in zip(image, patch, strict=True)):
        (h, taller), (w, wider) = ((max(p, n // p * p), -(-n // p) * p) for n, p in zip(image, patch, strict=True))
        raise error(
            f"an image of {image[0]}x{image[1]} (height x width) is not divided by patches of {patch[0]}x{patch[1]}; "
            f"the nearest sizes are {h}x{w} and {taller}x{wider}"
            + (", or call the model with pad=True" if issubclass(error, InputError) else "")
        )
