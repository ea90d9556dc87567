"""vitkit's own file: one .safetensors that says everything about its model.

The header holds the configuration with the preprocessing, the class names and the version of this
format, and a checksum of all that. Nothing in it depends on time, path or machine, so equal models
are equal files. Any program that reads safetensors can read the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitkit.checkpoints.files import read_whole_header
from vitkit.checkpoints.layout import Checkpoint, Tensors, of
from vitkit.checkpoints.write import canonical, replacing, safetensors_header, write_safetensors
from vitkit.errors import CheckpointError, ConfigError
from vitkit.model.build import Model
from vitkit.model.config import AnyConfig, ResNetConfig, ViTConfig

VERSION = 1
_KINDS: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"ViT": ViTConfig, "ResNet": ResNetConfig}


def save(model: Model, path: str | Path, class_names: Iterable[str] | None = None) -> None:
    """Write a model as one file, all or nothing: a crash leaves the old file, or none, but never half of one.

    `class_names` defaults to `model.class_names`, which `load` sets.
    """
    if class_names is None:
        class_names = getattr(model, "class_names", None)
    names = None if class_names is None else tuple(class_names)
    write(Checkpoint(model.config, dict(model.state_dict()), names), Path(path))


def write(checkpoint: Checkpoint, path: Path) -> None:
    config, names = checkpoint.config, checkpoint.class_names
    check_class_names(config, names)
    about = {
        "version": VERSION,
        "kind": "ViT" if isinstance(config, ViTConfig) else "ResNet",
        "config": config.to_dict(),
        "class_names": None if names is None else list(names),
    }
    header = safetensors_header(checkpoint.tensors, {"vitkit": canonical(about)})
    header["__metadata__"]["vitkit_checksum"] = _checksum(header)
    with replacing(path) as file:
        write_safetensors(file, checkpoint.tensors, header)


def _checksum(header: dict[str, Any]) -> str:
    metadata = {k: v for k, v in header["__metadata__"].items() if k != "vitkit_checksum"}
    return hashlib.sha256(canonical({**header, "__metadata__": metadata}).encode()).hexdigest()


def check_class_names(config: AnyConfig, names: tuple[str, ...] | None) -> None:
    if names is None:
        return
    if len(names) != config.classes:
        raise CheckpointError(f"{len(names)} class names were given for a model of {config.classes} classes")
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError("class names must be words (str)")


def is_native(metadata: dict[str, str]) -> bool:
    return "vitkit" in metadata


def read(tensors: Tensors, metadata: dict[str, str], path: Path | None = None) -> Checkpoint:
    """`path`, when given, lets the checksum of the header be compared."""
    if path is not None:
        header = read_whole_header(path)
        if header.get("__metadata__", {}).get("vitkit_checksum") != _checksum(header):
            raise CheckpointError(
                "the header does not match its checksum: the file was damaged or edited; fetch it again"
            )
    try:
        about = json.loads(metadata["vitkit"])
        version, kind, values, names = (about[key] for key in ("version", "kind", "config", "class_names"))
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise CheckpointError(f"the header of a vitkit file is damaged ({e!r}); fetch the file again") from e
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"the file has format version {version}, this vitkit reads {VERSION}: pip install -U vitkit"
        )
    if kind not in _KINDS:
        raise CheckpointError(f"the file holds a {kind!r}, which this vitkit does not know: pip install -U vitkit")
    try:
        config = _KINDS[kind].from_dict(values)
    except ConfigError as e:
        raise CheckpointError(f"the configuration in the header cannot be used: {e}") from e
    class_names = None if names is None else tuple(names)
    check_class_names(config, class_names)
    return Checkpoint(config, dict(of(tensors)), class_names)
