"""All that a checkpoint implies, in one frozen dataclass.

`ViTConfig` holds the sizes, and also everything that silently changes a result: LayerNorm epsilon,
GELU flavour, pooling, how positions are resized, and the preprocessing of pictures. It is checked
when it is made, so that nothing can disagree with it later, and goes to JSON and back unchanged.

This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from vitkit.errors import ConfigError, did_you_mean
from vitkit.model.jsonable import Jsonable

Size = tuple[int, int]  # (height, width), always in this order

Pooling = Literal["cls", "mean", "cls+mean", "map"]
Positions = Literal["none", "learned", "learned-2d", "relative", "sincos-2d", "rope-2d"]
PositionResize = Literal["official", "timm", "timm-npz", "huggingface", "torchvision", "dinov2"]
Activation = Literal["gelu", "gelu-tanh", "quick-gelu", "swiglu"]
Prefix = Literal["all", "class", "none"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]


def as_size(value: int | str | tuple[int, int] | list[int], what: str = "image_size") -> Size:
    """224, "224", "224x448" (height x width) or (224, 448) -> (height, width)."""
    problem = f"{what}={value!r} is not a size; write 224, 224x448 (height x width) or (224, 448)"
    if isinstance(value, str):
        try:
            value = [int(part) for part in value.lower().split("x")]
        except ValueError:
            raise ConfigError(problem) from None
        value = value * 2 if len(value) == 1 else value
    if isinstance(value, bool) or not isinstance(value, (int, tuple, list)):
        raise ConfigError(problem)
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise ConfigError(problem)
    return pair


@dataclass(frozen=True)
class Preprocessing(Jsonable):
    """How a picture becomes the tensor a model was trained for.

    `crop` < 1 resizes to size / crop first and cuts the centre out; `fit` says how the resize treats
    the picture's shape: "squash" to the exact size (the official code, Hugging Face) or "crop": the
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
        self.check_fields()
        if not 0 < self.crop <= 1:
            raise ConfigError(f"preprocessing.crop={self.crop} must be above 0 and at most 1; 1 keeps all")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if not isinstance(values, (tuple, list)):
                values = (values,)
            if not values or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in values):
                raise ConfigError(f"preprocessing.{name}={values!r} must be numbers, one per channel or one for all")
            self._set(name, tuple(float(v) for v in values))
        if not all(v > 0 for v in self.std):
            raise ConfigError(f"preprocessing.std={self.std} must be above 0")


@dataclass(frozen=True)
class StemConfig(Jsonable):
    """The ResNet before the patches of a hybrid, and the trunk of the CNN baseline.

    `root` "imagenet" is the official 7x7 convolution of stride 2 and a max-pool (stride 4 in all);
    "small" is one 3x3 convolution of stride 1, for pictures of a few dozen pixels. Every stage after
    the first halves the map. `numerics` says whose small numbers are used: the official code divides
    standardised weights by (std + 1e-5) with GroupNorm epsilon 1e-6; timm divides by sqrt(var + 1e-8)
    with epsilon 1e-5. With real weights the two differ by about 1e-4.
    """

    layers: tuple[int, ...] = (3, 4, 9)
    width: int = 64
    root: Literal["imagenet", "small"] = "imagenet"
    numerics: Literal["official", "timm"] = "official"

    def __post_init__(self) -> None:
        if not isinstance(self.layers, (tuple, list)) or not all(isinstance(n, int) and n > 0 for n in self.layers):
            raise ConfigError(f"stem.layers={self.layers!r} must list blocks per stage, such as (3, 4, 9)")
        self._set("layers", tuple(self.layers))
        self.check_fields()
        if self.width < 4 or self.width % 4:
            raise ConfigError(f"stem.width={self.width} must be a positive multiple of 4; the official one is 64")

    @property
    def stride(self) -> int:
        """Pixels of the picture per position of the feature map."""
        return (4 if self.root == "imagenet" else 1) * 2 ** max(0, len(self.layers) - 1)

    @property
    def out_channels(self) -> int:
        return self.width * 4 * 2 ** (len(self.layers) - 1) if self.layers else self.width

    @property
    def blocks(self) -> int:
        return sum(self.layers)


@dataclass(frozen=True)
class ConvStemConfig(Jsonable):
    """A few plain 3x3 convolutions with ReLU before the patches: a small ViT learns far sooner with them."""

    widths: tuple[int, ...] = (16, 32)
    strides: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        for name in ("widths", "strides"):
            values = getattr(self, name)
            whole = isinstance(values, (tuple, list)) and all(type(n) is int and n > 0 for n in values)
            if not whole or not values:
                raise ConfigError(f"stem.{name}={values!r} must list a number for every convolution, such as (16, 32)")
            self._set(name, tuple(values))
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


