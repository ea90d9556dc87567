"""Each finding of the hunt, kept: a case that once ended in a traceback, a hang or without memory."""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Callable

import generators as make
import pytest
import torch
from PIL import Image
from targets import TARGETS

from vitkit.checkpoints.files import _Bounded
from vitkit.data.decode import BadImage, decode
from vitkit.errors import VitkitError
from vitkit.io import parse_json

DEEP = b"[" * 20_000 + b"]" * 20_000
FINDINGS: dict[str, tuple[str, Callable[[], make.Case]]] = {  # what was wrong -> who reads it, and what
    "a run's configuration nested without end": ("run", lambda: {**make.run_seed(), "run/config.json": DEEP}),
    "a choice of tune nested without end": ("tuned", lambda: _tuned(DEEP)),
    "a string of 4 GB declared by PyTorch's old format": ("checkpoint", lambda: {"x.pth": _long_string()}),
    "130 million pixels declared by 150 bytes": ("data", lambda: {"set/a/1.webp": _large(), "set/b/1.webp": _large()}),
    "a line of a list nested without end": ("data", lambda: make.with_images("x.jsonl", DEEP)),
}


def _long_string() -> bytes:
    out = io.BytesIO()
    torch.save({"x" * 99: torch.zeros(2)}, out, _use_new_zipfile_serialization=False)
    return out.getvalue().replace(b"X\x63\0\0\0", b"X\xff\xff\xff\xff")


def _large() -> bytes:
    """WebP keeps the sides of the image in the bytes 26 to 30."""
    out = io.BytesIO()
    Image.new("RGB", (16, 16)).save(out, "WEBP")
    return out.getvalue()[:26] + struct.pack("<HH", 13515, 9643) + out.getvalue()[30:]


def _tuned(content: bytes) -> make.Case:
    return {name: content if name.endswith(".json") else made for name, made in make.tuned_seed().items()}


def test_a_declared_length_takes_no_memory(tmp_path: make.Path) -> None:
    """The reader never asks for more than the file has."""
    (tmp_path / "x").write_bytes(b"12345")
    with _Bounded(tmp_path / "x") as file:
        assert (file.read(2), file.read(1 << 40), file.read()) == (b"12", b"345", b"")
    assert b"X\xff\xff\xff\xff" in _long_string()


@pytest.mark.parametrize("what", FINDINGS)
def test_finding(what: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, case = FINDINGS[what]
    monkeypatch.chdir(str(tmp_path))
    for path, content in (files := case()).items():
        (target := make.Path(path)).parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    with contextlib.suppress(VitkitError):
        TARGETS[reader](files)


def test_pixels_need_bytes() -> None:
    with pytest.raises(BadImage, match="13515x9643 pixels are declared by a file of"):
        decode(_large())


def test_json_nested_without_end_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)
