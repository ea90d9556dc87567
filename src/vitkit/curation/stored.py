"""Arrays of an index -> memory of our own, checked while they are read.

A memory map of the file itself would change when the file does, and end the process (SIGBUS) when it becomes shorter.
What is too large for memory is copied into a file without a name, which nobody else can open, and that one is mapped.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import tokenize
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vitkit.errors import DataError
from vitkit.io import open_regular

IN_MEMORY = 2**30  # bytes of an array; the features of 700,000 images with 384 each
_BLOCK = 2**24  # bytes


def read_array(path: Path, kind: np.dtype, shape: tuple[int, ...], digest: str | None = None) -> np.ndarray:
    """An .npy file of exactly this type, shape and SHA-256; ValueError or OSError where it is another."""
    with os.fdopen(open_regular(path), "rb") as file:
        start, count = _start(file, path, kind, shape), int(np.prod(shape, dtype=object)) * kind.itemsize
        file.seek(0)
        seen = hashlib.sha256(file.read(start))
        values = _copied(file, kind, shape, seen) if count > IN_MEMORY else _read(file, kind, shape, seen)
    if digest is not None and seen.hexdigest() != digest:
        raise ValueError(f"{path.name} is not as it was written")
    return values


def read_rows(path: Path, kind: np.dtype, count: int, rows: np.ndarray) -> np.ndarray:
    """Some rows of an .npy file of exactly this type and length; the others are not read."""
    values = np.empty(len(rows), kind)
    content = values.view(np.uint8).data if len(rows) else memoryview(b"")
    with os.fdopen(open_regular(path), "rb") as file:
        start = _start(file, path, kind, (count,))
        for place, row in enumerate(rows.tolist()):
            file.seek(start + row * kind.itemsize)
            block = content[place * kind.itemsize : (place + 1) * kind.itemsize]
            if file.readinto(block) != len(block):
                raise ValueError("it became shorter while it was read")
    return values


def _start(file: BinaryIO, path: Path, kind: np.dtype, shape: tuple[int, ...]) -> int:
    """Where the values of an .npy file begin, which is of exactly this type, shape and size."""
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("another version")
        found, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except (ValueError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError) as e:
        raise ValueError(f"{path.name} has no header that can be read") from e
    start, count = file.tell(), int(np.prod(shape, dtype=object)) * kind.itemsize
    if (found, dtype, fortran) != (shape, kind, False):
        raise ValueError(f"{path.name} holds {dtype} {found}, not {kind} {shape}")
    if (size := os.fstat(file.fileno()).st_size) != start + count:
        raise ValueError(f"{path.name} has {size:,} bytes, not {start + count:,}")
    return start


def _read(file: BinaryIO, kind: np.dtype, shape: tuple[int, ...], seen: hashlib._Hash) -> np.ndarray:
    values = np.empty(shape, kind)
    content = values.reshape(-1).view(np.uint8).data if values.size else memoryview(b"")
    for low in range(0, len(content), _BLOCK):
        block = content[low : low + _BLOCK]
        if file.readinto(block) != len(block):  # type: ignore[attr-defined]
            raise ValueError("it became shorter while it was read")
        seen.update(block)
    return values


def _copied(file: BinaryIO, kind: np.dtype, shape: tuple[int, ...], seen: hashlib._Hash) -> np.ndarray:
    try:
        own = tempfile.TemporaryFile()  # noqa: SIM115
        while block := file.read(_BLOCK):
            seen.update(block)
            own.write(block)
        own.flush()
        values: np.ndarray = np.memmap(own, kind, "r", shape=shape)  # keeps the file open
    except OSError as e:
        raise DataError(f"no copy of a large index can be made ({e}); set TMPDIR to a folder with room") from e
    return values
