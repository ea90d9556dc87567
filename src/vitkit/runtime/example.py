"""Pictures that nobody gave: for tracing a model, and for checking an export when there are no real ones.

They are smooth coloured noise, which uses a model's range as photographs do far better than white noise does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data import normalise
from vitkit.model.config import AnyConfig


def made_up(config: AnyConfig, count: int, size: tuple[int, int] | None = None, seed: int = 0) -> Tensor:
    """uint8 (count, C, H, W), the same for the same seed."""
    random = torch.Generator().manual_seed(seed)
    size = size or config.preprocessing.size
    total = torch.zeros(count, config.channels, *size)
    for cells in (3, 7, 17):
        noise = torch.rand(count, config.channels, cells, cells, generator=random) - 0.5
        total += F.interpolate(noise, size, mode="bicubic", align_corners=False) * (9 / cells) ** 0.5
    grain = torch.rand(total.shape, generator=random) - 0.5
    return ((total + 0.1 * grain) * 120 + 128).clamp(0, 255).to(torch.uint8)


def example_of(model: nn.Module, raw: bool = False) -> Tensor:
    """What a model is traced with: two pictures, so that no exporter takes the batch for a constant."""
    config: AnyConfig = model.config  # type: ignore[assignment]
    if raw:
        height, width = config.preprocessing.size
        return made_up(config, 2, (height + 5, width + 9)).permute(0, 2, 3, 1).contiguous()
    return normalise(made_up(config, 2), config.preprocessing)
