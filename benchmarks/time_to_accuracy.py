"""How soon a default run is good: vitkit's own recipe against peers' models with plain AdamW, on the same clock.

Peers are the same width, depth and patch as vitkit's plain model for that image size, trained as most people
do: AdamW, learning rate 1e-3, cosine, batches of 64, the same images with the same light augmentation. All
systems train one after another for the same time with the same threads; evaluation of peers is not on their clock,
vitkit's is. Accuracies are of the 10,000 test images: +-0.1 to 0.5 points by chance of the images, and more by that of
the seed (--seeds).

    python benchmarks/time_to_accuracy.py                    # MNIST for 5 minutes, CIFAR-10 for 20: an hour and a half
    python benchmarks/time_to_accuracy.py --short            # 1 and 2.5 minutes
    python benchmarks/time_to_accuracy.py --quick            # a minute, to see that it runs

With two cores two systems can be trained side by side, each on a core of its own, and be put together at the end:

    taskset -c 0 python benchmarks/time_to_accuracy.py --systems vitkit --threads 1 --save a.json
    taskset -c 1 python benchmarks/time_to_accuracy.py --systems timm --threads 1 --save b.json
    python benchmarks/time_to_accuracy.py --join a.json b.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `vitkit train` has it, for all

import torch
import torch.nn.functional as F

from harness import machine, save
from systems import SYSTEMS, shape
from vitkit import TrainConfig
from vitkit.data import Loader, drop_unsafe_flip, normalise, open_data, preset
from vitkit.evaluation import evaluation_loader, quick
from vitkit.model.base import Outputs
from vitkit.tasks.table import task_for
from vitkit.training.optim import rate
from vitkit.training.run import train

#         minutes, minutes of the short form, the plain model
CASES = {"mnist": (5.0, 1.0, "vit-28px/7"), "cifar10": (20.0, 2.5, "vit-32px/4"), "digits": (1.0, 0.2, "vit-8px/2")}
PEERS = ("timm", "vit-pytorch")
BATCH, RATE, LOOKS = 64, 1e-3, 8


def peer(system: str, data: str, seconds: float, seed: int) -> dict[str, Any]:
    """Train a peer's model until the time is up; its test accuracy at several moments."""
    torch.manual_seed(seed)
    source, config = open_data(data).split("train"), shape(CASES[data][2])
    logits_of, model = SYSTEMS[system](config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loader = Loader(source, config.preprocessing, BATCH, augment=drop_unsafe_flip(preset("light"), source.flip_safe))
    test, task = evaluation_loader(open_data(data).split("test"), config), task_for(Outputs(), len(source.classes))
    spent, images, looks = 0.0, 0, []
    start = time.monotonic()  # moved on by the time that evaluations take
    while spent < seconds:
        for batch in loader:
            for group in optimizer.param_groups:
                group["lr"] = RATE * rate(spent / seconds, 0.05, "cosine")
            optimizer.zero_grad()
            inputs = normalise(batch.images, config.preprocessing)
            F.cross_entropy(logits_of(inputs), batch.labels).backward()
            optimizer.step()
            spent = time.monotonic() - start
            images += len(batch)
            if spent >= min(seconds, (len(looks) + 1) / LOOKS * seconds):
                paused = time.monotonic()
                top1 = quick(model, test, task=task)["top1"]
                start += time.monotonic() - paused
                looks.append({"seconds": round(spent, 1), "test": round(top1, 4)})
                _say(system, data, looks[-1])
            if spent >= seconds:
                break
    parameters = sum(p.numel() for p in model.parameters())
    return {"system": system, "data": data, "parameters": parameters, "images": images, "looks": looks}


def ours(data: str, seconds: float, seed: int) -> dict[str, Any]:
    """`vitkit train DATA --budget ...`, nothing else said."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        result = train(TrainConfig(data=data, budget=seconds, seed=seed, out=folder))
        look = {"seconds": round(time.monotonic() - started, 1), "test": round(result.test["top1"], 4)}
        from vitkit import load

        parameters = sum(p.numel() for p in load(f"{folder}/model.safetensors").parameters())
    _say("vitkit", data, look)
    images = round(result.epochs * len(open_data(data).split("train")))
    return {"system": "vitkit", "data": data, "parameters": parameters, "images": images, "looks": [look]}


def _say(system: str, data: str, look: dict[str, float]) -> None:
    print(f"{data:8} {system:12} {look['seconds']:7.1f} s   test {100 * look['test']:.2f}%", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=[d for d in CASES if d != "digits"])
    parser.add_argument("--systems", nargs="+", choices=("vitkit", *PEERS), default=["vitkit", *PEERS])
    parser.add_argument("--minutes", type=float, help="for each system (default: 5 for MNIST, 20 for CIFAR-10)")
    parser.add_argument("--short", action="store_true", help="1 minute for MNIST, 2.5 for CIFAR-10")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each system (default: 1)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--save", type=Path, help="where to write the results")
    parser.add_argument("--join", type=Path, nargs="+", help="train nothing: put these results together")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.join:
        parts = [json.loads(path.read_text()) for path in args.join]
        save(
            Path(__file__).stem, args.save, parts[0]["machine"], [row for part in parts for row in part["rows"]], False
        )
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    chosen = ["digits"] if args.quick else args.data or ["mnist", "cifar10"]
    about, rows = machine(), []
    for data in chosen:
        seconds = 60 * (args.minutes or CASES[data][1 if args.short or args.quick else 0])
        for seed in range(args.seeds):
            for system in args.systems:
                row = ours(data, seconds, seed) if system == "vitkit" else peer(system, data, seconds, seed)
                rows.append({**row, "seed": seed})
    save(Path(__file__).stem, args.save, about, rows, args.quick)


if __name__ == "__main__":
    sys.exit(main())
