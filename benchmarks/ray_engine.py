"""The same job by torchrun and by Ray, two workers each: are the rows the same, and how fast is it?

    python benchmarks/ray_engine.py              # 20,000 small images, three rounds of each, then one with kills
    python benchmarks/ray_engine.py --quick      # 2,000 images, one round

Two models: ViT-Ti/8, and one so small that little but the engine itself is measured. The two engines take turns, each
round beginning with the other. `images_per_second` is that of the work itself: images after the first finished piece,
over the time from that piece to the last. `seconds` is the whole command, with the start of Python and, for Ray, of
its own processes. In the last round two workers of Ray are killed (SIGKILL) on the way.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from harness import machine, save, table

BATCH = 64
WORKERS = 2
MODELS = {
    "ViT-Ti/8": {"width": 192, "depth": 12, "heads": 3, "mlp_width": 768},
    "4 layers of 96": {"width": 96, "depth": 4, "heads": 3, "mlp_width": 384},
}


def stage(folder: Path, count: int, sizes: dict[str, int]) -> None:
    import vitkit
    from vitkit.model.config import ViTConfig

    torch.manual_seed(0)
    config = ViTConfig(image_size=32, patch_size=8, classes=10, **sizes)
    names = tuple(f"class {i}" for i in range(10))
    model = vitkit.create(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    vitkit.save(model, folder / "model.safetensors", class_names=names)
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "small.npz", images=pixels, labels=np.arange(count) % 10)


def command(system: str, folder: Path, out: Path) -> list[str]:
    job = ["vitkit", "predict", str(folder / "model.safetensors"), str(folder / "small.npz"), "--out", str(out)]
    job += ["--batch-size", str(BATCH)]
    launch = [sys.executable, "-m"]
    if system == "torchrun":
        return [*launch, "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}", "-m", *job]
    return [*launch, *job, *(["--engine", "ray", "--processes", str(WORKERS)] if system != "plain" else [])]


def run(system: str, folder: Path, out: Path, kills: tuple[float, ...] = (), count: int = 0) -> dict[str, Any]:
    """One command, watched by the files it writes; a worker is killed when so much of the job is done."""
    parts, seen, killed, left = out.with_name(f"{out.name}.parts"), dict[str, float](), 0, list(kills)
    start = time.perf_counter()
    log = out.with_name(f"{out.name}.log")
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command(system, folder, out), env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=errors, stderr=errors
        )
        while process.poll() is None:
            seen |= {p.name: p.stat().st_mtime for p in _files(parts) if p.name not in seen}
            if left and len(seen) * 4 * BATCH >= left[0] * count:
                killed += kill_one(process.pid)
                left.pop(0)
            time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{system} failed: {log.read_text()[-2000:]}")
    times = sorted(seen.values())
    rate = (len(times) - 1) * 4 * BATCH / max(1e-9, times[-1] - times[0])
    return {
        "system": system,
        "images_per_second": round(rate, 1),
        "seconds": round(time.perf_counter() - start, 1),
        "killed": killed,
    }


def _files(folder: Path) -> list[Path]:
    try:
        return [p for p in folder.iterdir() if p.suffix == ".jsonl" and not p.name.startswith(".") and p.exists()]
    except OSError:
        return []


def kill_one(driver: int) -> int:
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if "MapBatches(Worker)" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)
                return 1
        except psutil.Error:
            continue
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1, help="(each worker has one)")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    count, rounds = (2_000, 1) if args.quick else (20_000, args.rounds)
    about, rows = machine(), list[dict[str, Any]]()
    about |= {"images": count, "workers": WORKERS, "ray": __import__("ray").__version__}
    for name, sizes in MODELS.items():
        rows += [{"model": name, **row} for row in measured(count, rounds, sizes)]
        ratios = [rate(rows, name, "ray", n) / rate(rows, name, "torchrun", n) for n in range(rounds)]
        about |= {f"ratios, {name}": [round(r, 3) for r in ratios]}
        about |= {f"median ratio, {name}": round(statistics.median(ratios), 3)}
        print(table(rows), f"\nray / torchrun, {name}: {about[f'ratios, {name}']}", flush=True)
    save("ray", args.save, about, rows, args.quick)


def rate(rows: list[dict[str, Any]], model: str, system: str, number: int) -> float:
    wanted = (model, system, number)
    return next(float(r["images_per_second"]) for r in rows if (r["model"], r["system"], r["round"]) == wanted)


def measured(count: int, rounds: int, sizes: dict[str, int]) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        stage(folder, count, sizes)
        run("plain", folder, folder / "plain.parquet")
        expected = (folder / "plain.parquet").read_bytes()
        for number in range(rounds):
            for system in ("torchrun", "ray") if number % 2 else ("ray", "torchrun"):
                row = run(system, folder, folder / f"{system}-{number}.parquet")
                rows.append(checked(row, folder, number, expected))
                print(rows[-1], flush=True)
        kills = run("ray", folder, folder / "ray-killed.parquet", (0.2, 0.5), count) | {"system": "ray, killed"}
        rows.append(checked(kills, folder, "killed", expected))
    return rows


def checked(row: dict[str, Any], folder: Path, number: int | str, expected: bytes) -> dict[str, Any]:
    """The file is the plain command's, byte for byte."""
    system = row["system"].split(",")[0]
    same = (folder / f"{system}-{number}.parquet").read_bytes() == expected
    return {**row, "round": number, "same_as_plain": same}


if __name__ == "__main__":
    main()
