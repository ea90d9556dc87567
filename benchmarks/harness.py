"""Timing side by side: several callables interleaved in one run, so that noise meets all of them alike.

A round calls every system in turn, each round starting with another one. Speeds are medians over the rounds, with
their quartiles; ratios are taken within each round, where both systems met the same noise, and are medians of these.

The GEMM limit is the time that a model's multiply-adds would take at the speed of one large `F.linear`,
measured in the same rounds (the fastest of each): 100% means that nothing but matrix products is left. Peak memory is
measured in a process of its own per system: weights, activations and optimiser, without the imported libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.nn.functional as F

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("vitkit", "torch", "timm", "transformers", "torchvision", "vit-pytorch")
GEMM = "large F.linear"


def interleaved(calls: dict[str, Callable[[], Any]], seconds: float, least_rounds: int = 5) -> dict[str, list[float]]:
    """Seconds per call of each, one figure per round.

    Short calls are repeated within a round, for a fifth of a second when there is time: threads of the one before
    may still spin.
    """
    turn = max(0.02, min(0.2, seconds / 100))
    repeats = {}
    for name, call in calls.items():
        call()  # the first call allocates and caches
        call()
        repeats[name] = max(1, min(200, round(turn / max(1e-6, _once(call, 1)))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    names, start, rounds = list(calls), time.perf_counter(), 0
    while rounds < least_rounds or time.perf_counter() - start < seconds:
        for i in range(len(names)):
            name = names[(i + rounds) % len(names)]
            times[name].append(_once(calls[name], repeats[name]))
        rounds += 1
    return times


def _once(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def gemm_call() -> tuple[Callable[[], Any], int]:
    """One large F.linear, and its multiply-adds."""
    x, weight = torch.randn(2048, 1024), torch.randn(1024, 1024)

    def call() -> None:
        with torch.inference_mode():
            F.linear(x, weight)

    return call, 2048 * 1024 * 1024


def compare(
    calls: dict[str, Callable[[], Any]], images: int, macs: float, seconds: float, least_rounds: int
) -> list[dict[str, Any]]:
    """One row per system. `macs` is what one call must multiply and add."""
    gemm, gemm_macs = gemm_call()
    times = interleaved({**calls, GEMM: gemm}, seconds, least_rounds)
    limit = min(times.pop(GEMM)) * macs / gemm_macs
    peers = {name: t for name, t in times.items() if name != "vitkit"} or times
    best = min(peers.values(), key=statistics.median)
    return [
        {
            "system": name,
            **speed(t, images),
            "milliseconds": round(1e3 * statistics.median(t), 4),
            "ratio_to_best_peer": round(statistics.median(ratios(best, t)), 3),
            "ratio_quartiles": quartiles(ratios(best, t), 3),
            "of_gemm_limit": round(limit / min(t), 3),
            "rounds": len(t),
        }
        for name, t in times.items()
    ]


def speed(times: list[float], images: int) -> dict[str, Any]:
    """Throughput of a system: the median over the rounds and its quartiles."""
    rates = [images / t for t in times]
    return {"images_per_second": round(statistics.median(rates), 2), "quartiles": quartiles(rates, 2)}


def ratios(slower: list[float], faster: list[float]) -> list[float]:
    """How many times as fast, round by round."""
    return [a / b for a, b in zip(slower, faster, strict=True)]


def quartiles(values: list[float], digits: int) -> list[float]:
    first, _, third = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [round(first, digits), round(third, digits)]


def megabytes_in_use() -> float:
    return psutil.Process().memory_info().rss / 2**20


def peak_megabytes_of(call: Callable[[], Any]) -> float:
    """The most memory this process held during `call`."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
        call()
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        call()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 1024)


def memory_of(script: str, system: str, model: str, batch: int) -> float | None:
    """Run `script --memory-of system` in a process of its own; it prints the megabytes as its last line."""
    command = [sys.executable, script, "--memory-of", system, "--only", model, "--batch", str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def commit() -> str:
    """The commit that is measured, with a + where files differ from it (results and pages made from them aside)."""
    here = Path(__file__).parent.parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "--", "src") else "")


def machine() -> dict[str, Any]:
    """What the figures depend on; no names of hosts, users or folders."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    packages = {}
    for package in PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "not installed"
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "load_before": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": packages,
    }


def arguments(about: str, models: Sequence[str], systems: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="MODEL", help=f"models of the zoo (default: {' '.join(models)})")
    parser.add_argument("--systems", nargs="+", choices=systems, default=list(systems))
    parser.add_argument("--batch", nargs="+", type=int, help="batch sizes")
    parser.add_argument("--seconds", type=float, default=20.0, help="time spent on each case (default: 20)")
    parser.add_argument("--threads", type=int, help="threads of PyTorch (default: PyTorch's choice)")
    parser.add_argument("--quick", action="store_true", help="about a minute in all: fewer cases, no memory")
    parser.add_argument("--rounds", type=int, default=5, help="at least so many for each case (default: 5)")
    parser.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, help="peak memory too (default: yes, but not with --quick)"
    )
    parser.add_argument("--save", type=Path, help=f"where the JSON goes (default: {RESULTS.name}/; none with --quick)")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as aligned columns."""
    keys = list(rows[0])
    cells = [keys, *([("-" if row[k] is None else str(row[k])) for k in keys] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in cells)


def save(name: str, path: Path | None, about: dict[str, Any], rows: list[dict[str, Any]], quick: bool) -> None:
    if path is None and quick:
        return
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
