"""What a run writes down as it goes: `log.jsonl`, and the same numbers as TensorBoard events.

One JSON object per line. When a run is resumed, the lines after its checkpoint are taken away, and
the events are written anew from what is left: no gap and no repetition.
"""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

from vitkit.checkpoints.write import replacing


class Log:
    def __init__(self, folder: Path, up_to_step: int = -1) -> None:
        """Go on with the log of a run after `up_to_step`; negative: start a new one."""
        self.path = folder / "log.jsonl"
        kept = [line for line in read(self.path) if line["step"] <= up_to_step] if up_to_step >= 0 else []
        with replacing(self.path) as file:
            file.write("".join(json.dumps(line) + "\n" for line in kept).encode())
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._file = self.path.open("a", encoding="utf-8")
        self._events = Events(folder / "events.out.tfevents.0.vitkit")
        for line in kept:
            self._events.write(line)

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._events.write(line)

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that a kill cut short is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "step" in line:
            lines.append(line)
    return lines


class Events:
    """Scalars in TensorBoard's file format, which is protocol buffers in checksummed records.

    Writing them by hand is shorter than depending on the packages that can.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._record(_field(1, 1, struct.pack("<d", time.time())) + _field(3, 2, b"brain.Event:2"))

    def write(self, line: dict[str, Any]) -> None:
        values = [(k, v) for k, v in line.items() if k != "step" and isinstance(v, (int, float))]
        summary = b"".join(
            _field(1, 2, _field(1, 2, name.encode()) + _field(2, 5, struct.pack("<f", value))) for name, value in values
        )
        when = _field(1, 1, struct.pack("<d", time.time()))
        self._record(when + _field(2, 0, _varint(line["step"])) + _field(5, 2, summary))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _record(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + struct.pack("<I", _crc(length)) + data + struct.pack("<I", _crc(data)))


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def _field(number: int, kind: int, payload: bytes) -> bytes:
    """One protocol-buffer field; kind 2 is preceded by its length."""
    return bytes([number << 3 | kind]) + (_varint(len(payload)) if kind == 2 else b"") + payload


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC32C = _table()


def _crc(data: bytes) -> int:
    """CRC-32C, rotated and shifted as TensorFlow's records want it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
