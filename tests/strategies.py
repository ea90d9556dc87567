"""Hypothesis strategies shared by tests: any legal small configuration."""

from typing import Any

from hypothesis import strategies as st

from vitkit.model.config import (
    ACTIVATIONS,
    NORMS,
    POSITIONS,
    RESIZES,
    ConvStemConfig,
    Preprocessing,
    RotaryConfig,
    StemConfig,
    ViTConfig,
    WhitenedStemConfig,
)
from vitkit.model.words import TURNABLE

ROTARY = [None, None, RotaryConfig(), RotaryConfig(kind="box", base=100.0, half=True)]
ROTARY += [RotaryConfig(kind="mixed", axes="xy", base=10.0), RotaryConfig(pixels=True, reference=(2, 3))]


@st.composite
def variants(draw: st.DrawFn) -> dict[str, Any]:
    """Some fields in which published variants differ from the paper's model."""
    flags = "key_bias out_bias mlp_bias patch_bias qk_norm attention_norm mlp_norm map_prefix"
    values: dict[str, Any] = {name: draw(st.booleans()) for name in flags.split()}
    block, branches = draw(st.sampled_from([("pre-norm", 1), ("pre-norm", 2), ("post-norm", 1), ("parallel", 1)]))
    return values | {
        "block": block,
        "branches": branches,
        "norm": draw(st.sampled_from(NORMS)),
        "head_width": draw(st.sampled_from([0, 4])),
        "score_scale": draw(st.sampled_from(["head", "width"])),
        "patch_norms": draw(st.sampled_from([(), ("before",), ("before", "after")])),
        "map_heads": draw(st.sampled_from([0, 2])),
        "pre_logits_activation": draw(st.sampled_from(["tanh", "gelu"])),
    }


@st.composite
def configs(draw: st.DrawFn, **fixed: Any) -> ViTConfig:
    """A legal ViTConfig, small enough to run forward and backward in milliseconds."""
    stems = [None, None, StemConfig((1, 1), 8, "small"), StemConfig((), 8, "imagenet", "timm"), ConvStemConfig((4, 8))]
    stems.append(WhitenedStemConfig((4, 8), (1, 3), 6))
    stem = draw(st.sampled_from(stems))
    stride = stem.stride if stem else 1
    patch = tuple(stride * draw(st.integers(1, 3)) for _ in range(2))
    grid = tuple(draw(st.integers(2 if stem else 1, 4)) for _ in range(2))  # toy stems cannot norm a single position
    heads = draw(st.integers(1, 3))
    class_token = draw(st.booleans())
    pooling = draw(st.sampled_from(["cls", "mean", "mean-all", "cls+mean", "map"] if class_token else ["mean", "map"]))
    extra = draw(st.sampled_from(["", "pre_logits", "projection"]))
    channels = draw(st.integers(1, 4))
    values: dict[str, Any] = {
        "image_size": (patch[0] * grid[0], patch[1] * grid[1]),
        "patch_size": patch,
        "channels": channels,
        "width": heads * 8,
        "depth": draw(st.integers(1, 3)),
        "heads": heads,
        "mlp_width": draw(st.integers(1, 24)),
        "classes": draw(st.integers(0, 5)),
        "stem": stem,
        "patch_embedding": draw(st.sampled_from(["conv", "linear"])),
        "positions": draw(st.sampled_from(sorted(POSITIONS))),
        "position_resize": draw(st.sampled_from(RESIZES)),
        "positioned_prefix": draw(st.sampled_from(["all", "class", "none"])),
        "class_token": class_token,
        "distillation_token": pooling == "cls" and draw(st.booleans()),
        "registers": draw(st.integers(0, 2)),
        "pre_norm": draw(st.booleans()),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-12])),
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "qkv_bias": draw(st.booleans()),
        "layer_scale": draw(st.sampled_from([None, 1e-5, 1.0])),
        "dropout": draw(st.sampled_from([0.0, 0.3])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.3])),
        "stochastic_depth": draw(st.sampled_from([0.0, 0.3])),
        "pooling": pooling,
        "norm_after_pooling": draw(st.booleans()),
        "preprocessing": Preprocessing(mean=(0.4,) * draw(st.sampled_from([1, channels]))),
    }
    values |= draw(variants())
    if values["branches"] > 1 or values["block"] != "pre-norm":
        values["positions"] = "learned"
    if extra:
        values[extra] = draw(st.integers(1, 12))
    values |= fixed
    if values["positions"] in TURNABLE:
        values["rotary"] = draw(st.sampled_from(ROTARY[:4] if values["branches"] > 1 else ROTARY))
    return ViTConfig(**values)


PUBLISHED: dict[str, dict[str, Any]] = {  # what published variants add, in few models that together have all of it
    "sub-norms": {
        "norm": "rmsnorm",
        "qk_norm": True,
        "attention_norm": True,
        "mlp_norm": True,
        "activation": "swiglu",
        "patch_norms": ("before", "after"),
    },
    "few biases": {
        "key_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        "patch_bias": False,
        "final_norm": False,
        "activation": "relu",
    },
    "post-norm": {"block": "post-norm", "pooling": "mean-all", "layer_scale": 0.3},
    "parallel": {"block": "parallel", "qk_norm": True, "qkv_bias": False, "norm": "rmsnorm", "layer_scale": 0.3},
    "branches": {"branches": 2, "layer_scale": 0.5, "key_bias": False},
    "wide heads": {
        "head_width": 24,
        "score_scale": "width",
        "pooling": "map",
        "map_heads": 8,
        "map_mlp_width": 16,
        "map_prefix": False,
        "activation": "silu",
    },
    "one head": {"heads": 1, "attention_out": False, "pre_logits": 12, "pre_logits_activation": "gelu"},
    "cut": {"image_size": (35, 38), "indivisible": "cut", "registers": 2},
}