AnyStem = StemConfig | ConvStemConfig


@dataclass(frozen=True)
class ViTConfig(Jsonable):
    """A Vision Transformer. Sizes are (height, width); a single number means a square."""

    image_size: Size = (224, 224)
    patch_size: Size = (16, 16)  # in pixels of the picture, also behind a stem
    channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_width: int = 3072
    classes: int = 1000  # 0: no classifier, the model returns the pooled representation

    stem: AnyStem | None = None
    patch_embedding: Literal["conv", "linear"] = "conv"
    positions: Positions = "learned"
    position_resize: PositionResize = "official"
    positioned_prefix: Prefix = "all"  # which tokens before the patches have a row in the position table
    class_token: bool = True
    distillation_token: bool = False
    registers: int = 0
    pre_norm: bool = False  # a LayerNorm before the first block, as in CLIP

    norm_eps: float = 1e-6
    activation: Activation = "gelu"
    qkv_bias: bool = True
    layer_scale: float | None = None  # the initial value; None: no LayerScale
    dropout: float = 0.0
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0  # rate of the last block; it grows linearly from 0

    pooling: Pooling = "cls"
    norm_after_pooling: bool = False  # timm's fc_norm: pool first, then the final LayerNorm
    pre_logits: int = 0  # width of the tanh layer before the classifier; 0: none
    projection: int = 0  # width of a bias-free linear map after pooling, as in CLIP; 0: none

    preprocessing: Preprocessing = field(default=None)  # type: ignore[assignment]  # None: the official one

    def __post_init__(self) -> None:
        self._set("image_size", as_size(self.image_size))
        self._set("patch_size", as_size(self.patch_size, "patch_size"))
        if isinstance(self.stem, dict):
            kind: type[AnyStem] = ConvStemConfig if "widths" in self.stem else StemConfig
            self._set("stem", kind.from_dict(self.stem))
        if self.preprocessing is None:
            self._set("preprocessing", Preprocessing(size=self.image_size))
        elif isinstance(self.preprocessing, dict):
            self._set("preprocessing", Preprocessing.from_dict(self.preprocessing))
        if self.layer_scale is not None:
            self._set("layer_scale", float(self.layer_scale))
        self.check_fields()
        self._check_numbers()
        self._check_geometry()
        self._check_tokens()
        check_channels(self.preprocessing, self.channels)

    def _check_numbers(self) -> None:
        for name in ("channels", "width", "depth", "heads", "mlp_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("classes", "registers", "pre_logits", "projection"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative; 0 means none")
        for name in ("dropout", "attention_dropout", "stochastic_depth"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.norm_eps <= 0:
            raise ConfigError(f"norm_eps={self.norm_eps} must be above 0; the official one is 1e-6")

    def _check_geometry(self) -> None:
        if self.width % self.heads:
            raise ConfigError(f"heads={self.heads} must divide width={self.width}; ViT uses width / 64 heads")
        stride = self.stem.stride if self.stem else 1
        if any(p % stride for p in self.patch_size):
            raise ConfigError(
                f"patch_size={self.patch_size} counts pixels and must be a multiple of the stem's stride {stride}; "
                f"use patch_size={stride} for 1x1 patches of the feature map"
            )
        check_divisible(self.image_size, self.patch_size)
        if self.positions in ("learned-2d", "sincos-2d") and self.width % (2 if self.positions == "learned-2d" else 4):
            rule = "even" if self.positions == "learned-2d" else "a multiple of 4"
            raise ConfigError(f"positions={self.positions!r} needs width={self.width} to be {rule}")
        if self.positions == "sincos-2d" and self.width < 8:
            raise ConfigError(f"positions='sincos-2d' needs a width of at least 8, not {self.width}")
        if self.positions == "rope-2d" and (self.width // self.heads) % 4:
            raise ConfigError(
                f"positions='rope-2d' needs width / heads = {self.width // self.heads} to be a multiple of 4: "
                f"two rotated pairs, one for rows and one for columns"
            )

    def _check_tokens(self) -> None:
        if self.pooling in ("cls", "cls+mean") and not self.class_token:
            raise ConfigError(f"pooling={self.pooling!r} needs class_token=True; or use pooling='mean'")
        if self.distillation_token and self.pooling != "cls":
            raise ConfigError(f"distillation_token=True goes with pooling='cls', not {self.pooling!r} (DeiT)")
        if self.pre_logits and self.projection:
            raise ConfigError("pre_logits and projection cannot both be set; no published model has both")

    @property
    def grid(self) -> Size:
        """Patches (down, across) at the configured image size."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the patches: class, distillation, registers, in this order."""
        return int(self.class_token) + int(self.distillation_token) + self.registers

    @property
    def positioned_prefix_tokens(self) -> int:
        """How many of the prefix tokens have a row of their own in the position table."""
        of_kind = {"all": self.prefix_tokens, "class": self.prefix_tokens - self.registers, "none": 0}
        return of_kind[self.positioned_prefix]

    @property
    def tokens(self) -> int:
        return self.prefix_tokens + self.grid[0] * self.grid[1]

    @property
    def pooled_width(self) -> int:
        return 2 * self.width if self.pooling == "cls+mean" else self.width

    @property
    def head_inputs(self) -> int:
        """Width of what the classifier sees, and of the output when classes=0."""
        return self.pre_logits or self.projection or self.pooled_width

    def replace(self, **changes: Any) -> ViTConfig:
        """A copy with changes; the preprocessing follows the image size and the number of channels."""
        return replace(self, **changes)


@dataclass(frozen=True)
class ResNetConfig(Jsonable):
    """The CNN that ViT is compared with: the hybrid's trunk, mean pooling, one linear layer."""

    image_size: Size = (224, 224)
    channels: int = 3
    classes: int = 1000
    stem: StemConfig = field(default_factory=StemConfig)
    preprocessing: Preprocessing = field(default=None)  # type: ignore[assignment]  # None: the official one

    def __post_init__(self) -> None:
        self._set("image_size", as_size(self.image_size))
        if isinstance(self.stem, dict):
            self._set("stem", StemConfig.from_dict(self.stem))
        if self.preprocessing is None:
            self._set("preprocessing", Preprocessing(size=self.image_size))
        elif isinstance(self.preprocessing, dict):
            self._set("preprocessing", Preprocessing.from_dict(self.preprocessing))
        self.check_fields()
        if self.channels < 1 or self.classes < 0:
            raise ConfigError(f"channels={self.channels} must be at least 1 and classes={self.classes} at least 0")
        if not isinstance(self.stem, StemConfig) or not self.stem.layers:
            raise ConfigError("a ResNet needs stem.layers, blocks per stage such as (3, 4, 6, 3)")
        check_divisible(self.image_size, (self.stem.stride, self.stem.stride))
        check_channels(self.preprocessing, self.channels)

    def replace(self, **changes: Any) -> ResNetConfig:
        """A copy with changes; the preprocessing follows the image size and the number of channels."""
        return replace(self, **changes)


AnyConfig = ViTConfig | ResNetConfig
M = TypeVar("M", ViTConfig, ResNetConfig)


def replace(config: M, **changes: Any) -> M:
    known = [f.name for f in dataclasses.fields(config)]
    for key in changes:
        if key not in known:
            raise ConfigError(f"{type(config).__name__} has no field {key!r}.{did_you_mean(key, known)}")
    if "preprocessing" not in changes:
        pre = config.preprocessing
        if "image_size" in changes and pre.size == config.image_size:
            pre = dataclasses.replace(pre, size=as_size(changes["image_size"]))
        if changes.get("channels", config.channels) != config.channels:
            mean, std = sum(pre.mean) / len(pre.mean), sum(pre.std) / len(pre.std)
            pre = dataclasses.replace(pre, mean=(mean,), std=(std,))
        changes["preprocessing"] = pre
    return dataclasses.replace(config, **changes)


def check_channels(pre: Preprocessing, channels: int) -> None:
    for name in ("mean", "std"):
        if len(getattr(pre, name)) not in (1, channels):
            raise ConfigError(
                f"preprocessing.{name} has {len(getattr(pre, name))} values for channels={channels}; "
                f"give one per channel or one for all"
            )


def check_divisible(image: Size, patch: Size, error: type[ConfigError] | type[Any] = ConfigError) -> None:
    """Patches must tile the image; otherwise name the nearest sizes that work."""
    if all(n % p == 0 for n, p in zip(image, patch, strict=True)):
        return
    down = tuple(max(p, n // p * p) for n, p in zip(image, patch, strict=True))
    up = tuple(-(-n // p) * p for n, p in zip(image, patch, strict=True))
    raise error(
        f"an image of {image[0]}x{image[1]} (height x width) is not divided by patches of {patch[0]}x{patch[1]}; "
        f"the nearest sizes are {down[0]}x{down[1]} and {up[0]}x{up[1]}, or call the model with pad=True"
    )
