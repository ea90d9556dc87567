"""The words a configuration may use, and the rule of each. No torch.

What a word computes stands under the same name in a table beside its code: POSITIONS and RESIZES of `positions.py`,
ACTIVATIONS of `encoder.py`, POOLINGS of `head.py`, NORMS of `norms.py`, BLOCKS of `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NamedTuple

if TYPE_CHECKING:
    from vitkit.model.config import ViTConfig


def rotated_pairs(config: ViTConfig) -> str:
    each = config.attention_width // config.heads
    pairs = "two rotated pairs, one for rows and one for columns"
    return f"needs width / heads = {each} to be a multiple of 4: {pairs}" if each % 4 else ""


def _branches(config: ViTConfig) -> str:
    several = f"has one branch, not branches={config.branches}"
    if config.branches > 1 and config.block != "pre-norm":
        return f"{several}; that goes with block='pre-norm'"
    by_head = "relative" in config.positions or (config.rotary is not None and config.rotary.kind == "mixed")
    return (
        f"with positions by head (relative ones, mixed rotary ones) {several}"
        if config.branches > 1 and by_head
        else ""
    )


POSITIONS: dict[str, Callable[[ViTConfig], str]] = {  # what a configuration lacks for it, or ""
    "none": lambda config: "",
    "learned": lambda config: "",
    "learned-2d": lambda config: f"needs width={config.width} to be even" if config.width % 2 else "",
    "relative": lambda config: "",
    "relative-shared": lambda config: "",
    "relative-mlp": lambda config: "",
    "relative-mlp-shared": lambda config: "",
    "learned+relative": lambda config: "",
    "learned+relative-shared": lambda config: "",
    "sincos-2d": lambda config: (
        f"needs width={config.width} to be a multiple of 4, at least 8" if config.width % 4 or config.width < 8 else ""
    ),
    "rope-2d": rotated_pairs,
}
RESIZES = ["official", "official-exact", "timm", "timm-npz", "huggingface", "torchvision", "dinov2", "siglip2"]
TURNABLE = ["none", "learned", "learned-2d", "sincos-2d"]  # positions that rotary ones may come on top of
ACTIVATIONS = ["gelu", "gelu-tanh", "quick-gelu", "swiglu", "relu", "silu"]
NORMS = ["layernorm", "rmsnorm"]
BLOCKS: dict[str, Callable[[ViTConfig], str]] = {  # what a configuration lacks for it, or ""
    "pre-norm": _branches,
    "post-norm": _branches,
    "parallel": _branches,
}


class Pooling(NamedTuple):
    class_token: bool  # whether it needs one
    widths: int = 1  # how many states stand side by side in the pooled one
    distillation: bool = False  # whether a distillation token can be read beside it


POOLINGS = {
    "cls": Pooling(class_token=True, distillation=True),
    "mean": Pooling(class_token=False),
    "mean-all": Pooling(class_token=False),
    "mean-prefix": Pooling(class_token=True),
    "cls+mean": Pooling(class_token=True, widths=2),
    "map": Pooling(class_token=False),
}

PositionsWord = Annotated[str, POSITIONS]
ResizeWord = Annotated[str, RESIZES]
ActivationWord = Annotated[str, ACTIVATIONS]
PoolingWord = Annotated[str, POOLINGS]
NormWord = Annotated[str, NORMS]
BlockWord = Annotated[str, BLOCKS]

# Fields in which published variants differ from the paper's model; dropout is not among them.
VARIANTS = ["patch_bias", "patch_norms", "indivisible", "rotary", "block", "branches", "norm", "head_width", "key_bias"]
VARIANTS += ["out_bias", "mlp_bias", "attention_out", "score_scale", "qk_norm", "attention_norm", "mlp_norm"]
VARIANTS += ["map_heads", "map_mlp_width", "map_prefix", "final_norm", "pre_logits_activation", "unit_length"]
