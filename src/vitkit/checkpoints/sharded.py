"""Sharded checkpoints, read without trust.

torch.distributed.checkpoint keeps `.metadata` as a pickle, and small values as pickles too. Here the first is
unpickled with a table of the few names that it needs, the others with `weights_only`; parts are read from the
folder itself alone.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem

from vitkit.errors import CheckpointError

_PATHS = ("PosixPath", "WindowsPath")  # where it was written, which is not looked at
_NAMES = {
    metadata: (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    filesystem: ("_StorageInfo", "_StoragePrefix"),
    torch: ("Size",),
    torch.serialization: ("_get_layout",),
}
_ALLOWED = {(module.__name__, name): getattr(module, name) for module, names in _NAMES.items() for name in names}
_ALLOWED |= {("torch", str(t).removeprefix("torch.")): t for t in vars(torch).values() if isinstance(t, torch.dtype)}
_ALLOWED |= {(m, k): (lambda *parts: "/".join(parts)) for m in ("pathlib", "pathlib._local") for k in _PATHS}


def outlines(folder: Path) -> dict[str, torch.Tensor]:
    """Names, shapes and dtypes of all tensors, put together from their parts: on the meta device."""
    found = Reader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: torch.empty(about.size, dtype=about.properties.dtype, device="meta")
        for name, about in found.items()
        if isinstance(about, metadata.TensorStorageMetadata)
    }


def load(tensors: dict[str, Any], folder: Path, alone: bool = False) -> None:
    """Fill `tensors` from the checkpoint in a folder; every process reads its part, or one of them all (`alone`)."""
    reader = Reader(str(folder))
    reader.read_metadata()  # refused here already, where the error is not yet wrapped
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
            dcp.load(tensors, storage_reader=reader, planner=Planner(), no_dist=alone)
    except CheckpointException as e:
        (cause, _), *_ = e.failures.values()
        if isinstance(cause, CheckpointError):
            raise cause from e
        raise RuntimeError(f"{type(cause).__name__}: {cause}") from e


def save(tensors: dict[str, Any], folder: Path) -> None:
    """Every process writes its part. What the disk of any of them says is raised in all of them."""
    try:
        dcp.save(tensors, checkpoint_id=str(folder))
    except CheckpointException as e:
        said = [cause for cause, _ in e.failures.values() if isinstance(cause, OSError)]
        if not said:
            raise
        raise OSError(said[0].errno, f"{said[0].strerror or said[0]}, process {min(e.failures)}") from e


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise CheckpointError(f"it holds {module}.{name}, which no checkpoint needs; it may come from an attacker")
        return _ALLOWED[module, name]


class Reader(FileSystemReader):
    """The parts of one checkpoint, from its own folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        found = unpickled((Path(self.path) / ".metadata").read_bytes())
        for info in found.storage_data.values():
            if Path(info.relative_path).name != info.relative_path or info.transform_descriptors:
                raise CheckpointError(f"its part {info.relative_path!r} is not a file of this checkpoint")
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def unpickled(content: bytes) -> metadata.Metadata:
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise TypeError(f"it is a {type(found).__name__}")
        return found
    except (CheckpointError, MemoryError):
        raise
    except Exception as e:  # a damaged pickle can raise anything
        raise CheckpointError(f"its .metadata is damaged ({type(e).__name__}: {e})") from e


class Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As PyTorch does, but numbers and words only."""
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as e:
            raise CheckpointError(f"its value {name!r} holds Python objects, which are not read") from e
        set_element(self.original_state_dict, self.mappings[name], found)
