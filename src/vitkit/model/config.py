"""All that a checkpoint implies, in one frozen dataclass. This module imports no torch.

`ViTConfig` holds the sizes, and also everything that silently changes a result: LayerNorm epsilon,
GELU flavour, pooling, how positions are resized, and the preprocessing of images. It is checked
when it is made, so that nothing can disagree with it later, and goes to JSON and back unchanged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

from vitkit.errors import ConfigError
from vitkit.model.jsonable import Jsonable
from vitkit.model.parts import AnyStem as AnyStem
from vitkit.model.parts import ConvStemConfig as ConvStemConfig
from vitkit.model.parts import Interpolation as Interpolation
from vitkit.model.parts import Preprocessing as Preprocessing
from vitkit.model.parts import RotaryConfig as RotaryConfig
from vitkit.model.parts import Size as Size
from vitkit.model.parts import StemConfig as StemConfig
from vitkit.model.parts import WhitenedStemConfig as WhitenedStemConfig
from vitkit.model.parts import as_size as as_size
from vitkit.model.parts import check_divisible as check_divisible
from vitkit.model.parts import stem_from_dict
from vitkit.model.words import ACTIVATIONS as ACTIVATIONS
from vitkit.model.words import BLOCKS as BLOCKS
from vitkit.model.words import NORMS as NORMS
from vitkit.model.words import POOLINGS as POOLINGS
from vitkit.model.words import POSITIONS as POSITIONS
from vitkit.model.words import RESIZES as RESIZES
from vitkit.model.words import TURNABLE, VARIANTS, BlockWord, NormWord, PoolingWord, PositionsWord, rotated_pairs
from vitkit.model.words import ActivationWord as ActivationWord
from vitkit.model.words import Pooling as Pooling
from vitkit.model.words import ResizeWord as ResizeWord

Prefix = Literal["all", "class", "none"]
PatchNorm = Literal["before", "after"]
M = TypeVar("M", bound="ModelConfig")


def as_float(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a finite number")
    return float(value)


class ModelConfig(Jsonable):
    """What the configuration of every model has."""

    kind: ClassVar[str]
    image_size: Size
    channels: int
    classes: int
    preprocessing: Preprocessing

    def replace(self: M, **changes: object) -> M:
        """A copy with changes; the preprocessing follows the image size and the number of channels."""
        self.check_names(changes)
        if "preprocessing" not in changes:
            pre = self.preprocessing
            if "image_size" in changes and pre.size == self.image_size:
                pre = dataclasses.replace(pre, size=as_size(changes["image_size"]))
            if changes.get("channels", self.channels) != self.channels:
                mean, std = sum(pre.mean) / len(pre.mean), sum(pre.std) / len(pre.std)
                pre = dataclasses.replace(pre, mean=(mean,), std=(std,))
            changes["preprocessing"] = pre
        return dataclasses.replace(self, **changes)

    def _complete(self) -> None:
        """Sizes from numbers and the default preprocessing; then check what all share."""
        self._set("image_size", as_size(self.image_size))
        if self.preprocessing is None:
            self._set("preprocessing", Preprocessing(size=self.image_size))
        self.check_fields()
        for name in ("mean", "std"):
            if (count := len(getattr(self.preprocessing, name))) not in (1, self.channels):
                wrong = f"preprocessing.{name} has {count} values for channels={self.channels}"
                raise ConfigError(f"{wrong}; give one per channel or one for all")

    def _at_least(self, least: int, names: str) -> None:
        for name in names.split():
            if (value := getattr(self, name)) < least:
                needs = "be at least 1" if least else "not be negative; 0 means none"
                raise ConfigError(f"{name}={value} must {needs}")


@dataclass(frozen=True)
class ViTConfig(ModelConfig):
    """A Vision Transformer. Sizes are (height, width); a single number means a square."""

    kind: ClassVar[str] = "ViT"
    later: ClassVar[Collection[str]] = (
        *VARIANTS,
        "relative_hidden",
        "embedding_dropout",
        "mlp_dropout",
        "head_bias_init",
    )
    image_size: Size = (224, 224)
    patch_size: Size = (16, 16)  # in pixels of the image, also behind a stem
    channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_width: int = 3072
    classes: int = 1000  # 0: no classifier, the model returns the pooled representation

    stem: AnyStem | None = None
    patch_embedding: Literal["conv", "linear"] = "conv"
    patch_bias: bool = True
    patch_norms: tuple[PatchNorm, ...] = ()  # norms before and after the patch map
    indivisible: Literal["refuse", "cut"] = "refuse"  # rows and columns that fill no patch: an error, or left out
    positions: PositionsWord = "learned"
    position_resize: ResizeWord = "official"
    positioned_prefix: Prefix = "all"  # which tokens before the patches have a row in the position table
    relative_hidden: int = 512  # width of the hidden layer of the relative positions that an MLP computes
    rotary: RotaryConfig | None = None  # queries and keys are turned as well
    class_token: bool = True
    distillation_token: bool = False
    registers: int = 0
    pre_norm: bool = False  # a norm before the first block, as in CLIP

    block: BlockWord = "pre-norm"
    branches: int = 1  # attentions, then MLPs, side by side in a block
    norm: NormWord = "layernorm"
    norm_eps: float = 1e-6
    activation: ActivationWord = "gelu"
    head_width: int = 0  # channels of each head; 0: width / heads
    qkv_bias: bool = True
    key_bias: bool = True  # False: of queries, keys and values the keys alone have none
    out_bias: bool = True  # of attention's output projection
    mlp_bias: bool = True
    attention_out: bool = True  # False: no output projection
    score_scale: Literal["head", "width"] = "head"  # scores are divided by the square root of this width
    qk_norm: bool = False  # a norm of each head's queries and keys
    attention_norm: bool = False  # a norm before the output projection
    mlp_norm: bool = False  # a norm before the last layer of the MLP
    layer_scale: float | None = None  # the initial value; None: no LayerScale
    head_bias_init: float = 0.0  # the initial bias of the classifier; the official code pre-trains with -10
    dropout: float = 0.0
    embedding_dropout: float | None = None  # None: as dropout
    mlp_dropout: float | None = None  # None: as dropout
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0  # rate of the last block; it grows linearly from 0

    pooling: PoolingWord = "cls"
    map_heads: int = 0  # of the MAP head; 0: as the encoder
    map_mlp_width: int = 0  # 0: as the encoder
    map_prefix: bool = True  # whether it looks at the tokens before the patches too
    final_norm: bool = True  # False: none after the last block
    norm_after_pooling: bool = False  # timm's fc_norm: pool first, then the final norm
    pre_logits: int = 0  # width of the layer before the classifier; 0: none
    pre_logits_activation: Literal["tanh", "gelu"] = "tanh"
    projection: int = 0  # width of a bias-free linear map after pooling, as in CLIP; 0: none
    unit_length: bool = False  # what the classifier sees is divided by its length, as by CLIP's zero-shot head

    preprocessing: Preprocessing = field(default=None)  # type: ignore[assignment]  # None: the official one

    def __post_init__(self) -> None:
        self._set("patch_size", as_size(self.patch_size, "patch_size"))
        if isinstance(self.stem, dict):
            self._set("stem", stem_from_dict(self.stem))
        if isinstance(self.rotary, dict):
            self._set("rotary", RotaryConfig.from_dict(self.rotary))
        for name in ("layer_scale", "embedding_dropout", "mlp_dropout"):
            if getattr(self, name) is not None:
                self._set(name, as_float(getattr(self, name), name))
        self._complete()
        self._at_least(1, "channels width depth heads mlp_width branches relative_hidden")
        self._at_least(0, "classes registers pre_logits projection head_width map_heads map_mlp_width")
        for name in ("dropout", "embedding_dropout", "mlp_dropout", "attention_dropout", "stochastic_depth"):
            if not 0 <= (getattr(self, name) or 0.0) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.norm_eps <= 0:
            raise ConfigError(f"norm_eps={self.norm_eps} must be above 0; the official one is 1e-6")
        self._check_parts()

    def _check_parts(self) -> None:
        """Each is right by itself; do they go together?"""
        pooling, lacks, stride = POOLINGS[self.pooling], POSITIONS[self.positions](self), self._stride
        if any(p % stride for p in self.patch_size):
            wrong = f"patch_size={self.patch_size} counts pixels and must be a multiple of the stem's stride {stride}"
            raise ConfigError(f"{wrong}; use patch_size={stride} for 1x1 patches of the feature map")
        if self.width % self.heads and not self.head_width:
            raise ConfigError(f"heads={self.heads} must divide width={self.width}; ViT uses width / 64 heads")
        if lacks:
            raise ConfigError(f"positions={self.positions!r} {lacks}")
        if pooling.class_token and not self.class_token:
            raise ConfigError(f"pooling={self.pooling!r} needs class_token=True; or use pooling='mean'")
        if self.distillation_token and not pooling.distillation:
            raise ConfigError(f"distillation_token=True goes with pooling='cls', not {self.pooling!r} (DeiT)")
        if self.pre_logits and self.projection:
            raise ConfigError("pre_logits and projection cannot both be set; no published model has both")
        if self.indivisible == "refuse":
            check_divisible(self.image_size, self.patch_size)
        elif self.stem is not None:
            raise ConfigError("indivisible='cut' is for patches of pixels; a stem reads the whole image")
        elif 0 in self.grid:
            raise ConfigError(f"image_size={self.image_size} is smaller than a patch of {self.patch_size}")
        self._check_variants()

    def _check_variants(self) -> None:
        """The same for what the paper's model has not."""
        if self.rotary is not None and self.positions not in TURNABLE:
            raise ConfigError(f"rotary goes with positions {', '.join(TURNABLE)}, not with {self.positions!r}")
        if self.rotary is not None and (lacks := rotated_pairs(self)):
            raise ConfigError(f"rotary {lacks}")
        lacks = BLOCKS[self.block](self)
        if lacks:
            raise ConfigError(f"block={self.block!r} {lacks}")
        unknown = set(self.patch_norms) - {"before", "after"}
        if unknown or len(set(self.patch_norms)) < len(self.patch_norms):
            raise ConfigError(f"patch_norms={self.patch_norms} must hold 'before', 'after', both or nothing")
        if not self.attention_out and self.attention_width != self.width:
            wide = f"heads={self.heads} of {self.attention_width // self.heads} channels give {self.attention_width}"
            raise ConfigError(f"attention_out=False needs heads that together have width={self.width}; {wide}")
        if self.pooling == "map" and self.width % (self.map_heads or self.heads):
            raise ConfigError(f"map_heads={self.map_heads or self.heads} must divide width={self.width}")
        if self.norm_after_pooling and not self.final_norm:
            raise ConfigError("norm_after_pooling=True needs final_norm=True: it says where the final norm is")

    @property
    def _stride(self) -> int:
        return self.stem.stride if self.stem else 1

    @property
    def grid(self) -> Size:
        """Patches (down, across) at the configured image size."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def patch_kernel(self) -> Size:
        """The patch size in what the patches are cut from: pixels, or positions of the stem's feature map."""
        return self.patch_size[0] // self._stride, self.patch_size[1] // self._stride

    @property
    def attention_width(self) -> int:
        """The channels of all heads together."""
        return self.heads * self.head_width or self.width

    @property
    def all_heads(self) -> int:
        """Heads of a block, of all its branches."""
        return self.heads * self.branches

    @property
    def embedding_rate(self) -> float:
        return self.dropout if self.embedding_dropout is None else self.embedding_dropout

    @property
    def mlp_rate(self) -> float:
        return self.dropout if self.mlp_dropout is None else self.mlp_dropout

    @property
    def position_words(self) -> str:
        """`positions`, and that there are rotary ones: "rotary", "learned + rotary"."""
        rotary = ["rotary"] if self.rotary else []
        return " + ".join(([] if rotary and self.positions == "none" else [self.positions]) + rotary)

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
        return POOLINGS[self.pooling].widths * self.width

    @property
    def head_inputs(self) -> int:
        """Width of what the classifier sees, and of the output when classes=0."""
        return self.pre_logits or self.projection or self.pooled_width


