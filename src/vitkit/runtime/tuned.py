"""What `tune` found, kept beside the model: `model.safetensors.tuned/` or `run-folder/tuned/`.

It counts only for the same weights on the same kind of machine; otherwise PyTorch runs the model, and a note says why.
"""

from __future__ import annotations

import hashlib
import os
import platform
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from vitkit.io import cache_folder, canonical, dumps, read_json, replacing_folder, sha256
from vitkit.model.base import VisionModel
from vitkit.model.merge_plan import MergePlan
from vitkit.progress import SILENT, Progress
from vitkit.runtime.base import Calibration, Cascade, Choice, Runtime, build, config_of
from vitkit.runtime.export import written
from vitkit.runtime.reductions import SCALES
from vitkit.runtime.table import FORMATS, RUNTIMES
from vitkit.world import accelerators, has_vnni

if TYPE_CHECKING:
    from vitkit.runtime.tune import Tuned

_FILE = "tuned.json"


def machine() -> dict[str, str | int | None]:
    """The kind of machine that a measurement holds for."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    cpu = names[0] if names else platform.processor() or platform.machine()
    gpu = next((torch.cuda.get_device_name(d) for d in accelerators() if d.type == "cuda"), None)
    capability = torch.backends.cpu.get_cpu_capability()
    about_int8 = {"int8": "vnni"} if has_vnni() else {}  # names of processors in the cloud do not tell
    system = {"capability": capability, "system": platform.system(), "gpu": gpu}
    return {"cpu": cpu, "cores": os.cpu_count(), **system, **about_int8}


def fingerprint(model: nn.Module) -> str:
    """The same for the same configuration and weights."""
    return f"{reduce(lambda total, part: zlib.crc32(part, total), _bytes_of(model), 0):08x}"


def digest_of(model: VisionModel) -> str:
    """As `fingerprint`, but for all that an answer depends on, and not the same for others by chance."""
    found = hashlib.sha256(canonical(model.outputs.to_dict()).encode())
    for part in _bytes_of(model):
        found.update(part)
    return found.hexdigest()


def _bytes_of(model: nn.Module) -> Iterator[bytes | memoryview]:
    yield config_of(model).to_json().encode()
    for name, tensor in sorted(model.state_dict().items()):
        yield name.encode()
        flat = tensor.detach().cpu().contiguous().view(-1)
        if flat.numel():
            yield memoryview(flat.view(torch.uint8).numpy())


def tuned_folder(source: str | Path) -> Path | None:
    """Where it is kept; None for a name of the zoo, whose weights are new every time."""
    text = str(source)
    if text.startswith(("hf:", "timm:")):
        return cache_folder() / "tuned" / text.replace(":", "-").replace("/", "-")
    path = Path(text).expanduser()
    if path.is_dir():
        return path / "tuned"
    return path.with_name(f"{path.name}.tuned") if path.is_file() else None


def kept_file(source: str | Path) -> Path | None:
    """Where a search keeps what it has measured, until it is finished."""
    folder = tuned_folder(source)
    return None if folder is None else folder.with_name(f"{folder.name}.measured.json")


def store(source: str | Path, model: VisionModel, found: Tuned, calibration: Calibration | None) -> Path | None:
    """Keep a choice, and the model exported for it, so that it is not made again at every start; all or nothing."""
    folder = tuned_folder(source)
    if folder is None:
        return None
    choice, report = found.winner.choice, found.report()
    about = {"choice": asdict(choice), "machine": machine(), "model": fingerprint(model), "report": report}
    with replacing_folder(folder) as new:
        if choice.runtime in FORMATS:
            for name, look in choice.looks.items():
                written(model, choice.runtime, new / f"{name}{FORMATS[choice.runtime].suffix}", look.spec(calibration))
        files = {path.name: sha256(path) for path in sorted(new.iterdir())}
        (new / _FILE).write_text(dumps({**about, "files": files}, indent=1), encoding="utf-8")
    if (measured := kept_file(source)) is not None:
        measured.unlink(missing_ok=True)
    return folder


def stored(model: nn.Module, source: str | Path, progress: Progress = SILENT) -> Runtime | None:
    """The runtime that was chosen, ready to run; None, and a note, when it is not for this model on this machine."""
    folder = tuned_folder(source)
    if folder is None or not (folder / _FILE).is_file():
        return None
    choice = _choice(model, folder)
    if isinstance(choice, str):
        progress.note(f"note: {folder} {choice}")
        return None
    if choice.runtime in FORMATS:
        row = FORMATS[choice.runtime]
        module = row.load(f"running {folder}", making=False)
        opened: dict[str, Runtime] = {
            name: module.open_file(folder / f"{name}{row.suffix}", look.name, choice.threads)
            for name, look in choice.looks.items()
        }
        runtime = opened["model"]
        if choice.sure:
            runtime = Cascade(opened["first"], runtime, choice.sure, choice.name)
    else:
        runtime = build(model, choice)
    runtime.batch_size = choice.batch_size
    return runtime


def check_choice(choice: Choice) -> None:
    """ValueError for what no tuning writes."""
    merge = MergePlan.of(choice.merge).per_block  # or an error, which is a ValueError
    if choice.scale not in SCALES:
        raise ValueError("no such scale")
    if not 0 <= choice.sure <= 1 or (choice.sure and choice.scale == 1):
        raise ValueError("no such early exit")
    numbers = (merge, choice.batch_size, 1 if choice.threads is None else choice.threads)
    if not all(type(n) is int and 0 <= n < 1 << 20 for n in numbers) or not choice.batch_size:
        raise ValueError("numbers out of range")


def _choice(model: nn.Module, folder: Path) -> Choice | str:
    """What is stored, or why it cannot be used."""
    try:
        about = read_json(folder / _FILE)
        choice, where, what = Choice(**about["choice"]), about["machine"], about["model"]
        device = about["report"].get("device")  # files of version 0.1 do not say
        other = [name for name, digest in about.get("files", {}).items() if sha256(folder / name) != digest]
        known = choice.runtime in RUNTIMES
        check_choice(choice)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "is damaged; run `vitkit tune` again"
    if other:
        return f"is damaged ({other[0]} is not what `vitkit tune` wrote); run it again"
    if where != machine():
        return "was measured on another machine; run `vitkit tune` here"
    if not known:
        return f"is for the runtime {choice.runtime}, which is not here; run `vitkit tune` again"
    if device not in (None, next(model.parameters()).device.type):
        return f"was measured with --device {device}; give that option, or run `vitkit tune` again"
    if what != fingerprint(model):
        return "is about other weights or another image size; run `vitkit tune` again"
    return choice
