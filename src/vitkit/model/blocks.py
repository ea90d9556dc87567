"""Blocks other than the paper's: a table. A new one is a class, a row here and its rule in `words.py`.

Shapes: B images, N tokens, D width, H heads, K channels per head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitkit.model.attention import Attention, OnWeights
from vitkit.model.base import Part
from vitkit.model.config import ViTConfig
from vitkit.model.encoder import Block
from vitkit.model.merging import Merging
from vitkit.model.mlp import dropout
from vitkit.model.positions import Place


class PostNormBlock(Block):
    """x + LN(MHSA(x)), then x + LN(MLP(x)): norms at the end of the branches, which start at `layer_scale`."""

    def __init__(self, config: ViTConfig, drop_path_rate: float = 0.0) -> None:
        super().__init__(config, drop_path_rate)
        self.start = config.layer_scale
        self.scale1 = self.scale2 = None  # the weights of the norms are scales already

    def mix(self, x: Tensor, place: Place, on_weights: OnWeights, only: int | None, merging: Merging | None) -> Tensor:
        return self.branch(self.norm1(self.attend(x, place, on_weights, only, merging)), None)

    def process(self, x: Tensor) -> Tensor:
        return self.branch(self.norm2(self.mlp(x)), None)

    def init_weights(self) -> None:
        super().init_weights()
        for norm in (self.norm1, self.norm2):
            nn.init.constant_(norm.weight, 1.0 if self.start is None else self.start)


class ParallelBlock(Block):
    """x + MHSA(LN(x)) + MLP(LN(x)), with one norm for both (Dehghani et al. 2023)."""

    def __init__(self, config: ViTConfig, drop_path_rate: float = 0.0) -> None:
        super().__init__(config, drop_path_rate)
        del self.norm2
        self.scale2 = None

    def forward(
        self,
        x: Tensor,
        place: Place,
        on_weights: OnWeights = None,
        only: int | None = None,
        merging: Merging | None = None,
    ) -> Tensor:
        normed = self.norm1(x)
        y = self.attend(normed, place, on_weights, only, merging) + self.mlp(normed[:, :only])
        x = x[:, :only] + self.branch(y, self.scale1)
        return x if merging is None or only is not None else merging.merge(x)


class SideBySide(Attention):
    """The attentions of several branches as one of so many heads more; each branch has a norm of its own."""

    def __init__(self, branches: nn.ModuleList) -> None:
        Part.__init__(self)
        self._branches = [branches]  # in a list: they belong to the block
        self.dropout = self.branches[0].attention.dropout

    @property
    def branches(self) -> list[Block]:
        return [block for block in self._branches[0] if isinstance(block, Block)]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = [branch.attention.split(branch.norm1(x)) for branch in self.branches]
        return tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))  # each B H N K, all heads

    def join(self, y: Tensor) -> Tensor:
        found = []
        for branch, part in zip(self.branches, y.chunk(len(self.branches), dim=-1), strict=True):
            out = dropout(branch.attention.join(part), branch.dropout if self.training else 0.0)
            found.append(branch.branch(out, branch.scale1))
        return torch.stack(found).sum(dim=0)

    def init_weights(self) -> None:
        """The branches have the weights."""


class BranchedBlock(Block):
    """x + the sum of attentions, then x + the sum of MLPs (Touvron et al. 2022)."""

    attention: SideBySide

    def __init__(self, config: ViTConfig, drop_path_rate: float = 0.0) -> None:
        Part.__init__(self)
        self.branches = nn.ModuleList(Block(config, drop_path_rate) for _ in range(config.branches))
        self.attention = SideBySide(self.branches)
        self.relative = self.scale1 = self.scale2 = None
        self.dropout = 0.0  # within the branches

    def mix(self, x: Tensor, place: Place, on_weights: OnWeights, only: int | None, merging: Merging | None) -> Tensor:
        return self.attend(x, place, on_weights, only, merging)

    def process(self, x: Tensor) -> Tensor:
        return torch.stack([branch.process(x) for branch in self.attention.branches]).sum(dim=0)

    def init_weights(self) -> None:
        for branch in self.attention.branches:
            branch.init_weights()


BLOCKS: dict[str, type[Block]] = {"pre-norm": Block, "post-norm": PostNormBlock, "parallel": ParallelBlock}


def block_kind(config: ViTConfig) -> type[Block]:
    return BranchedBlock if config.branches > 1 else BLOCKS[config.block]
