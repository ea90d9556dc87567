"""Attention as it is often written wrongly: each variant starts from the same weights as ours.

`torch`            nn.MultiheadAttention with batch_first=True: the same function as ours
`torch-batch`      nn.MultiheadAttention as it comes, batch_first=False, given B N D: it takes the first
                   axis for the tokens, so that every token attends to the same place of other images
`torch-keep-value` the same with query and key detached, the "cure" that was proposed for it
`torch-keep-key`   the same with query and value detached; `torch-keep-query` with key and value
`scale-after`      softmax(q k^T) / sqrt(D): after the softmax, and of the model's width
`scale-width`      softmax(q k^T / sqrt(D)): in its place, but of the model's width
`scale-none`       softmax(q k^T): as it comes
`linear-patches`   not an attention: patches flattened and mapped by one linear layer
`conv-patches`     the same function as a convolution, by PyTorch's conv2d, from the same weights

Shapes: B images, N tokens, D width, H heads, K = D / H.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.explanation.inside import as_vit
from vitkit.model.attention import Attention
from vitkit.model.build import Model
from vitkit.model.config import Size
from vitkit.model.patches import PatchEmbedding, conv_to_linear
from vitkit.model.torch_attention import to_torch
from vitkit.model.vit import ViT


class TorchAttention(nn.Module):
    """PyTorch's module in the place of ours, called with B N D whatever it makes of that."""

    def __init__(self, ours: Attention, batch_first: bool, kept: str = "") -> None:
        """`kept`: the only one of query, key and value through which gradients flow; default: all."""
        super().__init__()
        self.theirs = to_torch(ours)
        self.theirs.batch_first = batch_first
        self.kept = kept

    def forward(
        self, x: Tensor, mask: None = None, rotate: None = None, on_weights: None = None, queries: int | None = None
    ) -> Tensor:
        query, key, value = (x if self.kept in ("", name) else x.detach() for name in ("query", "key", "value"))
        y: Tensor = self.theirs(query, key, value, need_weights=False)[0]  # B N D
        return y[:, :queries]


class MisscaledAttention(nn.Module):
    """Scores divided by sqrt(D) instead of sqrt(K), inside the softmax or, as in the articles, after it; or by 1."""

    def __init__(self, ours: Attention, inside: bool, scaled: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.inside = ours.qkv, ours.out, ours.heads, inside
        self.scale = self.out.in_features**-0.5 if scaled else 1.0

    def forward(
        self, x: Tensor, mask: None = None, rotate: None = None, on_weights: None = None, queries: int | None = None
    ) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each B H N K
        scores = q[:, :, :queries] @ k.mT  # B H N N
        weights = (scores * self.scale).softmax(dim=-1) if self.inside else scores.softmax(dim=-1) * self.scale
        y: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))  # B N D
        return y


def _attention(replace: Callable[[Attention], nn.Module]) -> Callable[[ViT], None]:
    def change(model: ViT) -> None:
        for block in model.encoder.blocks:
            block.attention = replace(block.attention)  # type: ignore[arg-type]

    return change


class ConvPatches(PatchEmbedding):
    """The patch embedding as the convolution that it is; ours computes it as a matrix product."""

    def forward(self, x: Tensor) -> tuple[Tensor, Size]:
        y = F.conv2d(x, self.weight, self.bias, stride=self.patch)  # B D h w
        return y.flatten(2).mT, (y.shape[-2], y.shape[-1])


def _patches(linear: bool) -> Callable[[ViT], None]:
    def change(model: ViT) -> None:
        old, config = model.patches, model.config
        kind, form = (PatchEmbedding, "linear") if linear else (ConvPatches, "conv")
        model.patches = kind(config.channels, old.patch, config.width, form)  # type: ignore[arg-type]
        with torch.no_grad():
            model.patches.weight.copy_(conv_to_linear(old.weight) if linear else old.weight)
            if model.patches.bias is not None and old.bias is not None:
                model.patches.bias.copy_(old.bias)

    return change


VARIANTS: dict[str, Callable[[ViT], None]] = {
    "torch": _attention(lambda ours: TorchAttention(ours, batch_first=True)),
    "torch-batch": _attention(lambda ours: TorchAttention(ours, batch_first=False)),
    "torch-keep-value": _attention(lambda ours: TorchAttention(ours, batch_first=False, kept="value")),
    "torch-keep-key": _attention(lambda ours: TorchAttention(ours, batch_first=False, kept="key")),
    "torch-keep-query": _attention(lambda ours: TorchAttention(ours, batch_first=False, kept="query")),
    "scale-after": _attention(lambda ours: MisscaledAttention(ours, inside=False)),
    "scale-width": _attention(lambda ours: MisscaledAttention(ours, inside=True)),
    "scale-none": _attention(lambda ours: MisscaledAttention(ours, inside=True, scaled=False)),
    "linear-patches": _patches(linear=True),
    "conv-patches": _patches(linear=False),
}


def apply(model: Model, variant: str) -> None:
    """Change the model in place; "" leaves it as it is."""
    if variant and variant not in VARIANTS:
        raise ConfigError(f"there is no variant {variant!r}; choose one of {', '.join(VARIANTS)}")
    if variant:
        VARIANTS[variant](as_vit(model))
