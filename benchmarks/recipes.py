"""What stands behind `--budget` for small images: test accuracy on CIFAR-10 by arm and budget.

Arms: vitkit's default command; the same with plain convolutions instead of the whitened stem, with AdamW instead of
Muon, with less or more augmentation; its stem alone, without the Transformer (mean pooling, the same optimisers and
augmentation); the plain ViT (patches of pixels); and the CNN of yardstick.py as a bar to clear, at each of its learning
rates. Every run has the machine to itself and the same seconds on the clock; for vitkit they include choosing,
validation and saving, for "stem alone" and the CNN training only. Accuracies are of the 10,000 test images (+-0.3 to
0.4 points by chance); "test, 6 views" is the mean over six views of every image.

    python benchmarks/recipes.py --minutes 2.5 5             # resumable: what is in the results is not run again
    python benchmarks/recipes.py --arms default cnn --seeds 3
    python benchmarks/recipes.py --quick                     # 20 seconds each, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitkit
import yardstick
from harness import RESULTS, machine, save
from vitkit import TrainConfig, ViTConfig
from vitkit.data import Loader, normalise, open_data, preset
from vitkit.evaluation import evaluation_loader, quick
from vitkit.model import zoo
from vitkit.model.base import Outputs
from vitkit.model.stem import build_stem
from vitkit.tasks.table import task_for
from vitkit.training import optim
from vitkit.training.recipe import choose_model
from vitkit.training.run import train
from vitkit.world import World

SMALL, LARGE = (32, 96, 128), (48, 128, 192)  # widths of the CNN, the second from five minutes on
BATCH = 256
VIEWS = 6  # of every image: the mean of their logits is reported apart
ARMS: dict[str, dict[str, Any]] = {  # settings of the training run
    "default": {},
    "plain convolutions": {"model": "conv+32px/8"},
    "AdamW": {"optimizer": "adamw"},
    "plain ViT": {"model": "vit-32px/4"},
    "no augmentation": {"augment": preset("none", smoothing=0.1)},
    "medium augmentation": {"augment": preset("medium")},
}


def ours(arm: str, seconds: float, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        result = train(TrainConfig(data="cifar10", budget=seconds, seed=seed, out=folder, **ARMS[arm]))
        spent = time.monotonic() - started
        model = json.loads((Path(folder) / "config.json").read_text())["train"]["model"]
        averaged = vitkit.evaluate(folder, "cifar10", views=VIEWS).metrics["top1"]  # off the clock
    found = {"model": model, "test": result.test["top1"], f"test, {VIEWS} views": round(averaged, 4)}
    return {**found, "epochs": result.epochs, "seconds": round(spent, 1)}


class StemAlone(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.stem = build_stem(config.stem, config.channels)  # type: ignore[arg-type]
        self.norm, self.head = nn.LayerNorm(config.stem.out_channels), nn.Linear(config.stem.out_channels, 10)  # type: ignore[union-attr]
        nn.init.zeros_(self.head.weight)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(images).mean((2, 3))))


def stem_alone(seconds: float, seed: int) -> dict[str, Any]:
    """The default model without its Transformer, trained as the default is."""
    torch.manual_seed(seed)
    source = open_data("cifar10").split("train")
    name, _, _ = choose_model((32, 32), 3, World(0, 1, torch.device("cpu")), seconds / len(source))
    config: Any = zoo.config(name)
    model, pre = StemAlone(config), config.preprocessing
    model.stem.whitening.fit(normalise(torch.as_tensor(source.pixels[:500]), pre))
    settings = TrainConfig(optimizer="muon", lr=0.021213, weight_decay=0.05)
    optimizers = optim.build(model, settings)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak"] = group["lr"]
    loader = Loader(source, pre, 128, preset("light"), seed)
    start, seen, spent = time.monotonic(), 0, 0.0
    while spent < seconds:
        for batch in loader:
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * optim.rate(spent / seconds, settings.warmup, "cosine")
                optimizer.zero_grad()
            F.cross_entropy(model(normalise(batch.images, pre)), batch.labels, label_smoothing=0.1).backward()
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], settings.clip)
            for optimizer in optimizers:
                optimizer.step()
            seen, spent = seen + len(batch), time.monotonic() - start
            if spent >= seconds:
                break
    test = evaluation_loader(open_data("cifar10").split("test"), config)
    accuracy = quick(model, test, task=task_for(Outputs(), 10))["top1"]
    return {
        "model": f"stem of {name}",
        "test": accuracy,
        "epochs": round(seen / len(source), 2),
        "seconds": round(spent, 1),
    }


def cnn(seconds: float, seed: int, rate: float) -> dict[str, Any]:
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    widths = SMALL if seconds < 300 else LARGE
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
        logits = model(yardstick.varied(images["train"][chosen], mirrored, random))
        F.cross_entropy(logits, labels["train"][chosen], label_smoothing=yardstick.SMOOTHING).backward()
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
                rates = yardstick.RATES if arm == "cnn" else (0.0,)
                found += [{"minutes": round(minutes, 2), "arm": arm, "seed": seed, "rate": rate} for rate in rates]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, nargs="+", default=[2.5])
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, "stem alone", "cnn"], default=[*ARMS, "stem alone", "cnn"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--save", type=Path, default=RESULTS / "recipes.json")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    target = args.save.with_name("recipes-quick.json") if args.quick else args.save
    rows = json.loads(target.read_text())["rows"] if target.exists() else []
    for job in jobs(args):
        if any(all(row[name] == value for name, value in job.items()) for row in rows):
            continue
        seconds = 60 * job["minutes"]
        if job["arm"] == "cnn":
            made = cnn(seconds, job["seed"], job["rate"])
        else:
            alone = job["arm"] == "stem alone"
            made = stem_alone(seconds, job["seed"]) if alone else ours(job["arm"], seconds, job["seed"])
        rows.append({**job, **made})
        print(rows[-1], flush=True)
        save(Path(__file__).stem, target, machine(), rows, False)


if __name__ == "__main__":
    main()
