"""Files of tensors, opened without trust: safetensors, .npz, PyTorch's zip and its old format.

Recognised by content, never by name. Header sizes, numbers of tensors, shapes and declared sizes are
checked before memory is taken; no pickle is executed (`weights_only`); every failure is a
`CheckpointError` that names the file.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from vitkit.checkpoints.layout import LazyTensors
from vitkit.errors import CheckpointError

MAX_HEADER = 32 << 20  # bytes of a safetensors header, or of the pickled part of a PyTorch file
MAX_TENSORS = 100_000
MAX_INFLATION = 64  # times its own size that a compressed file may grow; weights hardly shrink

_SAFETENSORS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SAFETENSORS |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
_SAFETENSORS |= {"U8": torch.uint8, "BOOL": torch.bool}


def kind_of(path: Path) -> str:
    """safetensors, npz, torch, torch-legacy or torchscript, by content."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read ({e.strerror or e}); check the path and its permissions") from e
    if start[:2] == b"PK":
        return _kind_of_zip(path)
    if len(start) > 8 and start[8:9] == b"{":
        return "safetensors"
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05":
        return "torch-legacy"
    raise CheckpointError(f"{path} is not a checkpoint: {_what_else(start)}")


def _what_else(start: bytes) -> str:
    text = start.lstrip().lower()
    if not start:
        return "the file is empty; fetch it again"
    if text.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer; run `git lfs pull` to fetch the weights themselves"
    if text.startswith((b"<!doctype", b"<html")):
        return "it is a web page; the download link asks for a login or has moved"
    if text.startswith((b"{", b"[")):
        return "it is a JSON file; give the folder it is in, or the file with the weights"
    if text.startswith(b"\x93numpy"):
        return "it is a single .npy array; a checkpoint is an .npz with many"
    return "it begins like none of safetensors, .npz and PyTorch files; fetch it again, or convert it first"


def _kind_of_zip(path: Path) -> str:
    names = [info.filename for info in _zip_infos(path)]
    if any(n == "constants.pkl" or n.endswith("/constants.pkl") for n in names):
        return "torchscript"
    if any(n == "data.pkl" or n.endswith("/data.pkl") for n in names):
        return "torch"
    if any(n.endswith(".npy") for n in names):
        return "npz"
    raise CheckpointError(f"{path} is a zip file without weights (neither .npz nor PyTorch); unpack it first")


