"""Relative positions: a bias on the attention scores by the (row, column) offset of two patches.

It is a learned table by head and offset (Swin, BEiT), or what a small MLP makes of the offset's logarithm (timm,
after Swin v2); of every block its own, or one for all of them.

Shapes: H heads, h x w grid of N patches, P prefix tokens, T = P + N tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.config import Size, ViTConfig
from vitkit.model.place import Place, PositionPart, Positions
from vitkit.model.resizing import resize_offsets


class ScoreBias(PositionPart):
    """A grid -> H T T, to be added to the attention scores."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.prefix, self.heads = config.prefix_tokens, config.heads

    def forward(self, grid: Size) -> Tensor:
        return self._build(grid) if self.training else self.derived(grid, lambda: self._build(grid))

    @abstractmethod
    def offsets(self, grid: Size) -> Tensor:
        """2h-1 2w-1 H: the score of every (row, column) offset."""

    def among_prefix(self) -> Tensor:
        """3 H: patch to prefix, prefix to patch, prefix to prefix."""
        raise NotImplementedError

    def _build(self, grid: Size) -> Tensor:
        h, w = grid
        table = self.offsets(grid)  # 2h-1 2w-1 H
        device = table.device
        dy, dx = (torch.arange(n, device=device)[:, None] - torch.arange(n, device=device) + n - 1 for n in grid)
        index = (dy[:, None, :, None] * (2 * w - 1) + dx[None, :, None, :]).reshape(h * w, h * w)
        bias = table.flatten(0, 1)[index].permute(2, 0, 1)  # H N N
        if not self.prefix:
            return bias
        n, p = h * w, self.prefix
        to_prefix, from_prefix, within = self.among_prefix()[:, :, None, None]  # each H 1 1
        top = torch.cat([within.expand(-1, p, p), from_prefix.expand(-1, p, n)], dim=2)
        return torch.cat([top, torch.cat([to_prefix.expand(-1, n, p), bias], dim=2)], dim=1)


class RelativeBias(ScoreBias):
    """A learned score by (row, column) offset and head; tokens before the patches have three of their own."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        (h, w), self.how = config.grid, config.position_resize
        self.by_offset = nn.Parameter(torch.empty(config.heads, 2 * h - 1, 2 * w - 1))
        # patch to prefix, prefix to patch, prefix to prefix
        self.with_prefix = nn.Parameter(torch.empty(config.heads, 3)) if self.prefix else None

    def offsets(self, grid: Size) -> Tensor:
        return resize_offsets(self.by_offset, grid, self.how)

    def among_prefix(self) -> Tensor:
        assert self.with_prefix is not None
        return self.with_prefix.transpose(0, 1)


class BiasMlp(ScoreBias):
    """The score is what an MLP makes of sign(offset) log(1 + |offset|); tokens before the patches have none."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        up, down = nn.Linear(2, config.relative_hidden), nn.Linear(config.relative_hidden, config.heads)
        self.mlp = nn.ModuleDict({"up": up, "down": down})
        self.dropout = config.dropout  # timm trains with 0.125 here, whatever it has elsewhere

    def offsets(self, grid: Size) -> Tensor:
        like = next(self.mlp.parameters())
        steps = [torch.arange(1 - n, n, device=like.device, dtype=torch.float32) for n in grid]
        offset = torch.stack(torch.meshgrid(*steps, indexing="ij"), dim=-1)  # 2h-1 2w-1 2
        hidden = F.relu(self.mlp["up"]((offset.sign() * offset.abs().log1p()).to(like.dtype)))
        scores: Tensor = self.mlp["down"](F.dropout(hidden, self.dropout, self.training))
        return scores

    def among_prefix(self) -> Tensor:
        return next(self.mlp.parameters()).new_zeros(3, self.heads)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.xavier_uniform_(parameter) if parameter.ndim > 1 else nn.init.zeros_(parameter)


class Relative(Positions):
    """A learned bias on the attention scores of every block, by the offset of two patches."""

    mergeable = False
    bias: ClassVar[type[ScoreBias]] = RelativeBias

    @classmethod
    def in_block(cls, config: ViTConfig) -> ScoreBias:
        return cls.bias(config)

    @classmethod
    def resize(cls, tensors: dict[str, Tensor], old: ViTConfig, new: ViTConfig) -> bool:
        tables = [name for name in tensors if name.endswith("relative.by_offset")]
        for name in tables:
            resized = resize_offsets(tensors[name], new.grid, new.position_resize)
            tensors[name] = resized.permute(2, 0, 1).contiguous()
        return super().resize(tensors, old, new) or bool(tables)


class RelativeShared(Relative):
    """One bias for all blocks."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.relative = self.bias(config)

    def place(self, grid: Size, tokens: Tensor) -> Place:
        return super().place(grid, tokens)._replace(bias=self.relative(grid))

    @classmethod
    def in_block(cls, config: ViTConfig) -> None:  # type: ignore[override]
        return None

    def init_weights(self) -> None:
        super().init_weights()
        self.relative.init_weights()


class RelativeMlp(Relative):
    bias = BiasMlp


class RelativeMlpShared(RelativeShared):
    bias = BiasMlp
