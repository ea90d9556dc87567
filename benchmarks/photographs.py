"""Photographs in folders by class: what a head on a frozen model costs, and what fine-tuning reaches beside timm.

frozen    245 photographs, a ViT-S/14 at 224 pixels. Seconds of `vitkit train --freeze backbone`, from outside and on
          the clock of the run (which fits a baseline, searches the head and evaluates it too), as multiples of one
          plain forward pass over the same images: files to features, with the run's threads and loading processes. The
          goal is 1.3. Random weights give the time; with `--init` that checkpoint too, and its head is compared with
          scikit-learn's LogisticRegressionCV, with and without standardising, on the same features of the same
          training images. Both are tested on the test images and on up to 500 that are not among the 245.
finetune  The checkpoint `--init` and the same seconds for each system: vitkit's default command, the same at the
          checkpoint's image size, with `--lora 8` and with `--freeze backbone`; and timm's parts, put together with
          care: AdamW, layer decay 0.75, RandAugment, random resized crops, flips, label smoothing, warm-up and a cosine
          over the clock, in bf16 where that is faster here. timm has all of the time at each of three learning rates;
          the one with the best validation counts. Its best test, which nobody could choose, is printed as a bound.

vitkit's clock holds the start of the command, its search of the learning rate, validation, test and saving; timm's its
training alone. All learn from the same images (65%; 10% are for validation, 25% for the test, by class and seed) and
are tested, off the clock, on all test images in their own preprocessing: an accuracy p of n images is known to within
2 sqrt(p (1 - p) / n), that of the seed apart.

    python benchmarks/photographs.py FOLDER ... --init CHECKPOINT      # an hour for each folder; resumable
    python benchmarks/photographs.py FOLDER --seeds 1                  # the time of a frozen one alone: two minutes
    python benchmarks/photographs.py --quick                           # two minutes, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain, repeat
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `vitkit train` has it: for timm and the plain pass too
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import peers
import vitkit
from harness import RESULTS, machine, save
from vitkit.checkpoints.load import open_checkpoint
from vitkit.checkpoints.writing import write
from vitkit.data import normalise, open_data
from vitkit.errors import VitkitError
from vitkit.evaluation import evaluation_loader, quick
from vitkit.evaluation.features import features
from vitkit.evaluation.run import evaluating

SHARES = {"test": 0.25, "val": 0.1}  # of each class; the rest is for training
PHOTOGRAPHS, FURTHER, SIZE, RANDOM = 245, 500, 224, "ViT-S/14, random weights"
OURS = {  # what is added to `vitkit train PHOTOS --init CHECKPOINT --budget ...`
    "vitkit": [],
    "vitkit, own size": ["--image-size", "SIZE"],
    "vitkit, LoRA": ["--lora", "8"],
    "vitkit, head": ["--freeze", "backbone"],
}
RATES = (1e-4, 5e-4, 1e-3)  # of timm
BATCH, LOADERS, WEIGHT_DECAY, LAYER_DECAY, SMOOTHING, WARMUP = 32, 2, 0.05, 0.75, 0.1, 0.1


def divided(folder: str, seed: int, work: Path, count: int = 0) -> Path:
    """Links to the photographs, or to so many of them, in train/, val/ and test/; the others are in left/."""
    mixed, taken, seen = random.Random(seed), 0, 0
    classes = sorted(entry for entry in Path(folder).resolve().iterdir() if entry.is_dir())
    files = {one.name: sorted(one.iterdir()) for one in classes}
    share = min(1.0, count / sum(map(len, files.values()))) if count else 1.0
    for name, paths in files.items():
        mixed.shuffle(paths)
        seen += len(paths)
        some = round(share * seen) - taken
        taken += some
        test, val = (round(SHARES[split] * some) for split in ("test", "val"))
        splits = ["photos/test"] * test + ["photos/val"] * val + ["photos/train"] * (some - test - val)
        for path, split in zip(paths, [*splits, *["left"] * (len(paths) - some)], strict=True):
            link = work / split / name / path.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    return work / "photos"


def trained(*words: object, out: Path) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """`vitkit train` as a user would type it: its seconds from outside, what it reached, what it was made with."""
    line = [sys.executable, "-m", "vitkit", "train", *map(str, words), "--out", str(out)]
    before = time.monotonic()
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - before
    if done.returncode:
        raise VitkitError(done.stderr.strip()[-1000:])
    result, config = (json.loads((out / name).read_text()) for name in ("result.json", "config.json"))
    return seconds, result, config


def frozen(photos: Path, init: str, seed: int, real: bool, size: int) -> dict[str, Any]:
    words = (photos, "--init", init, "--freeze", "backbone", "--image-size", size, "--seed", seed)
    outside, result, config = trained(*words, out=photos.parent / "run")
    threads = torch.get_num_threads()
    torch.set_num_threads(config["train"]["threads"])
    model: Any = vitkit.load(init, image_size=size)
    data = open_data(photos)
    seconds = forward(model, data, config["train"]["workers"])
    row = {"photographs": sum(data.splits.values()), "forward": round(seconds, 2), "passes": result["epochs"]}
    for name, taken in (("command", outside), ("run", result["seconds"])):
        row |= {name: round(taken, 2), f"{name} / forward": round(taken / seconds, 3)}
    found = heads(model, vitkit.load(photos.parent / "run"), data, photos.parent / "left", seed) if real else {}
    torch.set_num_threads(threads)
    return row | found


def forward(model: Any, data: Any, workers: int) -> float:
    """Seconds of a pass over all photographs, from files to features."""
    start = time.monotonic()
    for split in ("train", "val", "test"):
        with evaluating(model), evaluation_loader(data.split(split), model.config, workers=workers) as loader:
            for batch in loader:
                model.pooled(normalise(batch.images, loader.pre))
    return time.monotonic() - start


def heads(model: Any, tuned: Any, data: Any, left: Path, seed: int) -> dict[str, Any]:
    """Test accuracy of vitkit's head and of scikit-learn's, on the same features."""
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    warnings.simplefilter("ignore", FutureWarning)  # of arguments whose defaults will change
    further = open_data(left).split("all")
    assert further.classes == data.classes, "a class has no photographs beyond those that are taken"
    further = further.take(np.random.default_rng(seed).permutation(len(further))[:FURTHER])
    known, *asked = (features(model, part) for part in (data.split("train"), data.split("test"), further))
    x, labels = (torch.cat([getattr(part, name) for part in asked]) for name in ("values", "labels"))
    with torch.inference_mode():
        right = tuned.classifiers[0](x).argmax(-1) == labels
    row = {"images": len(labels), "vitkit": round(right.double().mean().item(), 4)}
    folds = max(2, min(5, *Counter(known.labels.tolist()).values()))
    for name, before in (("scikit-learn", []), ("scikit-learn, standardised", [StandardScaler()])):
        head = make_pipeline(*before, LogisticRegressionCV(Cs=15, cv=folds, scoring="accuracy", max_iter=5000))
        head.fit(known.values.numpy(), known.labels.numpy())
        row[name] = round(float(head.score(x.numpy(), labels.numpy())), 4)
    return row


def ours(system: str, photos: Path, init: str, size: int, seconds: float, seed: int) -> dict[str, Any]:
    options = [str(size) if word == "SIZE" else word for word in OURS[system]]
    words = (photos, "--init", init, *options, "--budget", f"{seconds:.0f}s", "--seed", seed)
    spent, result, config = trained(*words, out=photos.parent / "run")
    model: Any = vitkit.load(photos.parent / "run")
    found = quick(model, evaluation_loader(open_data(photos).split("test"), model.config))
    return {
        "test": round(found["top1"], 4),
        "images": found["samples"],
        "validation": round(result["best"]["top1"], 4),
        "seconds": round(spent, 1),
        "epochs": round(result["epochs"], 2),
        "size": config["model"]["image_size"][0],
        "rate": config["train"]["lr"],
        "precision": config["train"]["precision"],
    }


def theirs(rate: float, photos: Path, init: str, size: int, seconds: float, seed: int) -> dict[str, Any]:
    timm = peers.import_timm()
    from timm.data import ImageDataset, auto_augment, create_loader, resolve_model_data_config
    from timm.optim import create_optimizer_v2

    torch.manual_seed(seed)
    random.seed(seed)  # of RandAugment, in the loading processes
    parts = {split: ImageDataset(str(photos / split)) for split in ("train", "val", "test")}
    write(open_checkpoint(init), photos.parent / "timm", "timm")
    classes = len(parts["train"].reader.class_to_idx)
    model: nn.Module = timm.create_model(f"local-dir:{photos.parent}/timm", pretrained=True, num_classes=classes)
    about = resolve_model_data_config(model)
    how = {name: about[name] for name in ("interpolation", "mean", "std", "crop_pct")} | {"device": torch.device("cpu")}
    how |= {"input_size": (3, size, size), "batch_size": BATCH, "num_workers": LOADERS, "use_prefetcher": False}
    loaders = {split: create_loader(parts[split], **how) for split in ("val", "test")}
    varied = {"is_training": True, "auto_augment": "rand-m9-mstd0.5-inc1", "hflip": 0.5, "re_prob": 0.0}
    # At the highest levels an image is posterised to 0 bits, which Pillow refuses by now.
    plain = auto_augment.posterize
    auto_augment.NAME_TO_OP["PosterizeIncreasing"] = lambda image, bits, **more: plain(image, max(1, bits), **more)
    batches = chain.from_iterable(repeat(create_loader(parts["train"], **how, **varied)))
    optimizer = create_optimizer_v2(model, opt="adamw", lr=rate, weight_decay=WEIGHT_DECAY, layer_decay=LAYER_DECAY)
    half = faster_in_bf16(model, size)
    spent, seen, start = 0.0, 0, time.monotonic()
    while spent < seconds:
        images, labels = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"] * share(spent / seconds)
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            logits = model(images)
        optimizer.zero_grad()
        F.cross_entropy(logits.float(), labels, label_smoothing=SMOOTHING).backward()
        optimizer.step()
        seen, spent = seen + len(labels), time.monotonic() - start
    validation, test = (tested(model, loaders[split]) for split in ("val", "test"))
    return {
        "test": round(test[0], 4),
        "images": len(parts["test"]),
        "validation": round(validation[0], 4),
        "validation loss": round(validation[1], 4),
        "seconds": round(spent, 1),
        "epochs": round(seen / len(parts["train"]), 2),
        "size": size,
        "rate": rate,
        "precision": "bf16" if half else "fp32",
    }


def share(progress: float) -> float:
    """Of the peak learning rate."""
    return progress / WARMUP if progress < WARMUP else (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP))) / 2


def faster_in_bf16(model: nn.Module, size: int) -> bool:
    """Whether steps are, here; off the clock. The weights stay as they are."""
    images, took = torch.randn(BATCH, 3, size, size), {}
    for half in (False, True, False, True):  # the second time counts: the first allocates
        start = time.monotonic()
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            loss = model.train()(images).float().mean()
        loss.backward()
        took[half] = time.monotonic() - start
    model.zero_grad()
    return took[True] < took[False]


@torch.inference_mode()
def tested(model: nn.Module, loader: Any) -> tuple[float, float]:
    """Accuracy and loss, in fp32."""
    found = [(model.eval()(images), labels) for images, labels in loader]
    logits, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    return (logits.argmax(-1) == labels).double().mean().item(), F.cross_entropy(logits, labels).item()


def jobs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What names a row."""
    checkpoint = Path(args.init).name if args.init else ""
    for folder in args.data:
        for seed in range(args.seeds):
            same = {"data": Path(folder).name, "seed": seed}
            if "frozen" in args.parts:
                yield from ({"part": "frozen", **same, "model": model} for model in (RANDOM, checkpoint) if model)
            if "finetune" in args.parts and checkpoint:
                same |= {"model": checkpoint, "minutes": round(args.minutes, 3)}
                for system in args.systems:
                    rates = args.rates if system == "timm" else ()
                    names = [f"timm, rate {rate:g}" for rate in rates] or [system]
                    yield from ({"part": "finetune", **same, "system": name} for name in names)


