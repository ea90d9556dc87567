"""Files of tensors, opened without trust: safetensors, .npz, PyTorch's zip and its old format.

Recognised by content, never by name. Header sizes, numbers of tensors, shapes and declared sizes are
checked before memory is taken; no pickle is executed (`weights_only`).
"""

from __future__ import annotations

import argparse
import io
import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitkit.checkpoints.tensors import LazyTensors
from vitkit.errors import CheckpointError, ConfigError
from vitkit.io import open_regular, parse_json, read_into

MAX_HEADER = 32 << 20  # bytes of the pickled part of a PyTorch file
MAX_TENSORS = 100_000
MAX_INFLATION = 64  # times its own size that a compressed file may grow; weights hardly shrink

_OTHERS = {  # what a file begins with -> what it is
    (b"version https://git-lfs",): "a Git LFS pointer; run `git lfs pull` to fetch the weights themselves",
    (b"<!doctype", b"<html"): "a web page; the download link asks for a login or has moved",
    (b"{", b"["): "a JSON file; give the folder it is in, or the file with the weights",
    (b"\x93numpy",): "a single .npy array; a checkpoint is an .npz with many",
}


def open_tensors(path: Path) -> tuple[LazyTensors, dict[str, str]]:
    """The tensors of one file, and the text its header holds (safetensors)."""
    with in_words(str(path)):
        with path.open("rb") as file:
            start = file.read(64)
        header: dict[str, str] = {}
        if start[:2] == b"PK":
            tensors = _open_zip(path)
        elif start[8:9] == b"{":
            tensors, header = _open_safetensors(path)
        elif start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05":
            tensors = _open_torch(path, zipped=False)
            _check_views(tensors)
        else:
            begin = start.lstrip().lower()
            other = next((what for begins, what in _OTHERS.items() if begin.startswith(begins)), None)
            unknown = "begins like none of safetensors, .npz and PyTorch files; fetch it again, or convert it first"
            what = f"is {other}" if other else unknown if start else "is empty; fetch it again"
            raise CheckpointError(f"{path} is not a checkpoint: it {what}")
        if len(tensors) > MAX_TENSORS:
            raise CheckpointError(f"{path} declares {len(tensors):,} tensors; at most {MAX_TENSORS:,} are read")
        return tensors, header


@contextmanager
def in_words(*names: str) -> Iterator[None]:
    """Every failure, also of torch, numpy or zlib on damaged bytes, as a CheckpointError that names the file by one of
    `names`, the user's first.
    """
    try:
        yield
    except (CheckpointError, ConfigError) as e:
        message = str(e)
        raise CheckpointError(message if any(n in message for n in names) else f"{names[0]}: {message}") from e
    except MemoryError as e:
        raise CheckpointError(f"{names[0]}: not enough memory for it") from e
    except PermissionError as e:
        raise CheckpointError(f"{names[0]} cannot be read ({e.strerror}); check the path and its permissions") from e
    except Exception as e:
        why = (str(e) or type(e).__name__).splitlines()[0]
        raise CheckpointError(f"{names[0]} is damaged or cut short ({why}); fetch or write it again") from e


def _open_safetensors(path: Path) -> tuple[LazyTensors, dict[str, str]]:
    """Its own reader checks the header against the file; the numbers are read into memory of our own."""
    from safetensors import safe_open

    content = _Content(path)
    opened = safe_open(str(path), framework="pt")
    outlines = {name: opened.get_tensor(name).to("meta") for name in opened.keys()}  # noqa: SIM118  # maps, reads nothing
    size = int.from_bytes(content.read(0, 8).numpy().tobytes(), "little")
    header = parse_json(content.read(8, size).numpy().tobytes())

    def read(name: str) -> Tensor:
        start, end = header[name]["data_offsets"]
        return content.read(8 + size + start, end - start).view(outlines[name].dtype).view(outlines[name].shape)

    return LazyTensors(outlines, read), dict(opened.metadata() or {})


