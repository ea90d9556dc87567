"""What may stand before the patches: the hybrids' ResNet (also the CNN baseline's trunk), or a few convolutions.

The ResNet is a post-activation bottleneck ResNet with weight-standardised convolutions and GroupNorm, as in the
official hybrid models. Padding is "SAME" in the TensorFlow sense: with stride 2 the extra row and
column go to the bottom and the right, which PyTorch's `padding=1` does not do.

Shapes: B images, C channels, H x W pixels or map positions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.config import AnyStem, ConvStemConfig, ResNetConfig, StemConfig
from vitkit.model.patches import to_tileable

GROUP_NORM_EPS = {"official": 1e-6, "timm": 1e-5}


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


class Bottleneck(nn.Module):
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
        self.shortcut: nn.Sequential | None = None
        if channels != out or stride != 1:
            self.shortcut = nn.Sequential(StdConv(channels, out, 1, stride, numerics), group_norm(out, numerics))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNetStem(nn.Module):
    def __init__(self, config: StemConfig, channels: int) -> None:
        super().__init__()
        self.config = config
        kernel, stride = (7, 2) if config.root == "imagenet" else (3, 1)
        self.root = StdConv(channels, config.width, kernel, stride, config.numerics)
        self.norm = group_norm(config.width, config.numerics)
        stages, inputs = [], config.width
        for i, blocks in enumerate(config.layers):
            width = config.width * 2**i
            stride = 1 if i == 0 else 2
            units = [Bottleneck(inputs, width, stride, config.numerics)]
            units += [Bottleneck(4 * width, width, 1, config.numerics) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(*units))
            inputs = 4 * width
        self.stages = nn.Sequential(*stages)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.root(images)))
        if self.config.root == "imagenet":
            x = F.max_pool2d(same_padding(x, 3, 2, value=-math.inf), 3, 2)
        return self.stages(x)  # B out_channels H/stride W/stride

    def init_weights(self) -> None:
        """Official: LeCun-normal convolutions, and each block starts as its shortcut."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_in = module.weight[0].numel()
                nn.init.trunc_normal_(module.weight, std=fan_in**-0.5)
            elif isinstance(module, nn.GroupNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Bottleneck):
                nn.init.zeros_(module.norm3.weight)


class ConvStem(nn.Module):
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
        for conv in self.convs:
            assert isinstance(conv, nn.Conv2d)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            assert conv.bias is not None
            nn.init.zeros_(conv.bias)


def build_stem(config: AnyStem, channels: int) -> ResNetStem | ConvStem:
    return ResNetStem(config, channels) if isinstance(config, StemConfig) else ConvStem(config, channels)


class ResNet(nn.Module):
    """The CNN that ViT is compared with: the same trunk, mean pooling, one linear layer."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = ResNetStem(config.stem, config.channels)
        self.head = nn.Linear(config.stem.out_channels, config.classes) if config.classes else None
        self.init_weights()

    def init_weights(self) -> None:
        self.stem.init_weights()
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, pad: bool = False) -> Tensor:
        stride = self.config.stem.stride
        images = to_tileable(images, (stride, stride), self.config.channels, pad)  # B C H W
        pooled = self.stem(images).mean((-2, -1))  # B out_channels
        return pooled if self.head is None else self.head(pooled)  # B classes
