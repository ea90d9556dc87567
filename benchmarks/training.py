"""Three questions about training, answered with the command itself; writes results/training.json.

processes      Two processes of one thread (torchrun, DDP) against one process of two threads: img/s,
               from the difference between a long and a short run, so that starting up does not count. Goal: 0.9x.
memory         Peak memory and time of a step of ViT-B/16 with and without gradient checkpointing.
fine-tuning    Digits: train at 8 pixels, then go on at 16 with resized positions; against training at 16 from
               scratch for the same seconds, a linear probe and LoRA. Where each starts, and where it ends.

    python benchmarks/training.py              # about eight minutes
    python benchmarks/training.py --quick      # a minute, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from harness import machine, megabytes_in_use, peak_megabytes_of, save
from vitkit import TrainConfig, create, load, train
from vitkit.data import open_data
from vitkit.evaluation import evaluation_loader
from vitkit.evaluation import quick as quick_look

MODEL = "conv+8px/2"  # of fine-tuning: made for 8 pixels


def processes(quick: bool) -> list[dict[str, Any]]:
    short, long = (4, 8) if quick else (10, 60)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rng = np.random.default_rng(0)
        pixels, labels = rng.integers(0, 256, (4096, 32, 32, 3), dtype=np.uint8), np.arange(4096) % 10
        parts = {"x_train": pixels, "y_train": labels, "x_val": pixels[:64], "y_val": labels[:64]}
        np.savez(folder / "noise.npz", **parts)  # type: ignore[arg-type]
        spent: dict[tuple[int, int], list[float]] = {}  # by processes and steps
        for turn in range(1 if quick else 3):
            for count in (1, 2):
                for steps in (short, long):
                    spent.setdefault((count, steps), []).append(_run(folder, f"{turn}-{count}-{steps}", count, steps))
    # The least disturbed run of each length: a short one that was disturbed must not make the steps look quick.
    seconds = {n: (min(spent[n, long]) - min(spent[n, short])) / (long - short) for n in (1, 2)}
    rows = [{"processes": n, "threads": 2 // n, "images_per_second": round(128 / seconds[n], 1)} for n in seconds]
    ratio = seconds[1] / seconds[2]
    print(f"two processes of one thread: {ratio:.2f}x the images/s of one process with two threads", flush=True)
    return [{"question": "processes", **row, "ratio": round(ratio, 3)} for row in rows]


def _run(folder: Path, name: str, count: int, steps: int) -> float:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
    words = ["-m", "vitkit", "train", str(folder / "noise.npz"), "--model", "vit-32px/4", "--steps", str(steps)]
    words += ["--batch-size", "128", "--out", str(folder / name), "--set", "evaluations=1"]
    words += ["--set", "optimizer=adamw", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(2 // count)}
    done = subprocess.run(
        [sys.executable, *launch, *words], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return float(json.loads((folder / name / "result.json").read_text())["seconds"])


def memory(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for checkpointing in (False, True):
        words = [sys.executable, __file__, "--step-of", "mu" if quick else "vit-b/16", str(int(checkpointing))]
        found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        rows.append({"question": "memory", "gradient_checkpointing": checkpointing, **found})
        print(rows[-1], flush=True)
    return rows


def step_of(name: str, checkpointing: bool) -> dict[str, Any]:
    model: Any = create(name)
    model.gradient_checkpointing = checkpointing
    images = torch.randn(8, model.config.channels, *model.config.image_size)
    before = megabytes_in_use()

    def step() -> None:
        F.cross_entropy(model(images), torch.zeros(8, dtype=torch.long)).backward()

    peak = peak_megabytes_of(step)
    start = time.monotonic()
    step()
    return {"model": name, "batch": 8, "megabytes": round(peak - before), "seconds": round(time.monotonic() - start, 2)}


def fine_tuning(quick: bool) -> list[dict[str, Any]]:
    steps, seconds = (20, [2.0]) if quick else (600, [10.0, 30.0])
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        small = f"{temporary}/small"
        train(TrainConfig(data="digits", model=MODEL, steps=steps, out=small))
        start = test_accuracy(small)
        print(f"untrained at twice the size: {start:.1%}", flush=True)
        arms: dict[str, dict[str, Any]] = {
            "fine-tuned": {"init": small},
            "LoRA": {"init": small, "lora": 4},
            "linear probe": {"init": small, "freeze": "backbone"},
            "from scratch": {"model": MODEL},
        }
        for budget in seconds:
            for name, settings in arms.items():
                out = f"{temporary}/{name} {budget}"
                result = train(TrainConfig(data="digits", image_size=(16, 16), budget=budget, out=out, **settings))
                row = {"question": "fine-tuning", "arm": name, "start": round(start if "init" in settings else 0.1, 4)}
                row |= {"test": round(result.test["top1"], 4), "steps": result.steps, "seconds": budget}
                rows.append(row)
                print(row, flush=True)
    return rows


def test_accuracy(run: str) -> float:
    """Of digits at twice the size, before anything is learned about it."""
    model: Any = load(run, image_size=(16, 16))
    return quick_look(model, evaluation_loader(open_data("digits").split("test"), model.config))["top1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("processes", "memory", "fine-tuning"))
    parser.add_argument("--save", type=Path, help="where to write the results")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--step-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step_of:
        return print(json.dumps(step_of(args.step_of[0], args.step_of[1] == "1")))
    about, rows = machine(), []
    for name, question in (("processes", processes), ("memory", memory), ("fine-tuning", fine_tuning)):
        if not args.only or name in args.only:
            rows += question(args.quick)
    return save(Path(__file__).stem, args.save, about, rows, args.quick)


if __name__ == "__main__":
    main()
