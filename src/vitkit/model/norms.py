"""The norms of a model: a table. A new one is a row here and a word in `words.py`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from vitkit.model.config import ViTConfig


class RMSNorm(nn.RMSNorm):
    """In the precision of its weights: autocast does so for LayerNorm alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


Norm = nn.LayerNorm | RMSNorm
NORMS: dict[str, Callable[[int, float], Norm]] = {"layernorm": nn.LayerNorm, "rmsnorm": RMSNorm}


def build_norm(config: ViTConfig, width: int = 0) -> Norm:
    """A norm of so many channels; 0: of the model's width."""
    return NORMS[config.norm](width or config.width, config.norm_eps)
