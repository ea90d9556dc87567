"""What all position encodings share: where the tokens of a batch are, and what may act where.

Shapes: B images, D width, H heads, K channels per head, h x w grid of N patches, P prefix tokens, T = P + N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitkit.model.base import Part
from vitkit.model.config import Size, ViTConfig

Rotate = Callable[[Tensor], Tensor] | None  # queries or keys, B H T K


class Place(NamedTuple):
    """Where the tokens of a batch are, for the blocks."""

    grid: Size
    rotate: Rotate = None
    bias: Tensor | None = None  # H T T, on the scores of every block
    rotates: Sequence[Rotate] = ()  # where each block turns in its own way

    def at(self, block: int) -> Place:
        return self._replace(rotate=self.rotates[block]) if self.rotates else self


class PositionPart(Part):
    """Parameters N(0, 0.02), and what was derived from them, kept while they stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[object, tuple[object, Tensor]] = {}

    def derived(self, key: object, build: Callable[[], Tensor]) -> Tensor:
        """`build()`, remembered where no gradient flows and nothing is being traced."""
        sources = list(self.parameters())
        traced = torch.compiler.is_compiling() or any(s.is_meta or s.is_inference() for s in sources)
        if traced or (torch.is_grad_enabled() and any(s.requires_grad for s in sources)):
            return build()
        stamp = [(s.data_ptr(), s._version, s.dtype, s.device) for s in sources]
        if key not in self._kept or self._kept[key][0] != stamp:
            with torch.inference_mode(False):  # what is kept may be used in a graph later
                if len(self._kept) > 16:
                    self._kept.clear()
                self._kept[key] = (stamp, build().detach())
        return self._kept[key][1]

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def train(self, mode: bool = True) -> PositionPart:
        self._kept.clear()  # weights may have been changed behind autograd's back
        return super().train(mode)


class Positions(PositionPart):
    """Positions of kind "none": nothing is known. Other kinds override where they act.

    `forward` makes the tokens, `place` says what attention gets, `in_block` makes a bias for each block.
    """

    mergeable = True  # nothing happens after `forward`, so that the encoder may merge or drop tokens

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()

    def forward(self, prefix: Tensor, patches: Tensor, grid: Size) -> Tensor:
        """prefix P D, patches B N D -> tokens B T D."""
        return torch.cat([prefix.expand(patches.shape[0], -1, -1), patches], dim=1)

    def place(self, grid: Size, tokens: Tensor) -> Place:
        """What the blocks are told about tokens on this grid."""
        return Place(grid)

    @classmethod
    def in_block(cls, config: ViTConfig) -> Part | None:
        """A part of each block that maps a grid to a bias H T T on its attention scores."""
        return None

    def vectors(self, grid: Size) -> Tensor | None:
        """N D: what tells each patch position from the others, row by row; None when no vector does."""
        return None

    @classmethod
    def resize(cls, tensors: dict[str, Tensor], old: ViTConfig, new: ViTConfig) -> bool:
        """Bring the tensors of a whole model from the grid of `old` to that of `new`; False: nothing to do."""
        return False