def _zip_infos(path: Path) -> list[zipfile.ZipInfo]:
    """The members of a zip file whose declared sizes are believable."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, RuntimeError) as e:
        raise _damaged(path, str(e)) from e
    size = path.stat().st_size
    if len(infos) > MAX_TENSORS:
        raise CheckpointError(f"{path} declares {len(infos):,} parts; at most {MAX_TENSORS:,} are read")
    if len({i.filename for i in infos}) != len(infos):
        raise _damaged(path, "two parts have the same name")
    stored = sum(i.file_size for i in infos if i.compress_type == zipfile.ZIP_STORED)
    total = sum(i.file_size for i in infos)
    if stored > size or any(i.compress_size > size for i in infos):
        raise _damaged(path, f"it declares more than the {size:,} bytes it has")
    if total > MAX_INFLATION * size:
        raise CheckpointError(
            f"{path} would unpack to {total:,} bytes, {total // max(1, size)} times its size; weights do not shrink "
            f"like that, so it is not unpacked. If you trust it, unpack it and pack it again uncompressed"
        )
    return infos


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or cut short ({why}); fetch or write it again")


def open_tensors(path: Path, kind: str | None = None) -> tuple[LazyTensors, dict[str, str]]:
    """The tensors of one file, and the text its header holds (safetensors)."""
    kind = kind or kind_of(path)
    if kind == "safetensors":
        return _open_safetensors(path)
    if kind == "npz":
        return _open_npz(path), {}
    if kind == "torchscript":
        raise CheckpointError(
            f"{path} is a TorchScript archive, whose code vitkit does not run. Save its weights once with "
            f"torch.save(torch.jit.load('{path.name}', map_location='cpu').state_dict(), 'weights.pt') and load those"
        )
    tensors = _from_nested(path, _load_torch(path, kind))
    if kind == "torch-legacy":
        _check_views(path, tensors)
    return tensors, {}


def _open_safetensors(path: Path) -> tuple[LazyTensors, dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        declared = int.from_bytes(file.read(8), "little")
    if declared > min(MAX_HEADER, path.stat().st_size - 8):
        raise _damaged(path, f"a header of {declared:,} bytes is declared")
    try:
        opened = safe_open(str(path), framework="pt")
        metadata = dict(opened.metadata() or {})
        table = {}
        for name in opened.keys():  # noqa: SIM118  # not a mapping
            part = opened.get_slice(name)
            dtype = _SAFETENSORS.get(str(part.get_dtype()))
            if dtype is None:
                raise CheckpointError(f"{path}: tensor {name!r} has dtype {part.get_dtype()}, which is not read")
            table[name] = (tuple(part.get_shape()), dtype)
    except (SafetensorError, OSError, ValueError, OverflowError) as e:
        raise _damaged(path, str(e)) from e
    if len(table) > MAX_TENSORS:
        raise CheckpointError(f"{path} declares {len(table):,} tensors; at most {MAX_TENSORS:,} are read")
    return LazyTensors(table, opened.get_tensor), metadata


def read_whole_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file that `open_tensors` has accepted, as it is written."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(size, MAX_HEADER)))
        except (ValueError, RecursionError) as e:
            raise _damaged(path, str(e)) from e
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise _damaged(path, "the header is not a table")
    return header


def _open_npz(path: Path) -> LazyTensors:
    """Each array is read when asked for, through the zip's own checksum; numpy never sees a pickle."""
    infos = {i.filename.removesuffix(".npy"): i for i in _zip_infos(path) if i.filename.endswith(".npy")}
    table, layouts = {}, {}
    with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:
        for name, info in infos.items():
            shape, fortran, dtype, start = _guard(path, name, lambda info=info: _npy_header(archive, info))  # type: ignore[misc]
            if dtype.hasobject:
                raise CheckpointError(f"{path}: {name!r} holds pickled Python objects, which vitkit never unpickles")
            if start + math.prod(shape) * dtype.itemsize != info.file_size or any(n < 0 for n in shape):
                raise _damaged(path, f"{name!r} declares shape {shape} but has {info.file_size:,} bytes")
            table[name], layouts[name] = (shape, _torch_dtype(path, name, dtype)), (dtype, fortran)

    def read(name: str) -> Tensor:
        return _guard(path, name, lambda: _read_npy(path, infos[name], table[name][0], *layouts[name]))

    return LazyTensors(table, read)


def _npy_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    if info.file_size > 1 << 48:
        raise ValueError("an impossible size is declared")
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(file, max_header_size=10_000)
        return tuple(int(n) for n in shape), bool(fortran), dtype, file.tell()


def _read_npy(path: Path, info: zipfile.ZipInfo, shape: tuple[int, ...], dtype: np.dtype[Any], fortran: bool) -> Tensor:
    with zipfile.ZipFile(path) as archive, archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        (np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0)(file)
        flat = np.empty(math.prod(shape), dtype=dtype)
        _fill(file, memoryview(flat.view(np.uint8)) if flat.size else memoryview(b""))  # type: ignore[arg-type]
        if file.read(1):
            raise ValueError("more bytes than declared")
    array = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    if array.dtype.kind == "V":  # numpy has no bfloat16; JAX saves it as two unnamed bytes
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16).reshape(shape)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)))


def _fill(file: BinaryIO, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        block = file.read(min(1 << 20, len(buffer) - done))
        if not block:
            raise EOFError("fewer bytes than declared")
        buffer[done : done + len(block)] = block
        done += len(block)


def _torch_dtype(path: Path, name: str, dtype: np.dtype[Any]) -> torch.dtype:
    if dtype == np.dtype("V2"):
        return torch.bfloat16
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"{path}: {name!r} has dtype {dtype}, which is not read") from e