@dataclass(frozen=True)
class ResNetConfig(ModelConfig):
    """The CNN that ViT is compared with: the hybrid's trunk, mean pooling, one linear layer."""

    kind: ClassVar[str] = "ResNet"
    heads: ClassVar[int] = 0  # what a ViT has and a ResNet has not
    mlp_width: ClassVar[int] = 0
    tokens: ClassVar[int] = 0
    indivisible: ClassVar[str] = "refuse"
    image_size: Size = (224, 224)
    channels: int = 3
    classes: int = 1000
    stem: StemConfig = field(default_factory=StemConfig)
    preprocessing: Preprocessing = field(default=None)  # type: ignore[assignment]  # None: the official one

    def __post_init__(self) -> None:
        self._complete()
        self._at_least(1, "channels")
        self._at_least(0, "classes")
        if not isinstance(self.stem, StemConfig) or not self.stem.layers or self.stem.variant != "v2":
            raise ConfigError("a ResNet needs stem.layers, blocks a stage such as (3, 4, 6, 3), and stem.variant='v2'")
        check_divisible(self.image_size, self.patch_size)

    @property
    def patch_size(self) -> Size:
        """Pixels of the image per position of the last map."""
        return self.stem.stride, self.stem.stride

    @property
    def depth(self) -> int:
        """Convolutions and linear layers in a row."""
        return 2 + 3 * self.stem.blocks

    @property
    def width(self) -> int:
        return self.stem.width


AnyConfig = ViTConfig | ResNetConfig
