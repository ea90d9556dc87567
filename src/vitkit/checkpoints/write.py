"""Files and folders written all or nothing, and safetensors written the same way every time."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from vitkit.errors import CheckpointError

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def canonical(value: Any) -> str:
    """JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def safetensors_header(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> dict[str, Any]:
    """The header as a table; the tensors follow it widest dtype first, so that each is aligned to its own size."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name in sorted(tensors, key=lambda n: (-tensors[n].element_size(), n)):
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"tensor {name!r} is {tensor.dtype}; a checkpoint holds floating-point weights")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    return header


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor], header: dict[str, Any] | None = None) -> None:
    """Nothing depends on time, path or machine; one tensor at a time is in memory twice at most."""
    header = header or safetensors_header(tensors, {})
    text = canonical(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in header:
        if name != "__metadata__":
            flat = tensors[name].detach().to("cpu").contiguous().view(-1)
            if flat.numel():
                file.write(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which takes the place of `path` when all went well and vanishes otherwise."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as e:
        raise CheckpointError(f"{path} cannot be written ({e.strerror or e}); nothing was changed") from e
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` when all went well and vanishes otherwise."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        beside.mkdir(parents=True)
        yield beside
        if path.is_dir():
            old = beside.with_suffix(".old")
            path.rename(old)
            beside.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(beside, path)
    except OSError as e:
        raise CheckpointError(f"{path} cannot be written ({e.strerror or e}); nothing was changed") from e
    finally:
        shutil.rmtree(beside, ignore_errors=True)
