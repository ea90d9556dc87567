"""`vitkit doctor`: what is installed, what the machine has, and whether the whole thing works here."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

from vitkit.cli.output import JsonOption, open_table, print_json

_FOR_DEVELOPERS = {"dev", "peers", "docs", "all"}


def doctor(as_json: JsonOption = False) -> None:
    """Report versions, devices and optional packages, and run a self-test of a few seconds.

    Exits with code 1 when the self-test finds something wrong.
    """
    checks = self_test()
    found = {"versions": versions(), "devices": devices(), "optional": optional_packages(), "checks": checks}
    print_json(found) if as_json else _print(found)
    if not all(check["ok"] for check in checks):
        raise typer.Exit(1)


def versions() -> dict[str, str]:
    """vitkit, Python, and the packages that vitkit cannot do without."""
    needed = [_name(line) for line in metadata.requires("vitkit") or () if "extra ==" not in line]
    known = {"vitkit": metadata.version("vitkit"), "python": platform.python_version(), "system": platform.platform()}
    return known | {name: _version(name) or "missing" for name in needed}


def devices() -> list[dict[str, Any]]:
    """Processors and accelerators, the one that is used by default first."""
    import torch

    found: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        found.append({"kind": "cuda", "name": about.name, "memory_gb": round(about.total_memory / 1e9, 1)})
    if torch.backends.mps.is_available():
        found.append({"kind": "mps", "name": "Apple GPU"})
    about_cpu: dict[str, Any] = {"kind": "cpu", "name": platform.processor() or platform.machine()}
    about_cpu |= {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    about_cpu["instructions"] = torch.backends.cpu.get_cpu_capability()
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        about_cpu["memory_gb"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    return [*found, about_cpu]


def optional_packages() -> list[dict[str, Any]]:
    """What each extra of vitkit brings, what is there of it, and how to get the rest."""
    found = []
    for line in metadata.requires("vitkit") or ():
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if extra is None or extra.group(1) in _FOR_DEVELOPERS or _name(line) == "vitkit":
            continue
        version = _version(_name(line))
        install = None if version else f"pip install 'vitkit[{extra.group(1)}]'"
        found.append({"package": _name(line), "extra": extra.group(1), "version": version, "install": install})
    return found


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- does it work? -----------------------------------------------------------------------------------


def self_test() -> list[dict[str, Any]]:
    """Small versions of what vitkit is for, each with its result and seconds."""
    checks: dict[str, Callable[[], None]] = {
        "build a model; fused and visible attention agree": _attention,
        "train: the loss falls": _training,
        "save and load: every bit the same": _saving,
        "read a picture as a model wants it": _picture,
    }
    found = []
    for name, check in checks.items():
        start = time.perf_counter()
        try:
            check()
            problem = None
        except Exception as e:  # whatever is wrong with this machine is what was asked for
            problem = f"{type(e).__name__}: {e}"
        seconds = round(time.perf_counter() - start, 2)
        found.append({"check": name, "ok": problem is None, "seconds": seconds, "problem": problem})
    return found


def _attention() -> None:
    import torch

    from vitkit.model.build import create

    torch.manual_seed(0)
    model = create("mu").eval()
    images = torch.randn(2, 3, 32, 32)
    kept: list[torch.Tensor] = []
    with torch.no_grad():
        torch.testing.assert_close(model(images), model(images, on_weights=kept.append))
    torch.testing.assert_close(kept[0].sum(-1), torch.ones_like(kept[0][..., 0]))


def _training() -> None:
    import torch
    import torch.nn.functional as F

    from vitkit.model.build import create

    torch.manual_seed(0)
    model = create("mu", classes=2).train()
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if not losses[-1] < losses[0] / 2:
        raise RuntimeError(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")


def _saving() -> None:
    import torch

    from vitkit.checkpoints.load import load
    from vitkit.checkpoints.native import save
    from vitkit.model.build import create

    model = create("mu")
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "model.safetensors")
        again = load(Path(folder) / "model.safetensors")
        for name, tensor in model.state_dict().items():
            if not torch.equal(tensor, again.state_dict()[name]):
                raise RuntimeError(f"{name} changed")


def _picture() -> None:
    import numpy as np
    from PIL import Image

    from vitkit.data import open_data

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a").mkdir()
        pixels = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(Path(folder) / "a" / "picture.jpg")
        if open_data(folder, "all").picture(0, 3).size != (64, 48):
            raise RuntimeError("the picture has another size")


# --- what is told ------------------------------------------------------------------------------------


def _print(found: dict[str, Any]) -> None:
    print_, table = open_table("package", "version", left=2)
    for name, version in found["versions"].items():
        table.add_row(name, version)
    print_(table)
    print_, table = open_table("device", "name", "about", left=3)
    for one in found["devices"]:
        more = ", ".join(f"{k.replace('_gb', '')} {v}{' GB' if k.endswith('_gb') else ''}" for k, v in one.items())
        table.add_row(one["kind"], one["name"], more.split(", ", 2)[-1] if len(one) > 2 else "")
    print_(table)
    print_, table = open_table("optional", "for", "version", left=3)
    for one in found["optional"]:
        table.add_row(one["package"], one["extra"], one["version"] or f"not installed: {one['install']}")
    print_(table)
    print_, table = open_table("self-test", "result", "seconds", left=2)
    for one in found["checks"]:
        table.add_row(one["check"], "ok" if one["ok"] else "failed", f"{one['seconds']:.1f}")
    print_(table)
    for one in found["checks"]:
        if not one["ok"]:
            typer.echo(f"{one['check']}: {one['problem']}", file=sys.stderr)
