"""`vitkit doctor`: what is installed, what the machine has, and whether the whole thing works here."""

from __future__ import annotations

import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from typer import Exit

import vitkit
from vitkit.cli import options as opt
from vitkit.cli.options import echo

LOOK = 0.5  # seconds
BUSY = 0.5  # cores of others that are worth a line
_FOR_DEVELOPERS = {"dev", "peers", "docs", "all"}


def doctor(as_json: opt.Json = False) -> None:
    """Report versions, devices and optional packages, and run a self-test of a few seconds.

    Exits with code 1 when the self-test finds something wrong.
    """
    found = devices()
    checks = [_run(name, check) for name, check in CHECKS.items()]
    extras = optional_packages()
    if as_json:
        opt.print_json({"versions": versions(), "devices": found, "optional": extras, "checks": checks})
    else:
        opt.print_table(("package", "version"), versions().items(), left=2)
        opt.print_table(("device", "name", "properties"), map(_device_row, found), left=3)
        rows = [(str(e["package"]), str(e["extra"]), e["version"] or f"not installed: {e['install']}") for e in extras]
        opt.print_table(("optional", "for", "version"), rows, left=3)
        tested = [(str(c["check"]), "ok" if c["ok"] else "failed", f"{c['seconds']:.1f}") for c in checks]
        opt.print_table(("self-test", "result", "seconds"), tested, left=2)
        if (taken := float(str(found[-1]["taken_by_others"]))) >= BUSY:
            echo(f"other processes take {taken} of {found[-1]['cores']} cores: training is slower for it")
    failed = [check for check in checks if not check["ok"]]
    for check in failed:
        echo(f"{check['check']}: {check['problem']}", err=True)
    if failed:
        raise Exit(1)


def versions() -> dict[str, str]:
    """vitkit, Python, and the packages that vitkit cannot do without."""
    known = {"vitkit": vitkit.__version__, "python": platform.python_version(), "system": platform.platform()}
    return known | {name: version_of(name) or "missing" for name, extra in _requirements() if extra is None}


def devices() -> list[dict[str, object]]:
    """Processors and accelerators, the one that is used by default first."""
    import torch

    from vitkit.world import accelerators

    found: list[dict[str, object]] = []
    for device in accelerators():
        found.append({"kind": device.type, "name": "Apple GPU"})
        if device.type == "cuda":
            gpu = torch.cuda.get_device_properties(device)
            found[-1] |= {"name": gpu.name, "memory_gb": round(gpu.total_memory / 1e9, 1)}
    cpu: dict[str, object] = {"kind": "cpu", "name": platform.processor() or platform.machine()}
    cpu |= {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    cpu["taken_by_others"] = taken_by_others()
    cpu["instructions"] = torch.backends.cpu.get_cpu_capability()
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        cpu["memory_gb"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    return [*found, cpu]


def taken_by_others() -> float:
    """Cores that other processes take at the moment, on Linux."""
    from vitkit.training.threads import Neighbours

    neighbours = Neighbours()
    time.sleep(LOOK)
    return neighbours.cores(every=0.0)


def optional_packages() -> list[dict[str, str | None]]:
    """What each extra of vitkit brings, what is there of it, and how to get the rest."""
    found: list[dict[str, str | None]] = []
    for name, extra in _requirements():
        if extra is not None and extra not in _FOR_DEVELOPERS and name != "vitkit":
            version = version_of(name)
            install = None if version else f"pip install 'vitkit[{extra}]'"
            found.append({"package": name, "extra": extra, "version": version, "install": install})
    return found


def _requirements() -> list[tuple[str, str | None]]:
    """(package, extra that brings it) of all that vitkit may use; None: it is always needed."""
    from importlib import metadata

    lines = metadata.requires("vitkit") or ()
    extras = [re.search(r"extra == ['\"]([\w-]+)['\"]", line) for line in lines]
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines]
    return [(name, extra and extra.group(1)) for name, extra in zip(names, extras, strict=True)]


def version_of(package: str) -> str | None:
    """Of what is installed, without importing it."""
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _device_row(device: dict[str, object]) -> tuple[str, str, str]:
    more = [(k, v) for k, v in device.items() if k not in ("kind", "name")]
    properties = ", ".join(f"{k.removesuffix('_gb')} {v}{' GB' if k.endswith('_gb') else ''}" for k, v in more)
    return str(device["kind"]), str(device["name"]), properties


# --- the self-test: small versions of what vitkit is for ----------------------------------------------


def _run(name: str, check: Callable[[], None]) -> dict[str, object]:
    start, problem = time.perf_counter(), None
    try:
        check()
    except Exception as e:  # whatever is wrong with this machine is what was asked for
        problem = f"{type(e).__name__}: {e}"
    seconds = round(time.perf_counter() - start, 2)
    return {"check": name, "ok": problem is None, "seconds": seconds, "problem": problem}


def _attention() -> None:
    import torch

    torch.manual_seed(0)
    model, images = vitkit.create("mu").eval(), torch.randn(2, 3, 32, 32)
    kept: list[torch.Tensor] = []
    with torch.no_grad():
        torch.testing.assert_close(model(images), model(images, on_weights=kept.append))
    torch.testing.assert_close(kept[0].sum(-1), torch.ones_like(kept[0][..., 0]))


def _training() -> None:
    import torch

    torch.manual_seed(0)
    model = vitkit.create("mu", classes=2).train()
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 2
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if not losses[-1] < losses[0] / 2:
        raise RuntimeError(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")


def _saving() -> None:
    import torch

    model = vitkit.create("mu")
    with tempfile.TemporaryDirectory() as folder:
        vitkit.save(model, Path(folder, "model.safetensors"))
        loaded = vitkit.load(Path(folder, "model.safetensors"))
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def _image() -> None:
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a").mkdir()
        Image.effect_noise((64, 48), 50).convert("RGB").save(Path(folder, "a", "image.jpg"))
        if vitkit.open_data(folder).split("all").image(0, 3).size != (64, 48):
            raise RuntimeError("the image has another size")


CHECKS: dict[str, Callable[[], None]] = {
    "build a model; fused and visible attention agree": _attention,
    "train: the loss falls": _training,
    "save and load: every bit the same": _saving,
    "read an image as a model wants it": _image,
}
