"""What looking inside costs: one layer, a whole report, and memory.

    python benchmarks/explain.py                          # ViT-B/16, 8 images: long on a small machine
    python benchmarks/explain.py --quick                  # ViT-Ti/16, one image

One layer: a forward pass that forms the attention of one layer against one that forms none, batch 8.
Report: the time of all arrays (nothing drawn) over that of the forward passes they need, counted as blocks
run, at the speed of plain forward passes of the same batch. Memory, each in a process of its own, above the
model: statistics over 200 images at 224 pixels, and every map of one image of 1024x768.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitkit
from harness import interleaved, machine, megabytes_in_use, peak_megabytes_of, save, table
from vitkit.explanation.build import make
from vitkit.explanation.distance import attention_distance
from vitkit.explanation.subject import LeftOut, Subject, load_images
from vitkit.explanation.table import FIGURES, choose

ONE_LAYER_GOAL, REPORT_GOAL, STATISTICS_GOAL = 1.15, 6.0, 2048.0


def explained_model(name: str, **changes: Any) -> torch.nn.Module:
    """A model with random weights and a classifier that prefers some classes."""
    torch.manual_seed(0)
    model = vitkit.create(name, **changes).eval()
    with torch.no_grad():
        model.head.classifier.weight.normal_(std=0.1)
    return model


def one_layer(name: str, batch: int, seconds: float) -> list[dict[str, Any]]:
    model = explained_model(name)
    images = torch.randn(batch, 3, *model.config.image_size)
    depth = model.config.depth

    def look(layers: list[int]) -> Callable[[], Any]:
        def call() -> None:
            with torch.inference_mode():
                model(images, on_weights=lambda weights: None, layers=layers) if layers else model(images)

        return call

    cases = {"fused": [], "first layer": [0], "middle layer": [depth // 2], "last layer": [depth - 1]}
    times = interleaved({k: look(v) for k, v in cases.items()}, seconds)
    fused = min(times["fused"])
    return [
        {
            "case": f"{case}, batch {batch}",
            "milliseconds": round(1e3 * min(t), 1),
            "ratio": round(min(t) / fused, 3),
            "goal": ONE_LAYER_GOAL,
        }
        for case, t in times.items()
        if case != "fused"
    ]


def subject_of(model: torch.nn.Module, count: int) -> Subject:
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(count):
            coarse = random.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((256, 256)).save(Path(folder) / f"{i}.png")
        images = load_images([folder], model.config)
    return Subject("benchmark", model, images, images)


def whole_report(name: str, count: int) -> list[dict[str, Any]]:
    """Each section by itself, then all: seconds, forward passes, and their ratio."""
    model = explained_model(name)
    subject = subject_of(model, count)
    blocks = [0]
    for block in model.encoder.blocks:
        block.register_forward_hook(lambda module, args, output: blocks.__setitem__(0, blocks[0] + len(args[0])))
    rows = []
    for row in FIGURES:
        blocks[0] = 0
        start = time.perf_counter()
        try:
            make(row, subject)
        except LeftOut:
            continue
        seconds, passes = time.perf_counter() - start, blocks[0] / model.config.depth
        each = seconds_per_image(model) if passes else 0.0
        ratio = round(seconds / (passes * each), 2) if passes else None
        rows.append(
            {"case": row.name, "seconds": round(seconds, 2), "passes": round(passes), "at": each, "ratio": ratio}
        )
    needed = sum(row["passes"] * row["at"] for row in rows)
    total = sum(row["seconds"] for row in rows)
    passes = sum(row["passes"] for row in rows)
    rows.append({"case": f"report, {count} images", "seconds": round(total, 2), "passes": passes, "at": 0.0})
    rows[-1]["ratio"] = round(total / needed, 2)
    for row in rows:
        row["goal"] = REPORT_GOAL if row["case"].startswith("report") else None
        del row["at"]
    return rows


def seconds_per_image(model: torch.nn.Module, batch: int = 8) -> float:
    """Of a plain forward pass, now: other work on the machine changes it from minute to minute."""
    images = torch.randn(batch, 3, *model.config.image_size)
    times = []
    with torch.inference_mode():
        for _ in range(3):
            start = time.perf_counter()
            model(images)
            times.append(time.perf_counter() - start)
    return min(times) / batch


def memory(case: str, name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--memory-of", case, "--model", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def memory_of(case: str, name: str) -> None:
    """In a process of its own: what a case needs above the model, in megabytes."""
    size = (224, 224) if case == "statistics" else (1024, 768)
    attention_distance(explained_model("mu"), torch.randn(1, 3, 32, 32))  # libraries are loaded and warm
    model = explained_model(name, image_size=size)
    before = megabytes_in_use()
    start = time.perf_counter()
    if case == "statistics":
        peak = peak_megabytes_of(lambda: attention_distance(model, torch.randn(200, 3, *size)))
    else:
        subject = subject_of(model, 1)
        maps = ("attention", "relevance", "query", "tokens", "distance", "positions")
        peak = peak_megabytes_of(lambda: [make(row, subject) for row in choose(maps)])
    seconds = round(time.perf_counter() - start, 1)
    goal = STATISTICS_GOAL if case == "statistics" else None
    print(json.dumps({"case": case, "megabytes": round(peak - before), "seconds": seconds, "goal": goal}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name of the zoo (default: vit-b/16)")
    parser.add_argument("--images", "--pictures", type=int, help="images of the report (default: 8)")
    parser.add_argument(
        "--parts", nargs="+", choices=("layer", "report", "memory"), default=["layer", "report", "memory"]
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--memory-of", choices=("statistics", "large"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    name = args.model or ("vit-ti/16" if args.quick else "vit-b/16")
    if args.memory_of:
        return memory_of(args.memory_of, name)
    about, rows = machine(), []
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "layer": lambda: one_layer(name, 8, 3.0 if args.quick else args.seconds),
        "report": lambda: whole_report(name, args.images or (1 if args.quick else 8)),
        "memory": lambda: [memory(case, name) for case in ("statistics", "large")],
    }
    for part in args.parts:
        found = parts[part]()
        print(table(found), flush=True)
        rows += [{"model": name, "part": part} | row for row in found]
    return save("explain", args.save, about, rows, args.quick)


if __name__ == "__main__":
    main()
