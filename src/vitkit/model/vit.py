"""The Vision Transformer, assembled in the order an image meets its parts.

    images -> (stem) -> patches -> class token, registers -> positions -> encoder -> norm -> head -> logits

Shapes: B images, C channels, H x W pixels, P prefix tokens, N patches on a grid (h, w), D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.attention import OnWeights
from vitkit.model.base import Layers, VisionModel, layer_numbers
from vitkit.model.blocks import block_kind
from vitkit.model.config import Size, ViTConfig
from vitkit.model.encoder import Encoder
from vitkit.model.head import Head
from vitkit.model.norms import build_norm
from vitkit.model.patches import build_patches, to_tileable
from vitkit.model.positions import POSITIONS, Place
from vitkit.model.rotary import Rotary
from vitkit.model.stem import build_stem

OnPatches = Callable[[Tensor], Tensor]


class ViT(VisionModel):
    """`model(images)` gives logits; `model.tokens(images)` the state of every token.

    Images of any size that the patches divide are taken: positions are resized on the fly. With
    `pad=True` other sizes are filled up with zeros at the bottom and the right.
    """

    config: ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = build_stem(config.stem, config.channels) if config.stem else None
        self.patches = build_patches(config)
        self.class_token = nn.Parameter(torch.zeros(1, config.width)) if config.class_token else None
        self.distillation_token = nn.Parameter(torch.empty(1, config.width)) if config.distillation_token else None
        self.registers = nn.Parameter(torch.empty(config.registers, config.width)) if config.registers else None
        self.positions = POSITIONS[config.positions](config)
        self.rotary = Rotary.of(config)
        self.mergeable = self.positions.mergeable and self.rotary is None
        self.pre_norm = build_norm(config) if config.pre_norm else None
        self.encoder = Encoder(config, block_kind(config))
        self.norm = build_norm(config) if config.final_norm and not config.norm_after_pooling else None
        self.head = Head(config)

    def forward(self, images: Tensor, on_weights: OnWeights = None, layers: Layers = None, pad: bool = False) -> Tensor:
        """B C H W -> logits B classes, or the pooled representation when classes=0.

        `on_weights` is called with the attention weights (B heads tokens tokens) of each of `layers`
        (all when None; negative counts from the end), in order of depth. All other layers stay fused.
        """
        return self.head(self.encode(*self.embedded(images, pad), on_weights, layers, self.head.tokens_read))

    def tokens(self, images: Tensor, on_weights: OnWeights = None, layers: Layers = None, pad: bool = False) -> Tensor:
        """B C H W -> B (P + N) D after the final norm: class, distillation, registers, then patches row by row."""
        return self.encode(*self.embedded(images, pad), on_weights, layers)

    def pooled(self, images: Tensor, pad: bool = False) -> Tensor:
        return self.head.pooled(self.encode(*self.embedded(images, pad), only=self.head.tokens_read))

    def features(
        self, images: Tensor, layers: Sequence[int] = (-1,), norm: bool = False, grid: bool = False, pad: bool = False
    ) -> list[Tensor]:
        x, place = self.embedded(images, pad)
        wanted = layer_numbers(layers, self.config.depth)
        kept = dict.fromkeys(wanted, x)
        if kept:
            self.encode(x, place, kept=kept)
        states = [self.norm(kept[i]) if norm and self.norm is not None else kept[i] for i in wanted]
        return [s[:, self.config.prefix_tokens :].mT.unflatten(-1, place.grid) for s in states] if grid else states

    def embedded(self, images: Tensor, pad: bool = False, on_patches: OnPatches | None = None) -> tuple[Tensor, Place]:
        """B C H W -> what the first block sees, B (P + N) D, and where the tokens are.

        `on_patches` may change the patch embeddings, B N D, before positions are added: to hide some of them.
        """
        images = to_tileable(images, self.config, pad)  # B C H W
        features = images if self.stem is None else self.stem(images)
        patches, grid = self.patches(features)  # B N D
        patches = patches if on_patches is None else on_patches(patches)
        x = self.positions(self.prefix(), patches, grid)  # B (P + N) D
        x = F.dropout(x, self.config.embedding_rate, self.training)
        x = x if self.pre_norm is None else self.pre_norm(x)
        return x, self.place(grid, x)

    def place(self, grid: Size, x: Tensor) -> Place:
        """Where tokens B (P + N) D of this grid are, for the blocks."""
        place = self.positions.place(grid, x)
        return place if self.rotary is None else self.rotary.turn(place, x)

    def prefix(self) -> Tensor:
        """P D: class, distillation and register tokens."""
        given: list[Tensor] = [t for t in (self.class_token, self.distillation_token, self.registers) if t is not None]
        return torch.cat(given) if given else self.patches.weight.new_empty(0, self.config.width)

    def encode(
        self,
        x: Tensor,
        place: Place,
        on_weights: OnWeights = None,
        layers: Layers = None,
        only: int | None = None,
        kept: dict[int, Tensor] | None = None,
        start: int = 0,
    ) -> Tensor:
        """What `embedded` gives -> B (P + N) D after the final norm, or B only D.

        `kept` and `start` are as in `Encoder.forward`.
        """
        looked_at = () if on_weights is None else layer_numbers(layers, self.config.depth)
        merge, recompute = (None, self.gradient_checkpointing) if self.training else (self.merge_plan, False)
        x = self.encoder(x, place, on_weights, looked_at, only, kept, merge, recompute, start)
        return x if self.norm is None or kept is not None else self.norm(x)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.encoder.blocks)

    @property
    def classifiers(self) -> list[nn.Linear]:
        return [part for part in (self.head.classifier, self.head.distilled) if part is not None]

    def init_weights(self) -> None:
        """As in the official code: class token and head zero, positions N(0, 0.02), linear maps Xavier-uniform."""
        for part in filter(None, (self.stem, self.patches)):
            part.init_weights()
        for token in (self.distillation_token, self.registers):
            if token is not None:
                nn.init.normal_(token, std=0.02)
        for part in filter(None, (self.positions, self.rotary, self.encoder, self.head)):
            part.init_weights()
