"""What a kind of model on Hugging Face is: the names of its tensors, and what its config.json means.

A `Kind` is a row of a table in the file of its group (`vit.py`, `beit.py`, `clip.py`, `dinov3.py`). Its `fields` turn
config.json into fields of `ViTConfig`, its `about` goes back; what all kinds have in common stands here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitkit.checkpoints import reading, writing
from vitkit.checkpoints.family import Fields, Table
from vitkit.checkpoints.tensors import LazyTensors, NameMap
from vitkit.errors import CheckpointError
from vitkit.model.config import Size, ViTConfig

# What config.json means by leaving a key out; a kind's own `defaults` come first. Held against transformers by
# tests/parity/test_hf_census.py.
DEFAULTS: Fields = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
DEFAULTS |= {"image_size": 224, "patch_size": 16, "num_channels": 3, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}
DEFAULTS |= {"qkv_bias": True}
COMMON = {"hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "heads"}
COMMON |= {"num_channels": "channels", "layer_norm_eps": "norm_eps", "qkv_bias": "qkv_bias"}
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu-tanh", "gelu_new": "gelu-tanh", "quick_gelu": "quick-gelu"}
ACTIVATIONS |= {"relu": "relu", "silu": "silu", "swish": "silu"}
HALF: Fields = {"mean": (0.5,), "std": (0.5,)}


def never(config: ViTConfig) -> bool:
    return False


@dataclass(frozen=True)
class Kind:
    """A row: how one `model_type` is read and, for the configurations that it `holds`, written."""

    type: str
    names: NameMap  # on disk, behind the prefix
    fields: Callable[[LazyTensors, Table], Fields]  # what its config.json means beyond `common`
    base: str  # the class without a classifier
    classifier: str = ""  # the class with one
    prefix: str = ""  # of the tower inside the latter
    about: Callable[[ViTConfig], Fields] = lambda config: {}  # the inverse of `fields`
    defaults: Fields = field(default_factory=dict)
    alias: tuple[str, str] = (r"^layers(?=\.\d+\.)", "encoder.layer")  # names in memory -> names on disk
    left_out: str = r"embeddings\.mask_token"  # tensors that are no part of the ViT
    axes: Mapping[str, int] = field(default_factory=dict)  # of tokens and tables on disk; 3 for the others
    unpack: Callable[[LazyTensors, Table], LazyTensors] = lambda tensors, about: tensors  # where names are not enough
    pack: Callable[[dict[str, Tensor], ViTConfig], dict[str, Tensor]] = lambda tensors, config: tensors  # and back
    holds: Callable[[ViTConfig], bool] = lambda config: True
    statistics: Fields = field(default_factory=lambda: reading.IMAGENET)  # where there is no preprocessor_config.json
    neutral: str = ""  # tensors of ours that the kind has not: identity, ones and zeros stand for them
    projected: str = ""  # the class of a projected embedding

    def architecture(self, config: ViTConfig) -> str:
        return self.projected if config.projection and self.projected else self.base


def has_head(about: Table) -> bool:
    """Whether the class that was saved classifies by itself: else a classifier of ours stands beside a base model."""
    architectures = about.get("architectures")
    saved = str(architectures[0]) if isinstance(architectures, list) and architectures else "ForImageClassification"
    return "ForImageClassification" in saved


def common(tensors: LazyTensors, about: Table) -> Fields:
    """Fields that config.json states in the same way in every kind; the rest is in the shapes."""
    fields = reading.body_of(tensors)[2]
    fields |= {ours: about[theirs] for theirs, ours in COMMON.items()}
    fields |= {"norm": "layernorm", "key_bias": True, "final_norm": True, "patch_norms": (), "layer_scale": None}
    fields |= dict.fromkeys(("patch_bias", "out_bias", "mlp_bias"), True)
    return fields | {
        "patch_size": about.size("patch_size"),
        "activation": ACTIVATIONS[about.one_of("hidden_act", ACTIVATIONS)],
        "position_resize": "huggingface",
        "positioned_prefix": "all",
    }


def image_size(tensors: LazyTensors, about: Table, fields: Fields, notes: list[str]) -> Size:
    """As stated, unless a position table says otherwise."""
    stated, (p, q) = about.size("image_size"), about.size("patch_size")
    if "positions.learned" not in tensors:
        return stated
    prefix = int("class_token" in tensors) + int("distillation_token" in tensors)
    before = {"none": 0, "class": prefix, "all": prefix + tensors.rows("registers")}[str(fields["positioned_prefix"])]
    size, _ = reading.image_size_of(tensors, [before], (p, q), stated)
    if size == (stated[0] // p * p, stated[1] // q * q):
        return stated
    notes.append(f"config.json says {stated[0]}x{stated[1]} pixels, the position table {size[0]}x{size[1]}")
    return size


def config_json(config: ViTConfig) -> Fields:
    """The inverse of `common`."""
    about: Fields = {theirs: getattr(config, ours) for theirs, ours in COMMON.items()}
    about |= {name: writing.one_or_both(getattr(config, name)) for name in ("image_size", "patch_size")}
    about |= {"hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": config.attention_dropout}
    activation = "silu" if config.activation == "swiglu" else writing.theirs(ACTIVATIONS, config.activation)
    return about | {"intermediate_size": config.mlp_width, "hidden_act": activation}


def neutral_value(name: str, like: Tensor) -> Tensor:
    """What makes a layer do nothing: the identity of a query map, ones of a norm, zeros of all else."""
    if name.endswith("query.weight"):
        return torch.eye(len(like), dtype=like.dtype)
    return torch.ones_like(like, device="cpu") if name.endswith("norm.weight") else torch.zeros_like(like, device="cpu")


def refuse(about: Table, **wanted: object) -> None:
    """Stop where config.json has other values than vitkit has layers for."""
    for key, value in wanted.items():
        if about.get(key) != value:
            raise CheckpointError(
                f"not supported: {key}={about.get(key)!r} in config.json; vitkit reads {value!r} only"
            )
