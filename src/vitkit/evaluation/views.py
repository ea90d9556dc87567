"""Several views of every image at test time, and the mean of what a model answers to them.

In this order: the image and its mirror image, then both moved by a sixteenth of the side to each of four corners.
Mirror images are left out where they mean something else; what is moved in at an edge repeats it.

Shapes: B images, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError

SHIFT = 1 / 16  # of the side
CORNERS = ((0, 0), (-1, -1), (1, 1), (-1, 1), (1, -1))  # down and right


def over_views(model: nn.Module, count: int, mirror: bool) -> Callable[[Tensor], Tensor]:
    """The model, asked about so many views of every image; its outputs (logits, values) are averaged."""
    most = len(CORNERS) * (1 + mirror)
    if not 1 <= count <= most:
        without = "" if mirror else ", since a mirror image of this set means something else"
        raise ConfigError(f"--views {count} must be from 1 to {most}{without}")
    return lambda images: torch.stack([model(view) for view in views(images, count, mirror)]).mean(0)


def views(images: Tensor, count: int, mirror: bool) -> Iterator[Tensor]:
    """B C H W -> so many of B C H W, the images themselves first."""
    height, width = images.shape[-2:]
    h, w = (max(1, round(side * SHIFT)) for side in (height, width))
    wide = F.pad(images, (w, w, h, h), mode="replicate")  # B C H+2h W+2w
    for number in range(count):
        corner, mirrored = divmod(number, 1 + mirror)
        down, right = CORNERS[corner]
        view = wide[..., h - down * h :, w - right * w :][..., :height, :width]
        yield view.flip(-1) if mirrored else view
