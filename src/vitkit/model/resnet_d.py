"""ResNet-D before the patches of timm's hybrids (He et al. 2019): three small convolutions first, BatchNorm,
and shortcuts that average before they project. Padding is PyTorch's own.

Shapes: B images, C channels, H x W pixels or map positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.base import Part, lecun_normal_
from vitkit.model.config import StemConfig

MOMENTUM, EPS = 0.1, 1e-5


class BatchNorm(nn.Module):
    """PyTorch's BatchNorm2d without its counter of batches, which is an integer and changes nothing."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean, var, train = self.running_mean, self.running_var, self.training
        return F.batch_norm(x, mean, var, self.weight, self.bias, train, MOMENTUM, EPS)


def conv(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)


class BottleneckD(Part):
    """1x1, 3x3, 1x1; the shortcut is averaged and projected where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.norm1 = conv(channels, width, 1), BatchNorm(width)
        self.conv2, self.norm2 = conv(width, width, 3, stride), BatchNorm(width)
        self.conv3, self.norm3 = conv(width, out, 1), BatchNorm(out)
        pool = nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False) if stride > 1 else nn.Identity()
        changes = channels != out or stride != 1
        self.shortcut = nn.Sequential(pool, conv(channels, out, 1), BatchNorm(out)) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))

    def init_weights(self) -> None:
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                lecun_normal_(part.weight)
        nn.init.zeros_(self.norm3.weight)  # a block starts as its shortcut


class ResNetDStem(Part):
    """`root.{0, 1, 2}` are the convolutions, `norms.{0, 1, 2}` what follows each."""

    def __init__(self, config: StemConfig, channels: int) -> None:
        super().__init__()
        half = config.width // 2
        self.root = nn.ModuleList([conv(channels, half, 3, 2), conv(half, half, 3), conv(half, config.width, 3)])
        self.norms = nn.ModuleList(BatchNorm(width) for width in (half, half, config.width))
        self.stages = nn.Sequential()
        for i, blocks in enumerate(config.layers):
            width = config.width * 2**i
            shapes = [(2 * width, 2) if i else (width, 1)] + [(4 * width, 1)] * (blocks - 1)  # channels, stride
            self.stages.append(nn.Sequential(*(BottleneckD(c, width, s) for c, s in shapes)))

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for convolution, norm in zip(self.root, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        y: Tensor = self.stages(F.max_pool2d(x, 3, 2, padding=1))
        return y  # B out_channels H/stride W/stride

    def init_weights(self) -> None:
        for convolution in self.root:
            assert isinstance(convolution, nn.Conv2d)
            lecun_normal_(convolution.weight)
        for part in self.stages.modules():
            if isinstance(part, BottleneckD):
                part.init_weights()
