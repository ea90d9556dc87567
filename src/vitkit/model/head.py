"""Tokens -> logits: pooling (a table), an optional layer before the classifier, the classifier.

Shapes: B images, P prefix tokens (class first), N patches, T = P + N tokens, D width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.model.attention import OnWeights, attend
from vitkit.model.base import Part, lecun_normal_
from vitkit.model.config import ViTConfig
from vitkit.model.mlp import MLP
from vitkit.model.norms import build_norm


class Pool(Part):
    """All tokens -> one state; here: that of the class token, beside that of a distillation token."""

    reads_all = False  # whether it looks beyond these
    attends = False  # whether the tokens decide how much each of them counts

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.prefix, self.distilled = config.prefix_tokens, config.distillation_token

    def forward(self, tokens: Tensor, on_weights: OnWeights = None) -> Tensor:
        """B T D -> B D, or B 2 D. `on_weights` receives the attention of a pool that attends, B H 1 T."""
        return tokens[:, :2] if self.distilled else tokens[:, 0]


class MeanPool(Pool):
    """The mean of the patches."""

    reads_all = True

    def forward(self, tokens: Tensor, on_weights: OnWeights = None) -> Tensor:
        return tokens[:, self.prefix :].mean(dim=1)  # B D


class MeanOfAllPool(MeanPool):
    """The mean of all tokens, those before the patches too."""

    def forward(self, tokens: Tensor, on_weights: OnWeights = None) -> Tensor:
        return tokens.mean(dim=1)  # B D


class PrefixPool(MeanPool):
    """The mean of the tokens before the patches, where several are trained as class tokens (Pixio)."""

    def forward(self, tokens: Tensor, on_weights: OnWeights = None) -> Tensor:
        return tokens[:, : self.prefix].mean(dim=1)  # B D


class ClassAndMeanPool(MeanPool):
    """The class token and the mean of the patches, side by side."""

    def forward(self, tokens: Tensor, on_weights: OnWeights = None) -> Tensor:
        return torch.cat([tokens[:, 0], super().forward(tokens)], dim=-1)  # B 2D


class MapPool(Pool):
    """Multi-head attention pooling (big_vision): one learned query looks at all tokens, then an MLP."""

    reads_all = attends = True

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.heads, self.skipped = config.map_heads or config.heads, 0 if config.map_prefix else config.prefix_tokens
        self.probe = nn.Parameter(torch.empty(1, config.width))
        self.query = nn.Linear(config.width, config.width)
        self.key_value = nn.Linear(config.width, 2 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm = build_norm(config)
        self.mlp = MLP(config.width, config.map_mlp_width or config.mlp_width, config.activation, config.mlp_rate)

    def forward(self, tokens: Tensor, on_weights: OnWeights = None) -> Tensor:
        tokens = tokens[:, self.skipped :]
        q = self.query(self.probe).unflatten(-1, (self.heads, -1)).transpose(0, 1)  # H 1 K
        kv = self.key_value(tokens).unflatten(-1, (2, self.heads, -1))  # B T 2 H K
        k, v = kv.permute(2, 0, 3, 1, 4)  # each B H T K
        x = attend(q.expand(tokens.shape[0], -1, -1, -1), k, v, on_weights=on_weights).flatten(1)  # B D
        pooled: Tensor = self.out(x)
        return pooled + self.mlp(self.norm(pooled))

    def init_weights(self) -> None:
        for weight in (self.probe, self.query.weight, *self.key_value.weight.chunk(2), self.out.weight):
            nn.init.xavier_uniform_(weight)
        for linear in (self.query, self.key_value, self.out):
            nn.init.zeros_(linear.bias)
        self.mlp.init_weights()


POOLINGS: dict[str, type[Pool]] = {
    "cls": Pool,
    "mean": MeanPool,
    "mean-all": MeanOfAllPool,
    "mean-prefix": PrefixPool,
    "cls+mean": ClassAndMeanPool,
    "map": MapPool,
}


PRE_LOGITS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": F.gelu}


class Head(Part):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        pooled, inputs, classes = config.pooled_width, config.head_inputs, config.classes
        self.two, self.unit_length = config.distillation_token, config.unit_length
        self.bias_init = config.head_bias_init
        self.pool = POOLINGS[config.pooling](config)
        self.norm = build_norm(config, pooled) if config.norm_after_pooling else None
        self.pre_logits = nn.Linear(pooled, config.pre_logits) if config.pre_logits else None
        self.activation = PRE_LOGITS[config.pre_logits_activation]
        self.projection = nn.Linear(pooled, config.projection, bias=False) if config.projection else None
        self.classifier = nn.Linear(inputs, classes) if classes else None
        self.distilled = nn.Linear(inputs, classes) if classes and self.two else None
        self.tokens_read = None if self.pool.reads_all else 1 + int(self.two)  # leading tokens that it looks at, or all

    def represent(self, tokens: Tensor, on_weights: OnWeights = None) -> Tensor:
        """B T D -> what the classifier sees; B 2 ... with a distillation token."""
        x: Tensor = self.pool(tokens, on_weights)  # B D, B 2D or B 2 D
        if self.norm is not None:
            x = self.norm(x)
        if self.pre_logits is not None:
            x = self.activation(self.pre_logits(x))
        x = x if self.projection is None else self.projection(x)
        return F.normalize(x, dim=-1) if self.unit_length else x

    def pooled(self, tokens: Tensor, on_weights: OnWeights = None) -> Tensor:
        """B T D -> one vector per image: what the classifier sees, the mean of two with a distillation token."""
        x = self.represent(tokens, on_weights)
        return x.mean(dim=1) if self.two else x

    def both(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the class token and of the distillation token, which DeiT trains apart."""
        if self.classifier is None or self.distilled is None:
            raise ConfigError("two sets of logits need distillation_token=True and classes above 0 in the config")
        x = self.represent(tokens)
        return self.classifier(x[:, 0]), self.distilled(x[:, 1])

    def forward(self, tokens: Tensor, on_weights: OnWeights = None) -> Tensor:
        """Logits, or the representation when classes=0. With a distillation token, the mean of the two."""
        if self.distilled is not None:
            ours, theirs = self.both(tokens)
            return (ours + theirs) / 2
        x = self.pooled(tokens, on_weights)
        return x if self.classifier is None else self.classifier(x)

    def init_weights(self) -> None:
        self.pool.init_weights()
        for linear in filter(None, (self.pre_logits, self.projection, self.classifier, self.distilled)):
            for parameter in linear.parameters():
                nn.init.zeros_(parameter)
        for linear in filter(None, (self.classifier, self.distilled)):
            nn.init.constant_(linear.bias, self.bias_init)
        for linear in filter(None, (self.pre_logits, self.projection)):
            lecun_normal_(linear.weight)
