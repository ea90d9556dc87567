"""What pre-training without labels is worth, and what masking saves: one row per run, kept as soon as it is there.

- `value`: a set with a share of its labels. A part of the time (--part) pre-trains on all training images without
  labels, the rest fine-tunes on the labelled ones; beside it all of the time trains from scratch on the same labels.
  Equal total time, paired by seed, the mean difference with a 95% interval. One pre-training serves all shares.
- `anchor`: pre-training alone for a long time, then k-NN and a linear probe with all labels.
- `speed`: a training step of MAE at 75% masking, of the same encoder on all patches, and of Hugging Face's MAE with
  the same sizes, in interleaved rounds.

Rows that are there already are not made again, and a run that was killed is resumed from --work.

    python benchmarks/pretrain.py                                      # CIFAR-10, 30 minutes a run: days
    python benchmarks/pretrain.py --methods mae,lejepa --shares 0.01   # a part of the same table
    python benchmarks/pretrain.py --data PHOTOGRAPHS --only value      # a folder of classes, or any set with labels
    python benchmarks/pretrain.py --only anchor --anchor 60,180
    python benchmarks/pretrain.py --quick                              # digits for seconds, to see that it runs
    python benchmarks/pretrain.py --show                               # the tables, of the rows that are there
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import peers
import vitkit
from harness import RESULTS, interleaved, machine, ratios, speed, table
from vitkit.data import Source
from vitkit.evaluation.probes import PROBES
from vitkit.io import write_json
from vitkit.model.vit import ViT
from vitkit.tasks import METHODS
from vitkit.tasks.pretraining.mae import MaeOptions, MaskedAutoencoder

PARTS = ("value", "anchor", "speed")
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of so many paired differences
PROBED = ("knn", "linear")
Row = dict[str, Any]


class Kept:
    """The rows so far, in a file that is always whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []

    def find(self, **key: object) -> Row | None:
        return next((row for row in self.rows if key.items() <= row.items()), None)

    def get(self, make: Callable[[], Row], **key: object) -> Row:
        row = self.find(**key)
        if row is None:
            row = {**key, **make()}
            self.rows.append(row)
            write_json(self.path, {"machine": machine(), "rows": self.rows})
            print(json.dumps(row), flush=True)
        return row


# --- value -------------------------------------------------------------------------------------------


def labelled_share(data: str, share: float, seed: int, folder: Path) -> str:
    """A set with so many of the training images of each class, at least one, and the whole test split."""
    train, test = (vitkit.open_data(data).split(split) for split in ("train", "test"))
    chance = np.random.default_rng(seed)
    rows = np.concatenate([chance.permutation(m)[: max(1, round(len(m) * share))] for m in train.members])
    few = train.take(np.sort(rows))
    folder.mkdir(parents=True, exist_ok=True)
    if few.pixels is None or test.pixels is None:
        path = folder / f"{share:g}-{seed}.csv"
        write_list(path, {"train": few, "test": test})
    else:
        path = folder / f"{share:g}-{seed}.npz"
        parts = {"x_train": few.pixels, "y_train": few.labels, "x_test": test.pixels, "y_test": test.labels}
        arrays = {k: np.asarray(v) for k, v in parts.items()}
        np.savez(path, classes=np.array(train.classes), **arrays)
    return str(path)


def write_list(path: Path, parts: dict[str, Source]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "label", "split"))
        for split, source in parts.items():
            names = [source.classes[int(label)] for label in source.labels]
            writer.writerows((Path(source.where(i)).absolute(), name, split) for i, name in enumerate(names))


def pretrained(kept: Kept, work: Path, data: str, method: str, seed: int, seconds: float) -> Row:
    """Pre-trained on the training images of `data`, and probed with all of their labels."""
    out = work / f"{Path(data).stem}-{method}-{seed}-{seconds:g}"

    def make() -> Row:
        done = vitkit.pretrain(data, method=method, budget=seconds, seed=seed, out=out, resume=has_begun(out))
        found = {"run": out.name, "seconds": round(done.seconds, 1), "steps": done.steps, "verdict": done.verdict}
        sources = [vitkit.open_data(data).split(split) for split in ("train", "test")]
        model = vitkit.load(out)
        return {**found, **{name: PROBES[name](model, *sources).accuracy["top1"] for name in PROBED}}

    return kept.get(make, part="pretrain", data=Path(data).stem, method=method, seed=seed, budget=seconds)


