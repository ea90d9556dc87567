"""What may stand before the patches: the hybrids' ResNet (also the CNN baseline's trunk), or convolutions.

The ResNet is a post-activation bottleneck ResNet with weight-standardised convolutions and GroupNorm, as in the
official hybrid models. Padding is "SAME" in the TensorFlow sense: with stride 2 the extra row and
column go to the bottom and the right, which PyTorch's `padding=1` does not do.

Shapes: B images, C channels, H x W pixels or map positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.base import Part, VisionModel, layer_numbers, lecun_normal_
from vitkit.model.config import AnyStem, ConvStemConfig, ResNetConfig, StemConfig, WhitenedStemConfig
from vitkit.model.patches import to_tileable
from vitkit.model.resnet_d import BatchNorm, ResNetDStem

GROUP_NORM_EPS = {"official": 1e-6, "timm": 1e-5}
WHITENING_EPS = 5e-4  # added to variances of pixels: directions with hardly any are noise


def same_padding(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad so that the output has ceil(size / stride) positions, the odd one at the bottom right."""
    pads = []
    for n in (x.shape[-1], x.shape[-2]):
        total = max(0, (-(-n // stride) - 1) * stride + kernel - n)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value) if any(pads) else x


class StdConv(nn.Conv2d):
    """A convolution whose filters are brought to mean 0 and deviation 1 each time it is used."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, numerics: str) -> None:
        super().__init__(channels, out, kernel, stride, bias=False)
        self.numerics = numerics

    def standardized(self) -> Tensor:
        axes = (1, 2, 3)
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))  # half precision is too coarse
        centred = weight - weight.mean(axes, keepdim=True)
        var = centred.square().mean(axes, keepdim=True)
        if self.numerics == "official":
            # an exactly constant filter has no gradient through sqrt(0); the tiny clamp keeps it finite
            return (centred / (var.clamp_min(1e-30).sqrt() + 1e-5)).to(self.weight.dtype)
        return (centred * (var + 1e-8).rsqrt()).to(self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = same_padding(x, self.kernel_size[0], self.stride[0])
        return F.conv2d(x, self.standardized(), stride=self.stride)


def group_norm(channels: int, numerics: str) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(32, channels), channels, eps=GROUP_NORM_EPS[numerics])


class Convolutions(Part):
    """Official: LeCun-normal convolutions, and a block starts as its shortcut."""

    def init_weights(self) -> None:
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                lecun_normal_(part.weight)
            elif isinstance(part, Bottleneck):
                nn.init.zeros_(part.norm3.weight)


class Bottleneck(Convolutions):
    """1x1, 3x3, 1x1; the shortcut is projected where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int, numerics: str) -> None:
        super().__init__()
        out = 4 * width
        self.conv1 = StdConv(channels, width, 1, 1, numerics)
        self.norm1 = group_norm(width, numerics)
        self.conv2 = StdConv(width, width, 3, stride, numerics)
        self.norm2 = group_norm(width, numerics)
        self.conv3 = StdConv(width, out, 1, 1, numerics)
        self.norm3 = group_norm(out, numerics)
        project = StdConv(channels, out, 1, stride, numerics) if channels != out or stride != 1 else None
        self.shortcut = nn.Sequential(project, group_norm(out, numerics)) if project else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNetStem(Convolutions):
    def __init__(self, config: StemConfig, channels: int) -> None:
        super().__init__()
        self.config = config
        kernel, stride = (7, 2) if config.root == "imagenet" else (3, 1)
        self.root = StdConv(channels, config.width, kernel, stride, config.numerics)
        self.norm = group_norm(config.width, config.numerics)
        self.stages = nn.Sequential()
        for i, blocks in enumerate(config.layers):
            width = config.width * 2**i
            shapes = [(2 * width, 2) if i else (width, 1)] + [(4 * width, 1)] * (blocks - 1)  # channels, stride
            self.stages.append(nn.Sequential(*(Bottleneck(c, width, s, config.numerics) for c, s in shapes)))

    def enter(self, images: Tensor) -> Tensor:
        """What the first stage sees."""
        x = F.relu(self.norm(self.root(images)))
        if self.config.root == "imagenet":
            x = F.max_pool2d(same_padding(x, 3, 2, value=-math.inf), 3, 2)
        return x

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.stages(self.enter(images))
        return x  # B out_channels H/stride W/stride


class ConvStem(Part):
    """3x3 convolutions with ReLU. The map has ceil(size / stride) positions, as behind the ResNet."""

    def __init__(self, config: ConvStemConfig, channels: int) -> None:
        super().__init__()
        inputs = (channels, *config.widths[:-1])
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, 3, s, padding=1) for i, o, s in zip(inputs, config.widths, config.strides, strict=True)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = images.contiguous(memory_format=torch.channels_last)  # a third faster on a CPU
        for conv in self.convs:
            x = F.relu(conv(x))
        return x  # B out_channels H/stride W/stride

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.kaiming_normal_(parameter, nonlinearity="relu") if parameter.ndim > 1 else nn.init.zeros_(parameter)


class Whitening(Part):
    """A frozen 2x2 convolution, `filters` with their negatives.

    `fit` makes the filters the principal components of the data's 2x2 patches, scaled to variance 1 each: what
    follows sees directions that are equally strong, and learns sooner. Before that they are the pixels themselves.
    """

    weight: Tensor

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(filters, channels, 2, 2))

    def forward(self, images: Tensor) -> Tensor:
        return F.conv2d(F.pad(images, (0, 1, 0, 1), mode="replicate"), self.weight)

    def init_weights(self) -> None:
        self._use(torch.eye(self.weight[0].numel()))

    @torch.no_grad()
    def fit(self, images: Tensor) -> None:
        """B C H W, normalised as the model wants them."""
        patches = images.double().unfold(2, 2, 1).unfold(3, 2, 1)  # B C H-1 W-1 2 2
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2)  # M K, with K = 4C
        variances, directions = torch.linalg.eigh(patches.mT @ patches / len(patches))  # the least first
        self._use((directions / (variances + WHITENING_EPS).sqrt()).mT.flip(0))

    def _use(self, rows: Tensor) -> None:
        half = len(self.weight) // 2
        rows = rows.repeat(-(-half // len(rows)), 1)[:half]  # grey images have four directions: they repeat
        self.weight.copy_(torch.cat((rows, -rows)).view(self.weight.shape))


class ConvBlock(Part):
    """3x3 convolutions with BatchNorm and GELU, the third and later residual; max-pooling halves the map once."""

    def __init__(self, channels: int, width: int, count: int, pool_first: bool = True) -> None:
        super().__init__()
        self.pool_first = pool_first
        inputs = [channels] + [width] * (count - 1)
        self.convs = nn.ModuleList(nn.Conv2d(i, width, 3, padding=1, bias=False) for i in inputs)
        self.norms = nn.ModuleList(BatchNorm(width) for _ in inputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(x, 2) if self.pool_first else x
        for turn, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = conv(x)
            y = F.gelu(norm(y if turn or self.pool_first else F.max_pool2d(y, 2)))
            x = x + y if turn > 1 else y
        return x  # B width H/2 W/2

    def init_weights(self) -> None:
        """The first filters pass their channel on; the others are random."""
        for weight in self.convs.parameters():
            nn.init.kaiming_uniform_(weight, a=5**0.5)
            nn.init.dirac_(weight[: weight.shape[1]])


class WhitenedStem(Part):
    """Whitening, then blocks of convolutions."""

    def __init__(self, config: WhitenedStemConfig, channels: int) -> None:
        super().__init__()
        self.whitening = Whitening(channels, config.filters)
        inputs = (config.filters, *config.widths[:-1])
        pool_first = repeat(config.pool == "before")
        self.blocks = nn.Sequential(*map(ConvBlock, inputs, config.widths, config.convs, pool_first))

    def forward(self, images: Tensor) -> Tensor:
        white = F.gelu(self.whitening(images.contiguous(memory_format=torch.channels_last)))
        x: Tensor = self.blocks(white)
        return x  # B out_channels H/stride W/stride

    def init_weights(self) -> None:
        for part in (self.whitening, *self.blocks):
            part.init_weights()


STEMS: dict[str, type[ResNetStem | ResNetDStem | ConvStem | WhitenedStem]] = {
    "v2": ResNetStem,
    "d": ResNetDStem,
    "plain": ConvStem,
    "whitened": WhitenedStem,
}


def build_stem(config: AnyStem, channels: int) -> ResNetStem | ResNetDStem | ConvStem | WhitenedStem:
    return STEMS[config.variant](config, channels)  # type: ignore[arg-type]  # each with a configuration of its kind


class ResNet(VisionModel):
    """The CNN that ViT is compared with: the same trunk, mean pooling, one linear layer."""

    config: ResNetConfig

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = ResNetStem(config.stem, config.channels)
        self.head = nn.Linear(config.stem.out_channels, config.classes) if config.classes else None

    def forward(self, images: Tensor, pad: bool = False) -> Tensor:
        pooled = self.pooled(images, pad)
        return pooled if self.head is None else self.head(pooled)  # B classes

    def pooled(self, images: Tensor, pad: bool = False) -> Tensor:
        return self.stem(to_tileable(images, self.config, pad)).mean((-2, -1))  # B out_channels

    def features(
        self, images: Tensor, layers: Sequence[int] = (-1,), norm: bool = False, grid: bool = False, pad: bool = False
    ) -> list[Tensor]:
        """The maps after the stages `layers`: B D h w with `grid`, else B (h w) D. There is no final norm."""
        maps = [self.stem.enter(to_tileable(images, self.config, pad))]
        wanted = layer_numbers(layers, len(self.stem.stages))
        for stage in list(self.stem.stages)[: max(wanted, default=-1) + 1]:
            maps.append(stage(maps[-1]))
        return [maps[i + 1] if grid else maps[i + 1].flatten(2).mT for i in wanted]

    @property
    def classifiers(self) -> list[nn.Linear]:
        return [] if self.head is None else [self.head]

    def init_weights(self) -> None:
        self.stem.init_weights()
        for parameter in self.head.parameters() if self.head else ():
            nn.init.zeros_(parameter)
