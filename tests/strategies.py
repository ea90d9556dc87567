"""Hypothesis strategies shared by tests: any legal small configuration."""

from typing import Any

from hypothesis import strategies as st

from vitkit.model.config import ConvStemConfig, Preprocessing, StemConfig, ViTConfig


@st.composite
def configs(draw: st.DrawFn, **fixed: Any) -> ViTConfig:
    """A legal ViTConfig, small enough to run forward and backward in milliseconds."""
    stems = [None, None, StemConfig((1, 1), 8, "small"), StemConfig((), 8, "imagenet", "timm"), ConvStemConfig((4, 8))]
    stem = draw(st.sampled_from(stems))
    stride = stem.stride if stem else 1
    patch = tuple(stride * draw(st.integers(1, 3)) for _ in range(2))
    grid = tuple(draw(st.integers(1, 4)) for _ in range(2))
    heads = draw(st.integers(1, 3))
    class_token = draw(st.booleans())
    pooling = draw(st.sampled_from(["cls", "mean", "cls+mean", "map"] if class_token else ["mean", "map"]))
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
        "positions": draw(st.sampled_from(["none", "learned", "learned-2d", "relative", "sincos-2d", "rope-2d"])),
        "position_resize": draw(
            st.sampled_from(["official", "timm", "timm-npz", "huggingface", "torchvision", "dinov2"])
        ),
        "positioned_prefix": draw(st.sampled_from(["all", "class", "none"])),
        "class_token": class_token,
        "distillation_token": pooling == "cls" and draw(st.booleans()),
        "registers": draw(st.integers(0, 2)),
        "pre_norm": draw(st.booleans()),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-12])),
        "activation": draw(st.sampled_from(["gelu", "gelu-tanh", "quick-gelu", "swiglu"])),
        "qkv_bias": draw(st.booleans()),
        "layer_scale": draw(st.sampled_from([None, 1e-5, 1.0])),
        "dropout": draw(st.sampled_from([0.0, 0.3])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.3])),
        "stochastic_depth": draw(st.sampled_from([0.0, 0.3])),
        "pooling": pooling,
        "norm_after_pooling": draw(st.booleans()),
        "preprocessing": Preprocessing(mean=(0.4,) * draw(st.sampled_from([1, channels]))),
    }
    if extra:
        values[extra] = draw(st.integers(1, 12))
    return ViTConfig(**(values | fixed))
