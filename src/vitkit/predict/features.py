"""The representation of a picture: the class token, the mean of the patches, or every patch.

Shapes: B images, P prefix tokens, N patches, D width.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from vitkit.errors import ConfigError, did_you_mean
from vitkit.model.build import Model
from vitkit.model.vit import ViT
from vitkit.predict.job import Part
from vitkit.runtime import Runtime

Kind = Literal["cls", "mean", "tokens"]


class Features(nn.Module):
    """Images -> B D ("cls", "mean") or B N D ("tokens"), after the final norm. Any runtime can run it."""

    def __init__(self, model: Model, kind: str = "") -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.kind = kind or default_kind(model)
        if self.kind not in get_args(Kind):
            hint = did_you_mean(self.kind, get_args(Kind))
            raise ConfigError(f"there are no features {self.kind!r}.{hint} Choose one of: {', '.join(get_args(Kind))}")
        if isinstance(model, ViT):
            if self.kind == "cls" and model.class_token is None:
                raise ConfigError("the model has no class token; take --features mean, or tokens")
        elif self.kind != "mean":
            raise ConfigError("a ResNet has no tokens; take --features mean")

    def forward(self, images: Tensor) -> Tensor:
        if not isinstance(self.model, ViT):
            return self.model.stem(images).mean((-2, -1))  # B D
        tokens = self.model.tokens(images)  # B (P + N) D
        config, norm = self.model.config, self.model.head.norm
        if self.kind == "tokens":
            return tokens[:, config.prefix_tokens :]
        x = tokens[:, 0] if self.kind == "cls" else tokens[:, config.prefix_tokens :].mean(dim=1)
        return norm(x) if norm is not None and config.pooling != "cls+mean" else x


def default_kind(model: Model) -> Kind:
    """What the model's own head reads."""
    return "cls" if isinstance(model, ViT) and model.config.pooling in ("cls", "cls+mean") else "mean"


class Embed:
    """The work of `vitkit embed` on one batch."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.columns: dict[str, type] = {"path": str, "features": list, "error": str}

    def __call__(self, images: Tensor) -> Part:
        features = self.runtime.run(images).numpy()
        return Part([{} for _ in features], features)
