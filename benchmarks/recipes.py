"""What stands behind `--budget` for small images: test accuracy by arm and budget, on CIFAR-10, MNIST and digits.

Arms: vitkit's default command; the same with plain convolutions instead of the whitened stem, with AdamW instead of
Muon, with less or more augmentation; the same without the Transformer's blocks; the plain ViT (patches of pixels); the
CNN of yardstick.py as a bar to clear, at each of its learning rates; timm's and vit-pytorch's ViT of the plain one's
size with AdamW, as time_to_accuracy.py trains them; and `demo`, which is `vitkit demo` whatever the minutes. Every run
has the machine to itself and the same seconds on the clock; for vitkit they include choosing, validation and saving,
for the others training only. Accuracies are of all test images; "test, views" is of the mean over six views of each,
five where mirror images mean something else.

    python benchmarks/recipes.py --minutes 2.5 5             # resumable: what is in the results is not run again
    python benchmarks/recipes.py --arms default cnn --seeds 3
    python benchmarks/recipes.py --data mnist --arms default timm --minutes 1 5 --seeds 3
    python benchmarks/recipes.py --data digits --arms demo --seeds 10
    python benchmarks/recipes.py --show                      # the table of what is in the results
    python benchmarks/recipes.py --quick                     # 20 seconds each, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `vitkit train` has it, for all

import torch
import torch.nn.functional as F

import vitkit
import yardstick
from harness import RESULTS, machine, save, table
from time_to_accuracy import CASES, PEERS, peer
from vitkit import TrainConfig
from vitkit.data import open_data, preset
from vitkit.model.encoder import Block
from vitkit.training.run import train
from vitkit.world import has_bf16

WIDTHS = {0: (48, 128, 192), 5: (64, 256, 256)}  # of the CNN, from so many minutes on: airbench's own
BATCH = 512
VIEWS = 6  # of every image with mirror images: the mean of their logits is reported apart
NO_BLOCKS = "no Transformer"  # its blocks give back what they are given
ARMS: dict[str, dict[str, Any]] = {  # settings of the training run
    "default": {},
    "plain convolutions": {"model": "conv+32px/8"},
    "AdamW": {"optimizer": "adamw"},
    "plain ViT": {"model": "vit-32px/4"},
    "no augmentation": {"augment": preset("none", smoothing=0.1)},
    "medium augmentation": {"augment": preset("medium")},
    NO_BLOCKS: {},
}


def ours(data: str, arm: str, seconds: float, seed: int) -> dict[str, Any]:
    length = {"epochs": 60.0} if arm == "demo" else {"budget": seconds, **ARMS[arm]}
    nothing = patch.object(Block, "forward", lambda _, x, *__, **___: x) if arm == NO_BLOCKS else nullcontext()
    with nothing, tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        result = train(TrainConfig(data=data, seed=seed, out=folder, **length))
        spent = time.monotonic() - started
        model = json.loads((Path(folder) / "config.json").read_text())["train"]["model"]
        views = VIEWS if open_data(data).split("test").flip_safe else VIEWS - 1
        averaged = vitkit.evaluate(folder, data, views=views).metrics["top1"]  # off the clock
    found = {"model": model, "test": result.test["top1"], "test, views": round(averaged, 4)}
    return {**found, "epochs": result.epochs, "seconds": round(spent, 1)}


def theirs(system: str, data: str, seconds: float, seed: int) -> dict[str, Any]:
    found = peer(system, data, seconds, seed)
    last = found["looks"][-1]
    epochs = round(found["images"] / len(open_data(data).split("train")), 2)
    model = f"{system}, the size of {CASES[data][2]}"
    return {"model": model, "test": last["test"], "epochs": epochs, "seconds": last["seconds"]}


def cnn(seconds: float, seed: int, rate: float) -> dict[str, Any]:
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    widths = WIDTHS[max(least for least in WIDTHS if 60 * least <= seconds)]
    half = torch.autocast("cpu", torch.bfloat16, enabled=has_bf16(torch.device("cpu")))
    parts = {split: open_data("cifar10").split(split) for split in ("train", "test")}
    pixels = {split: torch.as_tensor(part.pixels).float() / 255 for split, part in parts.items()}
    labels = {split: torch.as_tensor(part.labels) for split, part in parts.items()}
    mean, std = (f(pixels["train"], (0, 2, 3), keepdim=True) for f in (torch.mean, torch.std))
    images = {split: (x - mean) / std for split, x in pixels.items()}
    model = yardstick.Cnn(images["train"][:5000], widths)
    optimizer = yardstick.optimizer_of(model, rate, BATCH)
    peaks = [group["lr"] for group in optimizer.param_groups]
    batches = yardstick.epochs_of(len(images["train"]), BATCH, random)
    start, seen, spent = time.monotonic(), 0, 0.0
    while spent < seconds:
        chosen, mirrored = next(batches)  # type: ignore[call-overload]
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * yardstick.share(min(1.0, spent / seconds))
        optimizer.zero_grad()
        with half:
            logits = model(yardstick.varied(images["train"][chosen], mirrored, random))
        F.cross_entropy(logits.float(), labels["train"][chosen], label_smoothing=yardstick.SMOOTHING).backward()
        optimizer.step()
        seen, spent = seen + len(chosen), time.monotonic() - start
    model.eval()
    with torch.inference_mode():
        found = torch.cat([model(x).argmax(1) for x in images["test"].split(500)])
    accuracy = (found == labels["test"]).double().mean().item()
    epochs = round(seen / len(images["train"]), 2)
    return {"model": f"CNN {widths}, rate {rate:g}", "test": accuracy, "epochs": epochs, "seconds": round(spent, 1)}


def jobs(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for minutes in [1 / 3] if args.quick else args.minutes:
        for seed in range(args.seeds):
            for arm in args.arms:
                rates = args.rates if arm == "cnn" else (0.0,)
                same = {"data": args.data, "minutes": 0.0 if arm == "demo" else round(minutes, 2), "arm": arm}
                found += [{**same, "seed": seed, "rate": rate} for rate in rates]
    return found


def measured(data: str, minutes: float, arm: str, seed: int, rate: float) -> dict[str, Any]:
    seconds = 60 * minutes
    if arm == "cnn":
        return cnn(seconds, seed, rate)
    return theirs(arm, data, seconds, seed) if arm in PEERS else ours(data, arm, seconds, seed)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean, deviation and least over the seeds of every arm."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["data"], row["minutes"], row["arm"], row["model"]), []).append(row)
    found = []
    for (data, minutes, arm, model), same in sorted(cases.items(), key=lambda case: case[0]):
        test = [100 * row["test"] for row in same]
        spread = f"{statistics.stdev(test):.2f}" if len(test) > 1 else ""
        line = {"data": data, "minutes": minutes or "", "arm": arm, "model": model, "seeds": len(test)}
        mean, epochs = statistics.mean(test), statistics.mean(row["epochs"] for row in same)
        found.append(
            {**line, "test": f"{mean:.2f}%", "sd": spread, "least": f"{min(test):.2f}%", "epochs": f"{epochs:.1f}"}
        )
    return found


def main() -> None:
    every = [*ARMS, "cnn", *PEERS, "demo"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=CASES, default="cifar10", help="(default: cifar10; the CNN knows no other)")
    parser.add_argument("--minutes", type=float, nargs="+", default=[2.5])
    parser.add_argument("--arms", nargs="+", choices=every, default=every[:-1])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=yardstick.RATES, help="of the CNN")
    parser.add_argument("--save", type=Path, default=RESULTS / "recipes.json")
    parser.add_argument("--show", action="store_true", help="print the table of what is in the results and run nothing")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.data != "cifar10" and "cnn" in args.arms:
        parser.error("the CNN is made for cifar10; name other --arms")
    target = args.save.with_name("recipes-quick.json") if args.quick else args.save
    rows = json.loads(target.read_text())["rows"] if target.exists() else []
    for job in [] if args.show else jobs(args):
        if not any(all(row[name] == value for name, value in job.items()) for row in rows):
            about = machine()
            rows.append({**job, **measured(**job), "date": about["date"], "commit": about["commit"]})
            print(rows[-1], flush=True)
            save(Path(__file__).stem, target, about, rows, False)
    print(table(summary(rows)))


if __name__ == "__main__":
    main()
