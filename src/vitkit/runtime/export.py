"""A model as a file that runs without vitkit, kept only after it has been compared with the model.

onnx          .onnx: ONNX Runtime, and anything else that reads ONNX
openvino      .xml with .bin
torch-export  .pt2: PyTorch without the model's code
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitkit.errors import ConfigError, did_you_mean
from vitkit.runtime import metadata
from vitkit.runtime.base import Runtime, merged
from vitkit.runtime.onnx_int8 import Calibration
from vitkit.runtime.raw import FromRaw
from vitkit.runtime.verify import Check, Pictures, compare

SUFFIXES = {".onnx": "onnx", ".xml": "openvino", ".pt2": "torch-export"}
FORMATS = tuple(SUFFIXES.values())


@dataclass(frozen=True)
class Export:
    """What was written, and how it compares with the model."""

    path: Path
    bytes: int
    check: Check


def export(
    model: nn.Module,
    to: str,
    out: str | Path,
    pictures: Pictures,
    int8: bool = False,
    merge: int = 0,
    raw: bool = False,
    calibration: Calibration | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Export:
    """Write `model` to `out`, compare both on `pictures`, and leave no file when they differ.

    With int8 and merge the comparison is with the model as it is, and is reported; only what cannot be
    rounding is an error. Without them top-1 must be the same and probabilities within 1e-4.
    """
    path = check_target(to, Path(out))
    if int8 and to == "torch-export":
        raise ConfigError("--to torch-export has no int8; choose onnx or openvino")
    with tempfile.TemporaryDirectory(prefix="vitkit-") as folder:
        beside = Path(folder, path.name)
        say(f"writing {path.name}")
        write_files(model, to, beside, int8, merge, raw, calibration)
        say("comparing it with the model")
        runtime, _ = open_exported(beside)
        check = compare(model, runtime, pictures, raw=raw, exact=not int8 and not merge)
        del runtime
        check.insist(path)
        files = sorted(Path(folder).iterdir(), key=lambda p: p.suffix != ".bin")  # the .bin first, then its .xml
        size = sum(p.stat().st_size for p in files)
        for file in files:
            _put(file, path.with_name(file.name))
    return Export(path, size, check)


def check_target(to: str, out: Path) -> Path:
    """Before the work, not after it."""
    if to not in FORMATS:
        raise ConfigError(f"there is no format {to!r}.{did_you_mean(to, FORMATS)} Known: {', '.join(FORMATS)}")
    suffix = next(s for s, name in SUFFIXES.items() if name == to)
    if out.suffix != suffix:
        raise ConfigError(f"--out {out} must end with {suffix} for --to {to}")
    if not out.parent.is_dir():
        raise ConfigError(f"the folder of --out {out} does not exist; make it, or give another")
    return out


def write_files(
    model: nn.Module,
    to: str,
    path: Path,
    int8: bool = False,
    merge: int = 0,
    raw: bool = False,
    calibration: Calibration | None = None,
) -> None:
    """Without comparing: `path`, and for OpenVINO its .bin."""
    from vitkit.runtime import onnx, openvino, torch_export

    about = metadata.write(model, raw=raw, int8=int8, merge=merge)
    config: Any = model.config
    chosen = FromRaw(merged(model, merge), config.preprocessing) if raw else merged(model, merge)
    if to == "onnx":
        proto = onnx.to_onnx(chosen, raw)
        onnx.save(onnx.quantized(proto, calibration) if int8 else proto, path, about)
    elif to == "openvino":
        converted = openvino.to_openvino(chosen, raw)
        openvino.save(openvino.quantized(converted, calibration) if int8 else converted, path, about)
    else:
        torch_export.save(torch_export.to_program(chosen, raw), path, about)


def open_exported(path: str | Path, threads: int | None = None) -> tuple[Runtime, metadata.About]:
    """A file that `export` has written, ready to run, and what it says about itself."""
    suffix = Path(path).suffix
    opened: Any
    if suffix == ".onnx":
        from vitkit.runtime.onnx import Onnx

        opened = Onnx(path, threads=threads)
    elif suffix == ".xml":
        from vitkit.runtime.openvino import OpenVino

        opened = OpenVino(path, threads=threads)
    else:
        from vitkit.runtime.torch_export import Exported

        opened = Exported(path)
    return opened, metadata.read(opened.metadata, str(path))


def _put(file: Path, target: Path) -> None:
    """Into its place in one step, also from another disk."""
    part = target.with_name(f".{target.name}.part")
    try:
        shutil.copyfile(file, part)
        part.replace(target)
    except OSError as e:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{target} cannot be written ({e.strerror}); give --out another place") from e
