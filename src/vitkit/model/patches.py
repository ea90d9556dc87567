"""Image (or feature map) -> one token per patch: one function in two forms.

Cutting an image into patches, flattening each and applying one linear map is the same function as a
convolution whose kernel and stride are the patch. Both forms are here, and their weights convert into
each other exactly: a patch is flattened as (row, column, channel), as in the paper's x_p.

Shapes: B images, C channels, H x W pixels, P x Q patch, h x w grid of N = h * w patches, D width.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.model.config import Size, check_divisible


def conv_to_linear(weight: Tensor) -> Tensor:
    """D C P Q -> D (P Q C)"""
    return rearrange(weight, "d c p q -> d (p q c)")


def linear_to_conv(weight: Tensor, patch: Size) -> Tensor:
    """D (P Q C) -> D C P Q"""
    return rearrange(weight, "d (p q c) -> d c p q", p=patch[0], q=patch[1])


def to_tileable(images: Tensor, patch: Size, channels: int, pad: bool) -> Tensor:
    """Check a batch of images against the model; with `pad`, add zeros at the bottom and the right."""
    if images.ndim != 4:
        raise InputError(
            f"expected a batch of images (batch, channels, height, width), got shape {tuple(images.shape)}"
            + ("; add a batch axis with images[None]" if images.ndim == 3 else "")
        )
    if images.shape[1] != channels:
        raise InputError(
            f"expected {channels} channels, got shape {tuple(images.shape)}; "
            f"convert the images, or make the model with channels={images.shape[1]}"
        )
    if not images.is_floating_point():
        raise InputError(f"expected floating-point images, got {images.dtype}; use (images / 255 - mean) / std")
    height, width = images.shape[-2:]
    if height < 1 or width < 1:
        raise InputError(f"images of shape {tuple(images.shape)} have no pixels")
    if pad:
        return F.pad(images, (0, -width % patch[1], 0, -height % patch[0]))
    check_divisible((height, width), patch, error=InputError)
    return images


class PatchEmbedding(nn.Module):
    """`form` "conv" keeps the weight as D C P Q, "linear" as D (P Q C). The outputs are equal."""

    def __init__(self, channels: int, patch: Size, width: int, form: Literal["conv", "linear"] = "conv") -> None:
        super().__init__()
        self.patch, self.form = patch, form
        values = channels * patch[0] * patch[1]
        shape = (width, channels, *patch) if form == "conv" else (width, values)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Size]:
        """B C H W -> tokens B N D, and the grid (h, w) they came from."""
        (p, q), (h, w) = self.patch, x.shape[-2:]
        # A matrix product for both forms: on a CPU it beats conv2d, most of all in the backward pass.
        order = "c p q" if self.form == "conv" else "p q c"
        x = rearrange(x, f"b c (h p) (w q) -> b (h w) ({order})", p=p, q=q)  # B N CPQ
        return F.linear(x, self.weight.flatten(1), self.bias), (h // p, w // q)
