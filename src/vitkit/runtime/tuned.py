"""What `vitkit tune` has found, kept beside the model: `model.safetensors.tuned/` or `run-folder/tuned/`.

It counts only for the same weights on the same kind of machine; otherwise PyTorch runs the model, and a note says why.
"""

from __future__ import annotations

import json
import os
import platform
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit.checkpoints.write import replacing_folder
from vitkit.data.fetch import cache_folder
from vitkit.runtime.base import Runtime, described

_FILE = "tuned.json"


@dataclass(frozen=True)
class Choice:
    """How a model is run. threads None: the runtime's own choice."""

    runtime: str = "eager"
    int8: bool = False
    calibrated: bool = False
    merge: int = 0
    batch_size: int = 1
    threads: int | None = None

    @property
    def name(self) -> str:
        return described(self.runtime, self.int8, self.merge) + (" calibrated" if self.calibrated else "")


def machine() -> dict[str, Any]:
    """The kind of machine that a measurement holds for."""
    cpu = platform.processor() or platform.machine()
    about = Path("/proc/cpuinfo")
    if about.exists():
        names = [line.split(":", 1)[1].strip() for line in about.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "gpu": gpu,
    }


def fingerprint(model: nn.Module) -> str:
    """The same for the same configuration and weights."""
    config: Any = model.config
    total = zlib.crc32(config.to_json().encode())
    for name, tensor in sorted(model.state_dict().items()):
        total = zlib.crc32(name.encode(), total)
        flat = tensor.detach().cpu().contiguous().view(-1)
        if flat.numel():
            total = zlib.crc32(memoryview(flat.view(torch.uint8).numpy()), total)
    return f"{total:08x}"


def tuned_folder(source: str | Path) -> Path | None:
    """Where it is kept; None for a name of the zoo, whose weights are new every time."""
    text = str(source)
    if text.startswith(("hf:", "timm:")):
        return cache_folder() / "tuned" / text.replace(":", "-").replace("/", "-")
    path = Path(text).expanduser()
    if path.is_dir():
        return path / "tuned"
    return path.with_name(f"{path.name}.tuned") if path.is_file() else None


def store(
    source: str | Path, model: nn.Module, choice: Choice, report: dict[str, Any], exported: dict[str, bytes]
) -> Path | None:
    """Keep a choice, and the files of its exported model, all or nothing."""
    folder = tuned_folder(source)
    if folder is None:
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    about = {"choice": asdict(choice), "machine": machine(), "model": fingerprint(model), "report": report}
    with replacing_folder(folder) as new:
        for name, content in exported.items():
            (new / name).write_bytes(content)
        (new / _FILE).write_text(json.dumps(about, indent=1), encoding="utf-8")
    return folder


def find(model: nn.Module, source: str | Path) -> tuple[Choice | None, str | None]:
    """The stored choice, or why there is none that can be used (None when there never was one)."""
    folder = tuned_folder(source)
    if folder is None or not (folder / _FILE).is_file():
        return None, None
    try:
        about = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        choice, where, what = Choice(**about["choice"]), about["machine"], about["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, f"{folder} is damaged; run `vitkit tune` again"
    if where != machine():
        return None, f"{folder} was measured on another machine; run `vitkit tune` here"
    if what != fingerprint(model):
        return None, f"{folder} is about other weights or another picture size; run `vitkit tune` again"
    return choice, None


def stored(model: nn.Module, source: str | Path) -> Runtime | None:
    """The runtime that was found best, ready to run; None when there is none for this model on this machine."""
    choice, _ = find(model, source)
    folder = tuned_folder(source)
    if choice is None or folder is None:
        return None
    runtime: Any
    if choice.runtime == "onnx":
        from vitkit.runtime.onnx import Onnx

        runtime = Onnx(folder / "model.onnx", choice.name, choice.threads)
    elif choice.runtime == "openvino":
        from vitkit.runtime.openvino import OpenVino

        runtime = OpenVino(folder / "model.xml", choice.name, choice.threads)
    else:
        from vitkit.runtime.compiled import Compiled
        from vitkit.runtime.eager import Eager

        kind = Compiled if choice.runtime == "compiled" else Eager
        runtime = kind(model, choice.merge, choice.threads)
    runtime.batch_size = choice.batch_size
    return runtime
