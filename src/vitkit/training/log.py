"""What a run writes down as it goes: `log.jsonl`, and the same numbers as TensorBoard events.

One JSON object per line. When a run is resumed, the lines after its checkpoint are taken away, and
the events are rewritten from what is left: no gap and no repetition.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

from vitkit.io import json_text, parse_json, replacing

EVENTS = "events.out.tfevents.0.vitkit"


class Log:
    def __init__(self, folder: Path, up_to_step: int = -1) -> None:
        """Continue the log of a run after `up_to_step`; negative: start a new one."""
        self.path = folder / "log.jsonl"
        kept = [line for line in read(self.path) if line["step"] <= up_to_step] if up_to_step >= 0 else []
        with replacing(self.path) as file:
            file.write("".join(json_text(line) + "\n" for line in kept).encode())
        self._file = self.path.open("a", encoding="utf-8")
        self._events = (folder / EVENTS).open("wb")
        self._events.write(_record(_now() + _field(3, 2, b"brain.Event:2")))
        for line in kept:
            self._events.write(_event(line))

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json_text(line) + "\n")
        self._file.flush()
        self._events.write(_event(line))
        self._events.flush()

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that a kill cut short is left out. NaN, which older versions wrote, is read too."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
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