def has_begun(out: Path) -> bool:
    return (out / "config.json").exists()


def value(kept: Kept, work: Path, data: str, share: float, method: str, seed: int, seconds: float, part: float) -> None:
    """Test accuracy after `seconds` in all, with pre-training for `part` of them, or from scratch ("")."""
    key = {"data": Path(data).stem, "share": share, "method": method or "scratch", "seed": seed, "budget": seconds}
    if kept.find(part="value", **key):
        return
    init, left = None, seconds
    if method:
        before = pretrained(kept, work, data, method, seed, seconds * part)
        init, left = work / before["run"], seconds - before["seconds"]
    out = work / "-".join(str(v) for v in key.values())

    def make() -> Row:
        few = labelled_share(data, share, seed, work / "sets" / Path(data).stem)
        done = vitkit.train(few, init=init, budget=left, seed=seed, out=out, resume=has_begun(out))
        return {"pretrain_part": part if method else 0.0, "top1": done.test["top1"], "seconds": round(done.seconds, 1)}

    kept.get(make, part="value", **key)


# --- speed -------------------------------------------------------------------------------------------


def training_step(module: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    return step


def masking_speed(model: str, size: int, batch: int, seconds: float) -> Row:
    """img/s of a whole training step: forward, backward, AdamW. Both decoders have two blocks of half the width."""
    torch.manual_seed(0)
    whole, masked = (vitkit.create(model, image_size=size, classes=0) for _ in range(2))
    assert isinstance(whole, ViT)
    config, decoder_width = whole.config, whole.config.width // 2
    ours = MaskedAutoencoder(masked, MaeOptions(decoder_depth=2, decoder_width=decoder_width))
    images, noise = torch.randn(batch, 3, size, size), torch.rand(batch, math.prod(config.grid))
    transformers = peers.import_transformers()
    sizes = {"hidden_size": config.width, "num_hidden_layers": config.depth, "num_attention_heads": config.heads}
    sizes |= {"intermediate_size": config.mlp_width, "image_size": size, "patch_size": config.patch_size[0]}
    small = {"hidden_size": decoder_width, "num_hidden_layers": 2, "num_attention_heads": max(1, decoder_width // 32)}
    small |= {"intermediate_size": 4 * decoder_width}
    peer = transformers.ViTMAEForPreTraining(
        transformers.ViTMAEConfig(**sizes, **{f"decoder_{k}": v for k, v in small.items()}, norm_pix_loss=True)
    )
    times = interleaved(
        {
            "mae": training_step(ours, lambda: ours.losses(images, noise).mean()),
            "all patches": training_step(whole, lambda: whole.tokens(images).square().mean()),
            "hugging face mae": training_step(peer, lambda: peer(images, noise=noise).loss),
        },
        seconds,
    )
    rates = {name: speed(t, batch) for name, t in times.items()}
    gains = {
        f"to_{name.replace(' ', '_')}": round(statistics.median(ratios(times[name], times["mae"])), 3)
        for name in times
        if name != "mae"
    }
    return {"systems": rates, "ratios": gains, "batch": batch}


# --- tables ------------------------------------------------------------------------------------------


def gains(rows: list[Row]) -> Iterator[Row]:
    """Of every method over from scratch, paired by seed."""
    of_value = [row for row in rows if row["part"] == "value"]
    cases = sorted({(r["data"], r["budget"], r["share"], r["method"]) for r in of_value if r["method"] != "scratch"})
    for data, budget, share, method in cases:
        same = [r for r in of_value if (r["data"], r["budget"], r["share"]) == (data, budget, share)]
        top1 = {(r["method"], r["seed"]): r["top1"] for r in same}
        seeds = sorted(seed for name, seed in top1 if name == method and ("scratch", seed) in top1)
        if not seeds:
            continue
        ours, scratch = ([top1[name, seed] for seed in seeds] for name in (method, "scratch"))
        differences = [a - b for a, b in zip(ours, scratch, strict=True)]
        count = len(seeds)
        half = T95[count] * statistics.stdev(differences) / math.sqrt(count) if count in T95 else math.nan
        yield {
            "data": data,
            "minutes": round(budget / 60, 2),
            "labels": f"{share:.0%}",
            "method": method,
            "seeds": count,
            "from scratch": f"{statistics.mean(scratch):.2%}",
            "pre-trained": f"{statistics.mean(ours):.2%}",
            "difference": f"{100 * statistics.mean(differences):+.2f} +- {100 * half:.2f} points",
        }


def probes(rows: list[Row]) -> Iterator[Row]:
    for row in (r for r in rows if r["part"] == "pretrain"):
        about = {"data": row["data"], "minutes": round(row["budget"] / 60, 2), "method": row["method"]}
        accuracies = {name: f"{row[name]:.2%}" for name in PROBED}
        yield {**about, "seed": row["seed"], **accuracies, "verdict": row["verdict"].split(":")[0]}


def show(rows: list[Row]) -> None:
    for title, found in (("equal total time", [*gains(rows)]), ("k-NN and linear, all labels", [*probes(rows)])):
        if found:
            print(f"\n{title}\n{table(found)}")
    for row in (r for r in rows if r["part"] == "speed"):
        lines = [{"system": name, **rates} for name, rates in row["systems"].items()]
        print(f"\n{row['model']} at {row['size']} pixels, batches of {row['batch']}: {row['ratios']}\n{table(lines)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> tuple[float, ...]:
        return tuple(map(float, text.split(",")))

    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    parser.add_argument("--data", default="cifar10", help="a set with labels and a test split (default: cifar10)")
    parser.add_argument("--only", type=names, default=PARTS, help=f"parts (default: {','.join(PARTS)})")
    parser.add_argument("--methods", type=names, default=METHODS, help=f"(default: {','.join(METHODS)})")
    parser.add_argument("--shares", type=numbers, default=(0.01, 0.1), help="of the labels (default: 0.01,0.1)")
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2), help="(default: 0,1,2)")
    parser.add_argument("--minutes", type=float, default=30.0, help="of each run, pre-training included (default: 30)")
    parser.add_argument("--part", type=float, default=0.5, help="of these that pre-trains (default: 0.5)")
    parser.add_argument("--anchor", type=numbers, default=(60, 180), help="minutes of pre-training (default: 60,180)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the speed comparison (default: 60)")
    parser.add_argument("--threads", type=int, help="threads of PyTorch (default: PyTorch's choice)")
    parser.add_argument("--quick", action="store_true", help="digits for seconds: shows that it runs, measures nothing")
    parser.add_argument("--show", action="store_true", help="print the tables and run nothing")
    parser.add_argument(
        "--work", type=Path, help="where runs are kept (default: vitkit-pretrain among temporary files)"
    )
    parser.add_argument("--save", type=Path, help="where rows go (default: results/pretrain.json; none with --quick)")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.quick:
        given.data, given.methods, given.shares, given.seeds = "digits", given.methods[:1], (0.1,), (0,)
        given.minutes, given.anchor, given.seconds = 0.3, (0.15,), 0.1
    with tempfile.TemporaryDirectory() as fresh:
        work = given.work or (Path(fresh) if given.quick else Path(tempfile.gettempdir(), "vitkit-pretrain"))
        kept = Kept(given.save or (Path(fresh, "rows.json") if given.quick else RESULTS / "pretrain.json"))
        if not given.show:
            run(given, kept, work)
        show(kept.rows)


def run(given: argparse.Namespace, kept: Kept, work: Path) -> None:
    seeds = [int(seed) for seed in given.seeds]
    if "speed" in given.only:
        model, size, batch = ("mu", 32, 2) if given.quick else ("vit-ti/16", 224, 16)
        kept.get(lambda: masking_speed(model, size, batch, given.seconds), part="speed", model=model, size=size)
    for seed in seeds if "value" in given.only else ():
        for method in ("", *given.methods):
            for share in given.shares:
                value(kept, work, given.data, share, method, seed, 60 * given.minutes, given.part)
    for minutes in given.anchor if "anchor" in given.only else ():
        for method in given.methods:
            pretrained(kept, work, given.data, method, seeds[0], 60 * minutes)


if __name__ == "__main__":
    main()
