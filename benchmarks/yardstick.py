"""The CNN that a small hybrid has to keep up with: airbench (Jordan 2024), re-derived from its description.

A frozen whitening convolution of 2x2 pixels, three blocks of two 3x3 convolutions with max-pooling, BatchNorm and
GELU in channels-last, a linear classifier on the largest response of each channel; SGD with Nesterov momentum, a
learning rate that rises and falls linearly, label smoothing, shifts of two pixels, every second epoch mirrored.

Shapes: B images, C channels, H x W pixels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMOOTHING, SHIFT, MOMENTUM, DECAY = 0.2, 2, 0.85, 0.0153
RATES = (6.0, 11.5)  # of which the benchmark takes the better; the second is the original


class Cnn(nn.Module):
    def __init__(self, images: Tensor, widths: tuple[int, int, int], classes: int = 10) -> None:
        super().__init__()
        patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2)
        values, vectors = torch.linalg.eigh(patches.mT @ patches / len(patches))
        rows = (vectors / (values + 5e-4).sqrt()).mT.view(-1, images.shape[1], 2, 2)
        self.register_buffer("whitening", torch.cat((rows, -rows)))
        self.bias = nn.Parameter(torch.zeros(2 * len(rows)))
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        before = 2 * len(rows)
        for width in widths:
            for inputs in (before, width):
                conv = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
                nn.init.dirac_(conv.weight.data[:inputs])
                self.convs.append(conv)
                self.norms.append(nn.BatchNorm2d(width, eps=1e-12, momentum=0.4))
            before = width
        for norm in self.norms:
            norm.weight.requires_grad_(False)
        self.head = nn.Linear(before, classes, bias=False)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        x = F.gelu(F.conv2d(images.contiguous(memory_format=torch.channels_last), self.whitening, self.bias))
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = conv(x)
            x = F.gelu(norm(x if number % 2 else F.max_pool2d(x, 2)))
        return self.head(x.amax((2, 3))) / 9


def optimizer_of(model: Cnn, rate: float, batch: int) -> torch.optim.Optimizer:
    """Biases of norms learn 64 times as fast, and decay as much slower, as in the original."""
    scale = batch / 1024 / (1 + 1 / (1 - MOMENTUM))
    rate, decay = rate * scale, DECAY * scale
    biases = [norm.bias for norm in model.norms]
    others = [p for p in model.parameters() if p.requires_grad and not any(p is b for b in biases)]
    groups = [{"params": biases, "lr": 64 * rate, "weight_decay": decay / (64 * rate)}]
    groups += [{"params": others, "lr": rate, "weight_decay": decay / rate}]
    return torch.optim.SGD(groups, momentum=MOMENTUM, nesterov=True)


def share(progress: float) -> float:
    """Of the peak learning rate: from a fifth up to all at 23% of the time, then down."""
    return 0.2 + 0.8 * progress / 0.23 if progress < 0.23 else 0.07 + 0.93 * (1 - progress) / 0.77


def varied(images: Tensor, mirrored: Tensor, random: torch.Generator) -> Tensor:
    """Shifted by up to two pixels, the border reflected; mirrored where told."""
    count, _, height, width = images.shape
    padded = F.pad(torch.where(mirrored[:, None, None, None], images.flip(3), images), (SHIFT,) * 4, mode="reflect")
    moved = torch.empty_like(images)
    offsets = torch.randint(0, 2 * SHIFT + 1, (count, 2), generator=random)
    for top in range(2 * SHIFT + 1):
        for left in range(2 * SHIFT + 1):
            chosen = (offsets == torch.tensor([top, left])).all(dim=1)
            moved[chosen] = padded[chosen, :, top : top + height, left : left + width]
    return moved


def epochs_of(count: int, batch: int, random: torch.Generator) -> object:
    """(samples, mirrored) without end; an image is mirrored in every second epoch, half of them in each."""
    first, epoch = torch.rand(count, generator=random) < 0.5, 0
    while True:
        order = torch.randperm(count, generator=random)
        for start in range(0, math.floor(count / batch) * batch, batch):
            chosen = order[start : start + batch]
            yield chosen, first[chosen] ^ bool(epoch % 2)
        epoch += 1