def measured(job: dict[str, Any], args: argparse.Namespace, work: Path) -> dict[str, Any]:
    folder = next(one for one in args.data if Path(one).name == job["data"])
    if job["part"] == "frozen":
        real, size = job["model"] != RANDOM, 64 if args.quick else SIZE
        photos = divided(folder, job["seed"], work, 60 if args.quick else PHOTOGRAPHS)
        return frozen(photos, args.init if real else random_weights(work, args.quick), job["seed"], real, size)
    own: Any = open_checkpoint(args.init).config
    how = (divided(folder, job["seed"], work), args.init, own.image_size[0], 60 * job["minutes"], job["seed"])
    system = job["system"]
    return theirs(float(system.split()[-1]), *how) if system.startswith("timm") else ours(system, *how)


def random_weights(work: Path, quick: bool) -> str:
    small = vitkit.create("vit-ti/16", image_size=64, depth=2) if quick else None
    vitkit.save(small or vitkit.create("vit-s/16", patch_size=14, image_size=SIZE), work / "vit.safetensors")
    return str(work / "vit.safetensors")


def made_up(folder: Path) -> str:
    """Three classes of noise around a colour, each with 40 images."""
    noise = np.random.default_rng(0)
    for number in range(120):
        path = folder / "noise" / "abc"[number % 3] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = 60 * np.eye(3)[number % 3] + noise.normal(80, 40, (96, 96, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    return str(folder / "noise")


def summarise(rows: list[dict[str, Any]]) -> None:
    kinds = sorted({(r["model"], r["data"]) for r in rows if r["part"] == "frozen"})
    for model, data in kinds:
        some = [r for r in rows if (r["part"], r["model"], r["data"]) == ("frozen", model, data)]
        ratios = [statistics.median(r[f"{name} / forward"] for r in some) for name in ("command", "run")]
        print(f"{data}, {model}: command {ratios[0]:.2f}x, run {ratios[1]:.2f}x a forward pass (goal: 1.3x)")
    tuned = [r for r in rows if r["part"] == "finetune"]
    for case in sorted({(r["data"], r["model"], r["minutes"], r["seed"]) for r in tuned}):
        some = [r for r in tuned if (r["data"], r["model"], r["minutes"], r["seed"]) == case]
        found = {r["system"]: r["test"] for r in some if r["system"] in OURS}
        if peer := [r for r in some if r["system"] not in OURS]:
            found["timm"] = max(peer, key=lambda r: (r["validation"], -r["validation loss"]))["test"]
            found["timm's best test"] = max(r["test"] for r in peer)
        print(*case, *(f"{system} {test:.1%}" for system, test in found.items()), sep="  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", metavar="FOLDER", help="photographs, one folder for each class")
    parser.add_argument("--init", help="a trained ViT; without it only the time of frozen random weights is measured")
    parser.add_argument("--parts", nargs="+", choices=("frozen", "finetune"), default=["frozen", "finetune"])
    parser.add_argument("--systems", nargs="+", choices=[*OURS, "timm"])
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="of timm (where the best is at an edge)")
    parser.add_argument("--minutes", type=float, default=2.0, help="of fine-tuning, for each run (default: 2)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="threads of PyTorch (default: PyTorch's choice)")
    parser.add_argument("--save", type=Path, help="where to write the results")
    parser.add_argument("--quick", action="store_true", help="made-up images, a tiny model, 24 seconds for each run")
    args = parser.parse_args()
    args.systems = args.systems or (["vitkit", "timm"] if args.quick else [*OURS, "timm"])
    target = args.save or RESULTS / f"photographs{'-quick' if args.quick else ''}.json"
    if args.threads:
        torch.set_num_threads(args.threads)
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    about, rows = machine(), json.loads(target.read_text())["rows"] if target.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        if args.quick:
            args.data, args.init = [made_up(Path(temporary))], random_weights(Path(temporary), quick=True)
            args.minutes, args.seeds, args.rates = 0.4, 1, RATES[:1]
        for job in jobs(args):
            if not any(all(row.get(name) == value for name, value in job.items()) for row in rows):
                try:
                    with tempfile.TemporaryDirectory(dir=temporary) as work:
                        rows.append({**job, **measured(job, args, Path(work))})
                except VitkitError as error:  # such as a budget that cannot be kept: no row, and the next time again
                    print(job, error, flush=True)
                    continue
                print(rows[-1], flush=True)
                save("photographs", target, about, rows, quick=False)
    summarise(rows)


if __name__ == "__main__":
    main()