class _Content:
    """An open file. A file that is replaced under its name does not matter; one that is written to is noticed."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, open_regular(path)
        self.stamp = self._stamp()

    def _stamp(self) -> tuple[int, int]:
        status = os.fstat(self.file)
        return status.st_size, status.st_mtime_ns

    def check(self) -> None:
        if self._stamp() != self.stamp:
            raise CheckpointError(f"{self.path} was written to while it was read; load it again when it is whole")

    def read(self, start: int, count: int) -> Tensor:
        """So many bytes, straight into memory of their own; none is taken for what the file does not have."""
        self.check()
        if start + count > self.stamp[0]:
            raise ValueError("it ends too early")
        wanted = torch.empty(count, dtype=torch.uint8)
        read_into(self.file, start, wanted.numpy().data)
        self.check()
        return wanted

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # it could not be opened
            os.close(self.file)


def _open_zip(path: Path) -> LazyTensors:
    with zipfile.ZipFile(path) as archive:
        _check_sizes(path, archive.infolist())
        names = {info.filename.rpartition("/")[2] for info in archive.infolist()}
        if "constants.pkl" in names:
            save = f"torch.save(torch.jit.load('{path.name}', map_location='cpu').state_dict(), 'weights.pt')"
            what = "is a TorchScript archive, whose code vitkit does not run"
            raise CheckpointError(f"{path} {what}. Save its weights once with {save} and load those")
        if "data.pkl" in names:
            _check_torch_zip(path, archive)
            return _open_torch(path, zipped=True)
        if any(name.endswith(".npy") for name in names):
            return _open_npz(path, archive)
    raise CheckpointError(f"{path} is a zip file without weights (neither .npz nor PyTorch); unpack it first")


def _check_sizes(path: Path, infos: list[zipfile.ZipInfo]) -> None:
    """The declared sizes are believable."""
    size, total = path.stat().st_size, sum(i.file_size for i in infos)
    stored = sum(i.file_size for i in infos if i.compress_type == zipfile.ZIP_STORED)
    if len(infos) > MAX_TENSORS or len({i.filename for i in infos}) != len(infos):
        raise ValueError(f"it declares {len(infos):,} parts, too many or with the same name")
    if stored > size or any(i.compress_size > size for i in infos):
        raise ValueError(f"it declares more than the {size:,} bytes it has")
    if total > MAX_INFLATION * size:
        grows = f"{path} would unpack to {total:,} bytes, {total // max(1, size)} times its size, as no weights do"
        raise CheckpointError(f"{grows}; if you trust it, unpack it and pack it again uncompressed")


def _open_npz(path: Path, archive: zipfile.ZipFile) -> LazyTensors:
    """Each array is read when asked for, through the zip's own checksum; numpy never sees a pickle."""
    parts = {i.filename.removesuffix(".npy"): i for i in archive.infolist() if i.filename.endswith(".npy")}
    outlines = {}
    for name, info in parts.items():
        with archive.open(info) as file:
            first = np.lib.format.read_magic(file) == (1, 0)
            read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file, max_header_size=10_000)
            start = file.tell()
        if dtype.kind not in "fiub" and dtype != np.dtype("V2"):
            raise CheckpointError(f"{path}: {name!r} holds {dtype}, not numbers; vitkit unpickles no objects")
        if start + math.prod(shape) * dtype.itemsize != info.file_size or any(n < 0 for n in shape):
            raise ValueError(f"{name!r} declares shape {shape} but has {info.file_size:,} bytes")
        outlines[name] = torch.empty(shape, dtype=_to_torch(np.empty(0, dtype)).dtype, device="meta")
    return LazyTensors(outlines, lambda name: _read_npy(path, name, parts[name]))


def _read_npy(path: Path, name: str, info: zipfile.ZipInfo) -> Tensor:
    with zipfile.ZipFile(path) as archive, archive.open(info) as file:
        array = np.ascontiguousarray(np.lib.format.read_array(file, allow_pickle=False))
        if file.read(1):  # at the end of the part its checksum is compared
            raise ValueError(f"{name!r} has more bytes than declared")
        return _to_torch(array)