def _guard(path: Path, name: str, read: Callable[[], Any]) -> Any:
    """What numpy, zipfile and zlib raise on damaged bytes, as an error of ours."""
    try:
        return read()
    except (CheckpointError, KeyboardInterrupt):
        raise
    except MemoryError as e:
        raise CheckpointError(f"{path}: not enough memory for {name!r}") from e
    except Exception as e:  # zlib.error, BadZipFile, ValueError, tokenize errors of a forged header, ...
        raise _damaged(path, f"{name!r}: {e}") from e


def _load_torch(path: Path, kind: str) -> Any:
    """The content of a PyTorch file. The pickle inside may name tensors and plain containers only."""
    if kind == "torch":
        _check_torch_zip(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            return torch.load(path, map_location="cpu", weights_only=True, mmap=kind == "torch")
    except KeyboardInterrupt:
        raise
    except MemoryError as e:
        raise CheckpointError(f"{path}: not enough memory to read it") from e
    except Exception as e:
        text = str(e)
        if "Unsupported global" in text or "weights_only" in text.lower() or "Weights only" in text:
            culprit = text.split("GLOBAL ")[1].split(" ")[0] if "GLOBAL " in text else "something"
            raise CheckpointError(
                f"{path} holds Python objects beside tensors ({culprit}), and vitkit never runs a pickle. Where you "
                f"trust the file, save its weights alone: torch.save(model.state_dict(), 'weights.pth')"
            ) from e
        raise _damaged(path, text.splitlines()[0] if text else type(e).__name__) from e


def _check_torch_zip(path: Path) -> None:
    """PyTorch does not compare checksums, so a changed pickle could pass for another model: compare them here."""
    infos = _zip_infos(path)
    if any(i.compress_type != zipfile.ZIP_STORED for i in infos):
        raise CheckpointError(f"{path} is compressed, which no PyTorch file is; unpack it and load what is inside")
    with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:
        for info in infos:
            folder, _, last = info.filename.rpartition("/")
            if last in ("data.pkl", "byteorder", "version") or not folder.endswith("data"):
                if info.file_size > MAX_HEADER:
                    raise CheckpointError(f"{path}: its part {info.filename!r} declares {info.file_size:,} bytes")
                _guard(path, info.filename, lambda info=info: archive.read(info))  # type: ignore[misc]
            else:
                _guard(path, info.filename, lambda info=info: archive.open(info).close())  # type: ignore[misc]


def _from_nested(path: Path, content: Any) -> LazyTensors:
    """Nested dictionaries of tensors, flattened with '/' between the levels: {'model': {'norm': t}} -> model/norm."""
    flat: dict[str, Tensor] = {}

    def walk(value: Any, name: str, depth: int) -> None:
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_quantized or value.is_meta:
                raise CheckpointError(f"{path}: tensor {name!r} is sparse, quantised or empty, which is not read")
            flat[name] = value.detach()
        elif isinstance(value, dict) and depth < 4:
            for key, item in value.items():
                walk(item, f"{name}/{key}" if name else str(key), depth + 1)

    walk(content, "", 0)
    if not flat:
        raise CheckpointError(f"{path} holds no tensors; it should be a state dict or contain one")
    if len(flat) > MAX_TENSORS:
        raise CheckpointError(f"{path} holds {len(flat):,} tensors; at most {MAX_TENSORS:,} are read")
    return LazyTensors({k: (tuple(v.shape), v.dtype) for k, v in flat.items()}, flat.__getitem__)


def _check_views(path: Path, tensors: LazyTensors) -> None:
    """The old format has no checksum: a changed stride or storage would show other numbers as this tensor.

    So every tensor must cover its own part of a storage once.
    """
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        expected = 1
        for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda s: (s[1], s[0])):
            if size != 1 and stride != expected:
                raise _damaged(path, f"{name!r} skips or repeats numbers of its storage")
            expected *= size
        start = int(tensor.storage_offset())
        parts = taken.setdefault(tensor.untyped_storage().data_ptr(), [])
        if any(start < end and first < start + tensor.numel() for first, end, _ in parts):
            raise _damaged(path, f"{name!r} shares its numbers with another tensor")
        parts.append((start, start + tensor.numel(), name))


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_HEADER:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes; a configuration is far smaller")
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read ({e.strerror or e})") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not valid JSON ({e}); fetch it again") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object, not a {type(value).__name__}")
    return value
