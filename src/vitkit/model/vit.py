"""The Vision Transformer, assembled in the order an image meets its parts.

    images -> (stem) -> patches -> class token, registers -> positions -> encoder -> norm -> head -> logits

Shapes: B images, C channels, H x W pixels, P prefix tokens, N patches on a grid (h, w), D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.model.attention import OnWeights
from vitkit.model.config import ViTConfig
from vitkit.model.encoder import Encoder
from vitkit.model.head import Head
from vitkit.model.patches import PatchEmbedding, to_tileable
from vitkit.model.positions import AddedPositions
from vitkit.model.stem import build_stem


class ViT(nn.Module):
    """`model(images)` gives logits; `model.tokens(images)` the state of every token.

    Images of any size that the patches divide are taken: positions are resized on the fly. With
    `pad=True` other sizes are filled up with zeros at the bottom and the right.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.stem = build_stem(config.stem, config.channels) if config.stem else None
        stride, channels = (config.stem.stride, config.stem.out_channels) if config.stem else (1, config.channels)
        patch = (config.patch_size[0] // stride, config.patch_size[1] // stride)
        self.patches = PatchEmbedding(channels, patch, width, config.patch_embedding)
        self.class_token = nn.Parameter(torch.empty(1, width)) if config.class_token else None
        self.distillation_token = nn.Parameter(torch.empty(1, width)) if config.distillation_token else None
        self.registers = nn.Parameter(torch.empty(config.registers, width)) if config.registers else None
        self.positions = AddedPositions(config)
        self.pre_norm = nn.LayerNorm(width, config.norm_eps) if config.pre_norm else None
        self.encoder = Encoder(config)
        self.norm = None if config.norm_after_pooling else nn.LayerNorm(width, config.norm_eps)
        self.head = Head(config)
        self.init_weights()

    def forward(
        self,
        images: Tensor,
        on_weights: OnWeights | None = None,
        layers: Sequence[int] | None = None,
        pad: bool = False,
    ) -> Tensor:
        """B C H W -> logits B classes, or the pooled representation when classes=0.

        `on_weights` is called with the attention weights (B heads tokens tokens) of each of `layers`
        (all when None; negative counts from the end), in order of depth. All other layers stay fused.
        """
        return self.head(self._states(images, on_weights, layers, pad, self.head.tokens_read))

    def tokens(
        self,
        images: Tensor,
        on_weights: OnWeights | None = None,
        layers: Sequence[int] | None = None,
        pad: bool = False,
    ) -> Tensor:
        """B C H W -> B (P + N) D after the final norm: class, distillation, registers, then patches row by row."""
        return self._states(images, on_weights, layers, pad, only=None)

    def embed(self, images: Tensor, pad: bool = False) -> tuple[Tensor, tuple[int, int]]:
        """B C H W -> what the first block sees, B (P + N) D, and the grid of patches."""
        images = to_tileable(images, self.config.patch_size, self.config.channels, pad)  # B C H W
        features = images if self.stem is None else self.stem(images)
        patches, grid = self.patches(features)  # B N D
        x = self.positions(self.prefix(), patches, grid)  # B (P + N) D
        x = F.dropout(x, self.config.dropout, self.training)
        return (x if self.pre_norm is None else self.pre_norm(x)), grid

    def prefix(self) -> Tensor:
        """P D: class, distillation and register tokens."""
        given: list[Tensor] = [t for t in (self.class_token, self.distillation_token, self.registers) if t is not None]
        return torch.cat(given) if given else self.patches.bias.new_empty(0, self.config.width)

    def _states(
        self,
        images: Tensor,
        on_weights: OnWeights | None,
        layers: Sequence[int] | None,
        pad: bool,
        only: int | None,
    ) -> Tensor:
        x, grid = self.embed(images, pad)
        x = self.encoder(x, grid, on_weights, layers, only)
        return x if self.norm is None else self.norm(x)

    @property
    def gradient_checkpointing(self) -> bool:
        """Recompute each block in the backward pass: far less memory for about a third more time."""
        return self.encoder.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, wanted: bool) -> None:
        self.encoder.gradient_checkpointing = wanted

    @property
    def merge(self) -> int:
        """Patches that each block merges into others when evaluating (`vitkit.model.merging`); 0: none.

        What comes out has its usual shape: a token's state stands for every patch that was merged into it, and
        `on_weights` sees the attention among all of them.
        """
        return self.encoder.merge

    @merge.setter
    def merge(self, per_block: int) -> None:
        if per_block < 0:
            raise ConfigError(f"merge={per_block} must not be negative; 0 merges nothing")
        if per_block and self.config.positions in ("relative", "rope-2d"):
            raise ConfigError(
                f"tokens cannot be merged with positions={self.config.positions!r}: a merged token has no one place; "
                f"leave merging out for this model"
            )
        self.encoder.merge = per_block

    @torch.no_grad()
    def init_weights(self) -> None:
        """As in the official code: class token and head zero, positions N(0, 0.02), linear maps Xavier-uniform."""
        if self.stem is not None:
            self.stem.init_weights()
        fan_in = self.patches.weight[0].numel()
        nn.init.trunc_normal_(self.patches.weight, std=fan_in**-0.5)  # LeCun normal
        nn.init.zeros_(self.patches.bias)
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)
        for token in (self.distillation_token, self.registers):
            if token is not None:
                nn.init.normal_(token, std=0.02)
        self.positions.init_weights()
        self.encoder.init_weights()
        self.head.init_weights()