def _to_torch(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    if array.dtype.kind == "V":  # numpy has no bfloat16; JAX saves it as two unnamed bytes
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _check_torch_zip(path: Path, archive: zipfile.ZipFile) -> None:
    """PyTorch does not compare checksums, so a changed pickle could pass for another model: compare them here."""
    for info in archive.infolist():
        weights = info.filename.rpartition("/")[2].isdecimal()
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{path} is compressed, which no PyTorch file is; unpack it and load what is inside")
        if not weights and info.file_size > MAX_HEADER:
            raise CheckpointError(f"{path}: its part {info.filename!r} declares {info.file_size:,} bytes")
        with archive.open(info) as part:  # which compares the part's own header with the directory
            part.read(0 if weights else -1)


class _Bounded(io.BufferedReader):
    """Never asks for more memory than the file has bytes left, whatever length its pickle declares."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self._size = path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        left = self._size - self.tell()
        return super().read(left if size is None or size < 0 else min(size, left))


def _open_torch(path: Path, zipped: bool) -> LazyTensors:
    """The pickle inside may name tensors and plain containers only; of a zip it says where in the file each is."""
    source, place = _Content(path), "meta" if zipped else "cpu"
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            content = torch.load(path if zipped else _Bounded(path), map_location=place, weights_only=True)
    except pickle.UnpicklingError as e:
        culprit = re.search(r"GLOBAL (\S+)", str(e))
        what = f"holds Python objects beside tensors ({culprit[1] if culprit else 'something'})"
        save = "Where you trust it, save its weights alone: torch.save(model.state_dict(), 'weights.pth')"
        raise CheckpointError(f"{path} {what}, and vitkit never runs a pickle. {save}") from e
    flat = dict(_flat(path, content, place))
    if not flat:
        raise CheckpointError(f"{path} holds no tensors; it should be a state dict or contain one")
    if not zipped:
        return LazyTensors.of(flat)

    def read(name: str) -> Tensor:
        outline, storage = flat[name], flat[name].untyped_storage()
        start, steps = storage._checkpoint_offset or 0, (outline.shape, outline.stride(), outline.storage_offset())
        if outline.is_contiguous():  # nothing but its own numbers
            size = outline.element_size()
            content = source.read(start + int(outline.storage_offset()) * size, outline.numel() * size)
            return content.view(outline.dtype).view(outline.shape)
        return source.read(start, storage.nbytes()).view(outline.dtype).as_strided(*steps).contiguous()

    return LazyTensors(flat, read)


def _flat(path: Path, value: object, place: str, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Nested dictionaries of tensors with '/' between the levels: {'model': {'norm': t}} -> model/norm."""
    if isinstance(value, Tensor):
        read = value.layout == torch.strided and not value.is_quantized and value.device.type == place
        if not read or (place == "meta" and value.untyped_storage()._checkpoint_offset is None):
            raise CheckpointError(f"{path}: tensor {name!r} is sparse, quantised or empty, which is not read")
        yield name, value.detach()
    elif isinstance(value, dict) and depth < 4:
        for key, item in value.items():
            yield from _flat(path, item, place, f"{name}/{key}" if name else str(key), depth + 1)


def _check_views(tensors: LazyTensors) -> None:
    """The old format has no checksum, so every tensor must cover its own part of a storage once: a changed stride
    or storage would show other numbers as this tensor.
    """
    spans = []
    for name, tensor in tensors.items():
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            raise ValueError(f"{name!r} skips or repeats numbers of its storage")
        start = int(tensor.storage_offset())
        spans.append((tensor.untyped_storage().data_ptr(), start, start + tensor.numel(), name))
    for (storage, _, end, _), (other, start, _, name) in pairwise(sorted(spans)):
        if storage == other and start < end:
            raise ValueError(f"{name!r} shares its numbers with another tensor")
