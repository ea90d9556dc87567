"""Image (or feature map) -> one token per patch: one function in two forms.

Cutting an image into patches, flattening each and applying one linear map is the same function as a
convolution whose kernel and stride are the patch. Both forms are here, and their weights convert into
each other exactly: a patch is flattened as (row, column, channel), as in the paper's x_p.

Shapes: B images, C channels, H x W pixels, P x Q patch, h x w grid of N = h * w patches, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.model.base import Part, lecun_normal_
from vitkit.model.config import AnyConfig, Size, ViTConfig, check_divisible
from vitkit.model.norms import build_norm


def conv_to_linear(weight: Tensor) -> Tensor:
    """D C P Q -> D (P Q C)"""
    return weight.permute(0, 2, 3, 1).flatten(1)


def linear_to_conv(weight: Tensor, patch: Size) -> Tensor:
    """D (P Q C) -> D C P Q"""
    return weight.reshape(len(weight), *patch, -1).permute(0, 3, 1, 2)


def to_tileable(images: Tensor, config: AnyConfig, pad: bool) -> Tensor:
    """Check a batch of images against the model; with `pad`, add zeros at the bottom and the right."""
    shape, (p, q) = tuple(images.shape), config.patch_size
    if images.ndim != 4:
        hint = "; add a batch axis with images[None]" if images.ndim == 3 else ""
        raise InputError(f"expected a batch of images (batch, channels, height, width), got shape {shape}{hint}")
    if shape[1] != config.channels:
        hint = f"convert the images, or make the model with channels={shape[1]}"
        raise InputError(f"expected {config.channels} channels, got shape {shape}; {hint}")
    if not images.is_floating_point():
        raise InputError(f"expected floating-point images, got {images.dtype}; use (images / 255 - mean) / std")
    if 0 in shape[2:]:
        raise InputError(f"images of shape {shape} have no pixels")
    if pad:
        return F.pad(images, (0, -shape[3] % q, 0, -shape[2] % p))
    if config.indivisible == "cut" and shape[2] >= p and shape[3] >= q:
        return images[..., : shape[2] // p * p, : shape[3] // q * q]
    check_divisible((shape[2], shape[3]), (p, q), error=InputError)
    return images


class PatchEmbedding(Part):
    """`form` "conv" keeps the weight as D C P Q, "linear" as D (P Q C). The outputs are equal."""

    __call__: Callable[..., tuple[Tensor, Size]]  # type: ignore[assignment]

    def __init__(
        self, channels: int, patch: Size, width: int, form: Literal["conv", "linear"] = "conv", bias: bool = True
    ) -> None:
        super().__init__()
        self.patch, self.form = patch, form
        shape = (channels, *patch) if form == "conv" else (channels * patch[0] * patch[1],)
        self.weight = nn.Parameter(torch.empty(width, *shape))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Size]:
        """B C H W -> tokens B N D, and the grid (h, w) they came from."""
        (p, q), (h, w) = self.patch, x.shape[-2:]
        return self.embed(self.cut(x)), (h // p, w // q)

    def cut(self, x: Tensor) -> Tensor:
        """B C H W -> B N CPQ"""
        (p, q), (b, c, height, width) = self.patch, x.shape
        tiles = x.reshape(b, c, height // p, p, width // q, q)  # B C h P w Q
        order = (0, 2, 4, 1, 3, 5) if self.form == "conv" else (0, 2, 4, 3, 5, 1)
        return tiles.permute(order).flatten(3).flatten(1, 2)

    def embed(self, x: Tensor) -> Tensor:
        """B N CPQ -> B N D. A matrix product for both forms: on a CPU it beats conv2d, most of all backwards."""
        return F.linear(x, self.weight.flatten(1), self.bias)

    def init_weights(self) -> None:
        lecun_normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class NormedPatchEmbedding(PatchEmbedding):
    """With norms of the cut patches (of their values in the order of `form`), of the tokens, or of both."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(*_sizes(config), config.patch_embedding, config.patch_bias)
        before, after = "before" in config.patch_norms, "after" in config.patch_norms
        self.norm_before = build_norm(config, self.weight[0].numel()) if before else nn.Identity()
        self.norm_after = build_norm(config) if after else nn.Identity()

    def embed(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.norm_after(super().embed(self.norm_before(x)))
        return tokens


def _sizes(config: ViTConfig) -> tuple[int, Size, int]:
    return config.stem.out_channels if config.stem else config.channels, config.patch_kernel, config.width


def build_patches(config: ViTConfig) -> PatchEmbedding:
    if config.patch_norms:
        return NormedPatchEmbedding(config)
    return PatchEmbedding(*_sizes(config), config.patch_embedding, config.patch_bias)
