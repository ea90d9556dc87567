"""Tensors and their model: every one in its place, or an error that lists what differs and the likely cause."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import nn

from vitkit.checkpoints.family import Checkpoint
from vitkit.errors import CheckpointError
from vitkit.model.base import VisionModel
from vitkit.model.build import Model, outline
from vitkit.model.config import ViTConfig

SHOWN = 10  # names of tensors in an error
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_fit(checkpoint: Checkpoint) -> Model:
    """The model without memory (on the meta device), if the tensors fit it. Otherwise raise, with all that differs."""
    tensors, config, theirs = checkpoint.tensors, checkpoint.config, checkpoint.in_file
    layers = config.depth if isinstance(config, ViTConfig) else 0
    layers += config.stem.blocks if config.stem else 0
    if layers > len(tensors):  # do not even build what cannot fit
        raise CheckpointError(f"{layers} layers are declared, but there are only {len(tensors)} tensors")
    model = outline(config)
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    other = [name for name in expected if name in found and found[name] != expected[name]]
    dtypes = [name for name in expected if name in found and tensors[name].dtype not in FLOATS]
    problems = {
        "missing": list(map(theirs, missing)),
        "not part of the model": extra,
        "of another shape": [f"{theirs(n)} is {found[n]}, should be {expected[n]}" for n in other],
        "of a dtype that is not read": [f"{theirs(n)} is {tensors[n].dtype}" for n in dtypes],
    }
    lines = []
    for what, items in problems.items():
        if items:
            more = f", and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
            lines.append(f"  {len(items)} {what}: {', '.join(items[:SHOWN])}{more}")
    if lines:
        cause = f"  likely cause: {_likely_cause(missing, extra, other)}"
        raise CheckpointError("\n".join(["the weights do not fit the model", *lines, cause]))
    return model


def _likely_cause(missing: list[str], extra: list[str], other: list[str]) -> str:
    if missing and not extra and not other:
        return "the file is incomplete or was cut down; fetch or save it again"
    if extra and not missing and not other:
        return "a variant of ViT that vitkit does not have, or parts of training in the file; remove those tensors"
    if missing and extra:
        return "tensors were renamed, or this is a variant of ViT that vitkit does not have"
    if other and all(name.startswith("head.") for name in other):
        return "the number of classes was changed in one place only; save the model again"
    return "the file was changed after it was saved, or a stated field (heads, image_size, ...) is wrong"


def check_unchanged(model: VisionModel, checkpoint: Checkpoint) -> None:
    """The model is what its config says, so that a file which holds both can be loaded and computes the same."""
    action = "Build what you want by its config, such as vitkit.load(path, classes=5), or save with torch.save"
    try:
        changes = [f"  {line}" for line in islice(_changes(model, check_fit(checkpoint)), SHOWN)]
    except CheckpointError as e:
        changes = str(e).splitlines()[1:-1]
    if changes:
        why = "the model was changed by hand and is no longer what its config says, so its file could not be loaded:"
        raise CheckpointError("\n".join([why, *changes, f"  {action}"]))


def _changes(model: VisionModel, expected: Model) -> Iterator[str]:
    """Parts that are of another kind, or have other settings: no tensor shows these."""
    parts = dict(model.named_modules())
    for name, plan in list(expected.named_modules())[1:]:
        part = parts[name]
        if type(part) is not type(plan) and type(part).__name__ != f"FSDP{type(plan).__name__}":
            yield f"{name} is {type(part).__name__}, should be {type(plan).__name__}"
        elif different := [k for k, v in _settings(plan).items() if _settings(part).get(k) != v]:
            yield f"{name}.{different[0]} is {getattr(part, different[0], None)!r}, not what the config says"


def _settings(part: nn.Module) -> dict[str, object]:
    """Numbers, words and functions that a part computes with; rates of dropout do not change what it predicts."""
    kept = {k: v for k, v in vars(part).items() if not k.startswith("_") and not ("drop" in k or k == "training")}
    return {k: v for k, v in kept.items() if isinstance(v, (int, float, str)) or callable(v)}
