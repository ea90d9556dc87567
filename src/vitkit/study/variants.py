"""Attention as it is often written wrongly: each variant starts from the same weights as ours.

`torch`            nn.MultiheadAttention with batch_first=True: the same function as ours
`torch-batch`      nn.MultiheadAttention as it comes, batch_first=False, given B N D: it takes the first
                   axis for the tokens, so that every token attends to the same place of other pictures
`torch-detach`     the same with query and key detached, the "cure" that was proposed for it
`scale-after`      softmax(q k^T) / sqrt(D): after the softmax, and of the model's width
`scale-width`      softmax(q k^T / sqrt(D)): in its place, but of the model's width
`linear-patches`   not an attention: patches flattened and mapped by one linear layer
`conv-patches`     the same function as a convolution, by PyTorch's conv2d, from the same weights

Shapes: B pictures, N tokens, D width, H heads, K = D / H.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.model.attention import Attention, OnKeys, OnWeights
from vitkit.model.config import Size, ViTConfig
from vitkit.model.encoder import Block
from vitkit.model.patches import PatchEmbedding, conv_to_linear
from vitkit.model.vit import ViT


class TorchAttention(nn.Module):
    """PyTorch's module in the place of ours, called with B N D whatever it makes of that."""

    def __init__(self, ours: Attention, batch_first: bool, detach: bool) -> None:
        super().__init__()
        self.theirs = ours.to_torch()
        self.theirs.batch_first = batch_first
        self.detach = detach

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotate: Callable[[Tensor], Tensor] | None = None,
        on_weights: OnWeights | None = None,
        queries: int | None = None,
        on_keys: OnKeys | None = None,
    ) -> Tensor:
        asked = x.detach() if self.detach else x
        y: Tensor = self.theirs(asked, asked, x, need_weights=False)[0]  # B N D
        return y if queries is None else y[:, :queries]


class MisscaledAttention(Attention):
    """Scores divided by sqrt(D) instead of sqrt(K), inside the softmax or, as in the articles, after it."""

    inside = True

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotate: Callable[[Tensor], Tensor] | None = None,
        on_weights: OnWeights | None = None,
        queries: int | None = None,
        on_keys: OnKeys | None = None,
    ) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each B H N K
        scale = self.out.in_features**-0.5
        scores = q[:, :, :queries] @ k.mT  # B H N N
        weights = (scores * scale).softmax(dim=-1) if self.inside else scores.softmax(dim=-1) * scale
        return self.out((weights @ v).transpose(1, 2).flatten(2))  # B N D


def _torch(batch_first: bool, detach: bool) -> Callable[[Attention], nn.Module]:
    return lambda ours: TorchAttention(ours, batch_first, detach)


def _misscaled(inside: bool) -> Callable[[Attention], nn.Module]:
    def make(ours: Attention) -> nn.Module:
        wrong = MisscaledAttention(ours.out.in_features, ours.heads)
        wrong.inside = inside
        wrong.load_state_dict(ours.state_dict())
        return wrong

    return make


ATTENTION: dict[str, Callable[[Attention], nn.Module]] = {
    "torch": _torch(batch_first=True, detach=False),
    "torch-batch": _torch(batch_first=False, detach=False),
    "torch-detach": _torch(batch_first=False, detach=True),
    "scale-after": _misscaled(inside=False),
    "scale-width": _misscaled(inside=True),
}


PATCHES = ("linear-patches", "conv-patches")


class ConvPatches(PatchEmbedding):
    """The patch embedding as the convolution that it is; ours computes it as a matrix product."""

    def forward(self, x: Tensor) -> tuple[Tensor, Size]:
        y = F.conv2d(x, self.weight, self.bias, stride=self.patch)  # B D h w
        return y.flatten(2).mT, (y.shape[-2], y.shape[-1])


def _patches(old: PatchEmbedding, config: ViTConfig, linear: bool) -> PatchEmbedding:
    kind, form = (PatchEmbedding, "linear") if linear else (ConvPatches, "conv")
    new = kind(config.channels, old.patch, config.width, form)  # type: ignore[arg-type]
    with torch.no_grad():
        new.weight.copy_(conv_to_linear(old.weight) if linear else old.weight)
        new.bias.copy_(old.bias)
    return new


def apply(model: nn.Module, variant: str) -> None:
    """Change the model in place; "" leaves it as it is."""
    if not variant:
        return
    assert isinstance(model, ViT)
    if variant in PATCHES:
        model.patches = _patches(model.patches, model.config, linear=variant == PATCHES[0])
    elif variant in ATTENTION:
        for block in model.encoder.blocks:
            assert isinstance(block, Block)
            block.attention = ATTENTION[variant](block.attention)  # type: ignore[assignment]
    else:
        raise ConfigError(f"there is no variant {variant!r}; choose one of {', '.join((*ATTENTION, *PATCHES))}")
