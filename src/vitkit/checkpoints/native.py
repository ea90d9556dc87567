"""vitkit's own file: one .safetensors that says everything about its model.

The header holds the configuration with the preprocessing, the class names, what the outputs mean where they
are not classes, the version of this format, and a checksum of all that. Nothing in it depends on time, path
or machine, so equal models are equal files. Any program that reads safetensors can read the tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from vitkit.checkpoints.family import Checkpoint, Fields, Opened, Written
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.strict import check_unchanged
from vitkit.checkpoints.writing import safetensors_header, write_file
from vitkit.errors import CheckpointError
from vitkit.io import canonical, parse_json
from vitkit.model.base import Outputs, VisionModel
from vitkit.model.config import AnyConfig, ResNetConfig, ViTConfig

VERSION = 2  # the newest that is read; files of plain classifiers are still written as 1
KINDS: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"ViT": ViTConfig, "ResNet": ResNetConfig}


def save(model: VisionModel, path: str | Path, class_names: Iterable[str] | None = None) -> None:
    """Write a model as one file, all or nothing. `class_names` defaults to `model.class_names`, which `load` sets.

    A model that was changed by hand, so that its config does not describe it any more, is refused: `load` could not
    take the file.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    outputs = model.outputs if class_names is None else replace(model.outputs, names=tuple(class_names))
    checkpoint = Checkpoint(model.config, model.state_dict(), outputs)
    check_unchanged(model, checkpoint)
    write_file(Path(path), write(checkpoint))


def write(checkpoint: Checkpoint) -> Written:
    config, outputs = checkpoint.config, checkpoint.outputs
    check_outputs(config, outputs)
    names = list(outputs.names) or None
    about: Fields = {"version": 1, "kind": config.kind, "config": config.to_dict(), "class_names": names}
    if outputs.kind != "classes":  # version 1 would take them for classes
        about |= {"version": 2, "outputs": outputs.to_dict()}
    metadata = {"vitkit": canonical(about)}
    metadata["vitkit_checksum"] = _checksum(safetensors_header(checkpoint.tensors, metadata))
    return Written(checkpoint.tensors, header=metadata)


def _checksum(header: Fields) -> str:
    texts = header.get("__metadata__")
    kept = {k: v for k, v in texts.items() if k != "vitkit_checksum"} if isinstance(texts, dict) else {}
    return hashlib.sha256(canonical({**header, "__metadata__": kept}).encode()).hexdigest()


def check_outputs(config: AnyConfig, outputs: Outputs) -> None:
    if not all(isinstance(name, str) for name in outputs.names):
        raise CheckpointError("class names must be words (str)")
    for what in ("names", "mean", "std"):
        count = len(getattr(outputs, what))
        if count not in (0, config.classes):
            what = "class names" if what == "names" else f"values of {what}"
            raise CheckpointError(f"{count} {what} were given for a model of {config.classes} classes")
    if not all(math.isfinite(v) for v in outputs.mean + outputs.std) or not all(v > 0 for v in outputs.std):
        raise CheckpointError("the mean and std of the outputs must be finite numbers, and std above 0")


def matches(opened: Opened) -> bool:
    return "vitkit" in opened.header


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    with opened.path.open("rb") as file:  # the whole header as it is written; `files.py` has accepted it
        header = parse_json(file.read(int.from_bytes(file.read(8), "little")))
    if opened.header.get("vitkit_checksum") != _checksum(header):
        raise CheckpointError("the header does not match its checksum: the file was damaged or edited; fetch it again")
    about = parse_json(opened.header["vitkit"])
    version, kind, names = about["version"], about["kind"], about["class_names"]
    if not isinstance(version, int) or version > VERSION or kind not in KINDS:
        known = f"this vitkit reads version {VERSION} with {' or '.join(KINDS)}"
        raise CheckpointError(f"the file has format version {version} with a {kind}; {known}: pip install -U vitkit")
    config: AnyConfig = KINDS[kind].from_dict(about["config"])
    outputs = Outputs.from_dict(about.get("outputs", {"names": names or ()}))
    check_outputs(config, outputs)
    changes = {name: value for name, value in options.stated.items() if getattr(config, name, None) != value}
    notes = [f"{name}={value!r}: stated by the user, the file says otherwise" for name, value in changes.items()]
    return Checkpoint(config.replace(**changes), opened.tensors, outputs, notes)
