"""Changes of a model that no configuration has: attention as it is often written wrongly, positions elsewhere.

Those of attention start from the same weights as ours.

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
`positions-each`   positions are added before every block, each from a table of its own
`positions-shared` the same from one table for all blocks
`positions-beside` a quarter of the width holds the position, the rest the patch: concatenated instead of added
`relative-fast`    a table of relative positions counts thirty times, so that it learns as much faster
`fixed-token`      the class token stays what it is at the start, zero
`unseen-token`     patches attend to patches alone: the class token reads them, and tells them nothing
`late-token`       the same, and it reads in the last block alone; before that it stays what it was
`first-patch`      the first patch is read in the place of a class token
`batch-norm`       batch normalisation over images and tokens in the place of layer normalisation

Shapes: B images, N tokens, D width, H heads, K = D / H.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.explanation.inside import as_vit
from vitkit.model.attention import Attention, OnWeights
from vitkit.model.build import Model
from vitkit.model.config import Size
from vitkit.model.head import Pool
from vitkit.model.patches import PatchEmbedding, conv_to_linear
from vitkit.model.relative import RelativeBias
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


class Beside(nn.Module):
    """Patches of three quarters of the width, and in the last quarter a learned vector for each place."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        config = model.config
        self.positions = nn.ParameterDict({"learned": torch.randn(1, math.prod(config.grid), config.width // 4) * 0.02})
        self.patches = PatchEmbedding(config.channels, config.patch_size, config.width - config.width // 4, "conv")
        self.patches.init_weights()

    @property
    def weight(self) -> Tensor:
        return self.patches.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Size]:
        y, grid = self.patches(x)  # B N 3D/4
        return torch.cat([y, self.positions["learned"].expand(len(y), -1, -1)], dim=-1), grid


def _beside(model: ViT) -> None:
    model.patches = Beside(model)  # type: ignore[assignment]


def _positions(shared: bool) -> Callable[[ViT], None]:
    """The model itself must have none."""

    def change(model: ViT) -> None:
        config = model.config
        table = torch.randn(config.tokens, config.width) * 0.02
        one = nn.ParameterDict({"learned": nn.Parameter(table)})
        for block in model.encoder.blocks:
            block.positions = one if shared else nn.ParameterDict({"learned": nn.Parameter(table.clone())})
            block.register_forward_pre_hook(lambda b, given: (given[0] + b.positions["learned"], *given[1:]))

    return change


def _fixed_token(model: ViT) -> None:
    assert model.class_token is not None
    model.class_token.requires_grad_(False)


def _unseen_token(model: ViT) -> None:
    def leave_out(attention: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        count = given[0].shape[1]
        sees = given[0].new_ones(count, count, dtype=torch.bool)  # N N
        sees[1:, 0] = False
        return (given[0], sees, *given[2:])

    for block in model.encoder.blocks:
        block.get_submodule("attention").register_forward_pre_hook(leave_out)


def _late_token(model: ViT) -> None:
    """Whatever the blocks before the last one made of the token is undone."""
    _unseen_token(model)
    blocks, kept = model.encoder.blocks, dict[str, Tensor]()

    def keep(block: nn.Module, given: tuple[Tensor, ...]) -> None:
        kept["token"] = given[0][:, :1]

    def undo(block: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.cat([kept.pop("token"), given[0][:, 1:]], dim=1), *given[1:])

    blocks[0].register_forward_pre_hook(keep)
    blocks[-1].register_forward_pre_hook(undo)


class FastBias(RelativeBias):
    def offsets(self, grid: Size) -> Tensor:
        return 30 * super().offsets(grid)


def _relative_fast(model: ViT) -> None:
    for block in model.encoder.blocks:
        block.relative.__class__ = FastBias


class FirstPatch(Pool):
    def forward(self, tokens: Tensor, on_weights: OnWeights = None) -> Tensor:
        return tokens[:, 0]


def _first_patch(model: ViT) -> None:
    model.head.pool = FirstPatch(model.config)


class TokenBatchNorm(nn.BatchNorm1d):
    """Each channel over all tokens of all images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


def _batch_norm(model: ViT) -> None:
    for block in model.encoder.blocks:
        block.norm1, block.norm2 = (TokenBatchNorm(model.config.width) for _ in range(2))
    model.norm = TokenBatchNorm(model.config.width)  # type: ignore[assignment]


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
    "positions-each": _positions(shared=False),
    "positions-shared": _positions(shared=True),
    "positions-beside": _beside,
    "relative-fast": _relative_fast,
    "fixed-token": _fixed_token,
    "unseen-token": _unseen_token,
    "late-token": _late_token,
    "first-patch": _first_patch,
    "batch-norm": _batch_norm,
}


def apply(model: Model, variant: str) -> None:
    """Change the model in place; "" leaves it as it is."""
    if variant and variant not in VARIANTS:
        raise ConfigError(f"there is no variant {variant!r}; choose one of {', '.join(VARIANTS)}")
    if variant:
        VARIANTS[variant](as_vit(model))
