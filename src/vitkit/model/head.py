"""Tokens -> logits: pooling, an optional layer before the classifier, the classifier.

Shapes: B images, P prefix tokens (class first), N patches, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.model.attention import OnWeights, attend
from vitkit.model.config import ViTConfig
from vitkit.model.encoder import MLP


class MapPool(nn.Module):
    """Multi-head attention pooling (big_vision): one learned query looks at all tokens, then an MLP."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.probe = nn.Parameter(torch.empty(1, config.width))
        self.query = nn.Linear(config.width, config.width)
        self.key_value = nn.Linear(config.width, 2 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.mlp = MLP(config.width, config.mlp_width, config.activation, config.dropout)

    def forward(self, tokens: Tensor, on_weights: OnWeights | None = None) -> Tensor:
        """B N D -> B D; `on_weights` is called with the attention of the probe, B H 1 N."""
        q = self.query(self.probe).unflatten(-1, (self.heads, -1)).transpose(0, 1)  # H 1 K
        kv = self.key_value(tokens).unflatten(-1, (2, self.heads, -1))  # B N 2 H K
        k, v = kv.permute(2, 0, 3, 1, 4)  # each B H N K
        x = attend(q.expand(tokens.shape[0], -1, -1, -1), k, v, on_weights=on_weights).flatten(1)  # B D
        x = self.out(x)
        return x + self.mlp(self.norm(x))

    def init_weights(self) -> None:
        key, value = self.key_value.weight.chunk(2)
        for weight in (self.probe, self.query.weight, key, value, self.out.weight):
            nn.init.xavier_uniform_(weight)
        for linear in (self.query, self.key_value, self.out):
            nn.init.zeros_(linear.bias)
        self.mlp.init_weights()


class Head(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        pooled = config.pooled_width
        self.pool = MapPool(config) if config.pooling == "map" else None
        self.norm = nn.LayerNorm(pooled, config.norm_eps) if config.norm_after_pooling else None
        self.pre_logits = nn.Linear(pooled, config.pre_logits) if config.pre_logits else None
        self.projection = nn.Linear(pooled, config.projection, bias=False) if config.projection else None
        self.classifier = nn.Linear(config.head_inputs, config.classes) if config.classes else None
        distilled = config.distillation_token and config.classes
        self.distilled = nn.Linear(config.head_inputs, config.classes) if distilled else None

    @property
    def tokens_read(self) -> int | None:
        """How many leading tokens the head looks at; None: all."""
        return 1 + int(self.config.distillation_token) if self.config.pooling == "cls" else None

    def represent(self, tokens: Tensor, on_weights: OnWeights | None = None) -> Tensor:
        """B (P + N) D -> what the classifier sees; B 2 ... with a distillation token.

        `on_weights` receives the attention of a MAP head; other heads have none.
        """
        pooling, prefix = self.config.pooling, self.config.prefix_tokens
        if self.pool is not None:
            x = self.pool(tokens, on_weights)  # B D
        elif pooling == "mean":
            x = tokens[:, prefix:].mean(dim=1)  # B D
        elif pooling == "cls+mean":
            x = torch.cat([tokens[:, 0], tokens[:, prefix:].mean(dim=1)], dim=-1)  # B 2D
        else:
            x = tokens[:, :2] if self.config.distillation_token else tokens[:, 0]  # B 2 D or B D
        if self.norm is not None:
            x = self.norm(x)
        if self.pre_logits is not None:
            x = torch.tanh(self.pre_logits(x))
        return x if self.projection is None else self.projection(x)

    def both(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the class token and of the distillation token, which DeiT trains apart."""
        if self.classifier is None or self.distilled is None:
            raise ConfigError("two sets of logits need distillation_token=True and classes above 0 in the config")
        x = self.represent(tokens)
        return self.classifier(x[:, 0]), self.distilled(x[:, 1])

    def forward(self, tokens: Tensor, on_weights: OnWeights | None = None) -> Tensor:
        """Logits, or the representation when classes=0. With a distillation token, the mean of the two."""
        if self.distilled is not None:
            ours, theirs = self.both(tokens)
            return (ours + theirs) / 2
        x = self.represent(tokens, on_weights)
        if self.config.distillation_token:
            x = x.mean(dim=1)
        return x if self.classifier is None else self.classifier(x)

    def init_weights(self) -> None:
        if self.pool is not None:
            self.pool.init_weights()
        for linear in (self.pre_logits, self.projection):
            if linear is not None:
                nn.init.trunc_normal_(linear.weight, std=linear.in_features**-0.5)  # LeCun normal
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        for linear in (self.classifier, self.distilled):
            if linear is not None:
                nn.init.zeros_(linear.weight)
                nn.init.zeros_(linear.bias)
