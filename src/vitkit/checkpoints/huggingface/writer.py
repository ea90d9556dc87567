"""vitkit -> a folder of Hugging Face, as the first kind that holds the model.

What is written is read back before it is kept: the kind that gives the same configuration again is the right one.
Names are the ones on disk, which transformers has kept since its first ViT.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from torch import Tensor

from vitkit.checkpoints import writing
from vitkit.checkpoints.family import Checkpoint, Fields, Opened, Table, Written
from vitkit.checkpoints.huggingface.kind import Kind, config_json
from vitkit.checkpoints.huggingface.processor import processor_json
from vitkit.checkpoints.huggingface.reader import HEADS, KINDS, OUTPUTS, read
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import WITH_LEADING_AXIS, LazyTensors, NameMap, split
from vitkit.errors import CheckpointError
from vitkit.model.base import Outputs
from vitkit.model.config import AnyConfig, ViTConfig

# What the format cannot say and results in use do not depend on, or a note tells.
_NOT_KEPT = {"dropout", "attention_dropout", "embedding_dropout", "mlp_dropout", "stochastic_depth"}
_NOT_KEPT |= {"patch_embedding", "preprocessing", "position_resize"}
_SQUARE = "(not square)"
_UNEVEN: defaultdict[str, tuple[str, ...]] = defaultdict(tuple, yolos=("image_size",))  # what need not be square
_UNEVEN |= dict.fromkeys(("vit", "deit", "ijepa", "dinov3_vit"), ("image_size", "patch_size"))


def write(checkpoint: Checkpoint) -> Written:
    """A classifier that the kind's classes lack stands beside a base model, and a note says so."""
    config, tensors = writing.vit_of(checkpoint, "Hugging Face")
    tried: list[tuple[str, list[str]]] = []
    unnamed: list[tuple[str, list[str]]] = []  # where a class has no place for a tensor: less near than any of `tried`
    for kind, with_head in _candidates(config):
        try:
            written = _as_kind(config, dict(tensors), checkpoint.outputs, kind, with_head)
            found = read(_opened(written), ModelOptions()).config
            differs = [
                f"{name}={getattr(config, name)!r}" for name in _kept() if getattr(config, name) != getattr(found, name)
            ]
            differs += _not_square(config, kind)
        except (CheckpointError, KeyError) as e:
            unnamed.append((kind.type, [str(e)]))
            continue
        if not differs:
            meant = {"position_resize": getattr(found, "position_resize", "")}
            return replace(written, notes=[*written.notes, *writing.not_kept(config, "Hugging Face", meant)])
        tried.append((kind.type, differs))
    kind_name, differs = min(tried or unnamed or [("", ["such parts"])], key=_distance)
    near = f" (the nearest class is {kind_name}'s)" if kind_name else ""
    raise CheckpointError(
        f"Hugging Face cannot hold a model with {', '.join(differs)}{near}; use --to native, or "
        "--to huggingface_code, which brings its own code"
    )


def _not_square(config: ViTConfig, kind: Kind) -> list[str]:
    """Most classes of transformers take one number for both sides, or resize a table that they think is square."""
    sizes = {name: getattr(config, name) for name in ("image_size", "patch_size") if name not in _UNEVEN[kind.type]}
    return [f"{name}={size} {_SQUARE}" for name, size in sizes.items() if size[0] != size[1]]


def _distance(tried: tuple[str, list[str]]) -> int:
    """Of a class to the model: sides are the least of it."""
    return sum(not difference.endswith(_SQUARE) for difference in tried[1])


def _kept() -> list[str]:
    return [f.name for f in fields(ViTConfig) if f.name not in _NOT_KEPT]


def _has_tokens(kind: Kind, config: ViTConfig) -> bool:
    """Maps of names are shared, so that a name does not show whether the class has such a token or layer."""
    registers = config.registers == 0 or kind.type in ("deit", "dinov2_with_registers", "dinov3_vit", "yolos", "pixio")
    pooler = config.pre_logits == 0 or kind.type in ("vit", "deit", "yolos")
    class_token = config.class_token != kind.type.startswith(("ijepa", "siglip", "aimv2"))
    return registers and pooler and class_token and (not config.distillation_token or kind.type == "deit")


def _candidates(config: ViTConfig) -> Iterator[tuple[Kind, bool]]:
    kinds = [kind for kind in KINDS if kind.holds(config) and _has_tokens(kind, config)]
    if config.classes:
        yield from ((kind, True) for kind in kinds if kind.classifier)
    yield from ((kind, False) for kind in kinds)


def _opened(written: Written) -> Opened:
    tables = {name: Table(value, name) for name, value in written.beside.items()}
    return Opened(LazyTensors.of(written.tensors), Path("model.safetensors"), beside=tables)


def _as_kind(config: ViTConfig, tensors: dict[str, Tensor], outputs: Outputs, kind: Kind, with_head: bool) -> Written:
    gated = config.activation == "swiglu" and any(".mlp.gate." in ours for _, ours in kind.names.rows)
    named = NameMap(*((f"+{theirs}", ours) for theirs, ours in kind.names.rows))  # marked where a row knows the name
    foreign, prefix = {}, kind.prefix if with_head or kind.architecture(config) != kind.base else ""
    for name, tensor in kind.pack(split(tensors, gated), config).items():
        if not (marked := named.theirs(name)).startswith("+"):
            raise CheckpointError(f"the tensor {name!r}")
        theirs = marked[1:]
        shaped = _on_disk(tensor, kind.axes.get(name, 3)) if name in WITH_LEADING_AXIS else tensor
        foreign[theirs if re.fullmatch(HEADS, theirs) else f"{prefix}{theirs}"] = shaped
    apart = f"{kind.base} has no classifier: classifier.* is written beside it, for {_classified(config, kind)}"
    beside = {"config.json": _config_json(config, outputs, kind, with_head)}
    beside["preprocessor_config.json"] = processor_json(config.preprocessing, config.channels)
    return Written(foreign, [apart] if config.classes and not with_head else [], beside)


def _on_disk(tensor: Tensor, axes: int) -> Tensor:
    """N D -> with as many axes as the kind keeps tokens and tables in."""
    return tensor.flatten() if axes == 1 else tensor.reshape((1,) * (axes - 2) + tuple(tensor.shape))


def _classified(config: ViTConfig, kind: Kind) -> str:
    if kind.type == "internvl_vision":
        return "the first token of its last_hidden_state"
    mean = kind.type == "aimv2_vision_model" and config.pooling == "mean"
    return "the mean of its last_hidden_state" if mean else "its pooled output"


def _config_json(config: ViTConfig, outputs: Outputs, kind: Kind, with_head: bool) -> Fields:
    about = {"model_type": kind.type, **config_json(config), **kind.about(config)}
    tower = kind.type.removesuffix("_vision_model")
    if with_head and tower != kind.type:  # a classifier's config.json is that of the model with a text tower
        about = {"model_type": tower, "vision_config": about}
    about["architectures"] = [kind.classifier if with_head else kind.architecture(config)]
    return about | labels_json(config, outputs)


def labels_json(config: AnyConfig, outputs: Outputs) -> Fields:
    if not config.classes:
        return {}
    names = outputs.names or [f"LABEL_{i}" for i in range(config.classes)]
    about: Fields = {"id2label": {str(i): name for i, name in enumerate(names)}}
    about["label2id"] = {name: i for i, name in enumerate(names)}
    return about if outputs.kind == "classes" else about | {"problem_type": writing.theirs(OUTPUTS, outputs.kind)}
