"""What a run writes down as it goes: `log.jsonl`, and the same numbers as TensorBoard events.

One JSON object per line. When a run is resumed, the lines after its checkpoint are taken away, and
the events are rewritten from what is left: no gap and no repetition.
"""

from __future__ import annotations

import errno
import math
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

from vitkit.errors import WriteError
from vitkit.io import json_text, parse_json, read_regular, replacing

EVENTS = "events.out.tfevents.0.vitkit"


class Listener(Protocol):
    def start(self, kept: Sequence[Mapping[str, object]]) -> None:
        """The lines that a resumed run has already."""

    def write(self, line: Mapping[str, object]) -> None:
        """A new one."""


class Log:
    def __init__(self, folder: Path, up_to_step: int = -1, also: Listener | None = None) -> None:
        """Continue the log of a run after `up_to_step`; negative: start a new one. `also` hears every line."""
        self.path = folder / "log.jsonl"
        kept = [line for line in read(self.path) if line["step"] <= up_to_step] if up_to_step >= 0 else []
        with replacing(self.path) as file:
            file.write("".join(json_text(line) + "\n" for line in kept).encode())
        self._file = _Growing(self.path, "ab")
        self._events = _Growing(folder / EVENTS, "wb")
        self._events.write(_record(_now() + _field(3, 2, b"brain.Event:2")))
        for line in kept:
            self._events.write(_event(line))
        self._also = also
        if also is not None:
            also.start(kept)

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write((json_text(line) + "\n").encode())
        self._events.write(_event(line))
        if self._also is not None:
            self._also.write(line)

    def close(self) -> None:
        self._file.close()
        self._events.close()


class _Growing:
    """A file that only grows; what a full disk refuses waits, and is written with the next line."""

    def __init__(self, path: Path, mode: str) -> None:
        self.path, self._file, self._waiting = path, path.open(mode, buffering=0), b""

    def write(self, content: bytes) -> None:
        self._waiting += content
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def close(self) -> None:
        self.write(b"")
        self._file.close()
        if self._waiting:
            raise WriteError(
                errno.ENOSPC, f"the end of {self.path} could not be written: the disk is full; free some space"
            )


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that a kill cut short is left out. NaN, which older versions wrote, is read too."""
    lines = []
    content = read_regular(path).decode(errors="replace") if path.is_file() else ""
    for text in content.splitlines():
        with suppress(ValueError):
            line = parse_json(text)
            if isinstance(line, dict) and type(line.get("step")) is int and line["step"] >= 0:
                lines.append(line)
    return lines


# --- TensorBoard's format: protocol buffers in checksummed records. By hand is shorter than a package that can. ---


def _event(line: Mapping[str, Any]) -> bytes:
    """The numbers of a line as scalars."""
    numbers = {k: v for k, v in line.items() if k != "step" and isinstance(v, (int, float))}
    values = {k.encode(errors="replace"): _float(v) for k, v in numbers.items()}
    summary = b"".join(_field(1, 2, _field(1, 2, name) + _field(2, 5, value)) for name, value in values.items())
    return _record(_now() + _field(2, 0, _varint(line["step"])) + _field(5, 2, summary))


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # larger than 32 bits can hold
        return struct.pack("<f", math.inf if value > 0 else -math.inf)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _crc(length)) + data + struct.pack("<I", _crc(data))


def _now() -> bytes:
    return _field(1, 1, struct.pack("<d", time.time()))


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def _field(number: int, kind: int, payload: bytes) -> bytes:
    """One protocol-buffer field; kind 2 is preceded by its length."""
    return bytes([number << 3 | kind]) + (_varint(len(payload)) if kind == 2 else b"") + payload


def _shifted(value: int, bit: int) -> int:
    return value >> 1 ^ (0x82F63B78 if value & 1 else 0)


_CRC32C = [reduce(_shifted, range(8), byte) for byte in range(256)]


def _crc(data: bytes) -> int:
    """CRC-32C, rotated and shifted as TensorFlow's records want it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
