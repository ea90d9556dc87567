"""Data loading side by side with torchvision, in one run on one core: prints ratios, writes results/data.json.

    python benchmarks/data.py [--quick]

Images are JPEGs of 500x375 and 2000x1500 made from photographs of scikit-image. Every pipeline ends with a
normalised float batch. Rounds are interleaved and measured in processor time of one thread, so that other
work on the machine falls on all alike; the quickest round of each counts, since other work can only add.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import peers
from vitkit.data import Augment, Loader, Source, cached, normalise, open_data, preset, to_tensor
from vitkit.data.decode import decode
from vitkit.data.samples import Samples
from vitkit.data.sources.arrays import from_arrays
from vitkit.model.config import Preprocessing, ViTConfig
from vitkit.model.vit import ViT

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PRE = Preprocessing((224, 224), 0.875, "crop", "bilinear", MEAN, STD)
TRAIN = Augment(crop="resized", flip=0.5)
BATCH = 16


def make_photographs(folder: Path, size: tuple[int, int], count: int, grain: float = 0.0) -> Path:
    """JPEGs of quality 90: parts of real photographs, enlarged as little as possible, with fine grain if asked."""
    from skimage import data

    names = ("chelsea", "coffee", "astronaut", "rocket")
    originals = [Image.fromarray(getattr(data, name)()).convert("RGB") for name in names]
    for i in range(count):
        rng = np.random.default_rng(i)
        image = originals[i % 4]
        scale = min(image.width / size[0], image.height / size[1]) * rng.uniform(0.8, 1.0)
        w, h = int(size[0] * scale), int(size[1] * scale)
        left, top = int(rng.integers(0, image.width - w + 1)), int(rng.integers(0, image.height - h + 1))
        part = image.resize(size, Image.Resampling.BICUBIC, box=(left, top, left + w, top + h))
        place = folder / names[i % 4]
        place.mkdir(parents=True, exist_ok=True)
        noisy = np.clip(np.asarray(part) + rng.normal(0, grain, (size[1], size[0], 1)), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(place / f"{i:04}.jpg", quality=90)
    return folder


def torchvision_loader(folder: Path, training: bool) -> Callable[[], int]:
    torchvision = peers.import_torchvision()
    from torchvision import datasets, transforms

    assert torchvision
    end = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    if training:
        steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), *end]
    else:
        steps = [transforms.Resize(256), transforms.CenterCrop(224), *end]
    folder_set = datasets.ImageFolder(str(folder), transforms.Compose(steps))
    batches = torch.utils.data.DataLoader(folder_set, BATCH, shuffle=training, drop_last=training)
    return lambda: sum(len(images) for images, _ in batches)


def our_loader(source: Source, augment: Augment | None) -> Callable[[], int]:
    loader = Loader(source, PRE, BATCH, augment)
    return lambda: sum(len(normalise(batch.images, PRE)) for batch in loader)


def interleaved(runs: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Milliseconds of processor time per image, of the quickest round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # warm: files in memory, code loaded
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            count = run()
            times[name].append(1000 * (time.process_time() - start) / count)
    return {name: round(min(t), 3) for name, t in times.items()}


def files(folder: Path, rounds: int) -> dict[str, object]:
    source = open_data(folder).split("all")
    kept = cached(source, PRE, TRAIN, folder=folder.parent / "cache")
    ms = interleaved(
        {
            "train torchvision": torchvision_loader(folder, True),
            "train vitkit": our_loader(source, TRAIN),
            "train vitkit cached": our_loader(kept, TRAIN),
            "evaluate torchvision": torchvision_loader(folder, False),
            "evaluate vitkit": our_loader(source, None),
        },
        rounds,
    )
    ratios = {
        "train": ms["train torchvision"] / ms["train vitkit"],
        "evaluate": ms["evaluate torchvision"] / ms["evaluate vitkit"],
        "cache": ms["train vitkit"] / ms["train vitkit cached"],
        "cache over torchvision": ms["train torchvision"] / ms["train vitkit cached"],
    }
    size = round(sum(p.stat().st_size for p in folder.rglob("*.jpg")) / len(source) / 1000)
    return {
        "kB per image": size,
        "ms per image": ms,
        "times as fast": {k: round(v, 2) for k, v in ratios.items()},
        **tolerance(source),
    }


def tolerance(source: Source) -> dict[str, object]:
    """How far draft decoding moves the final pixels of the same random crops, in levels of 255."""
    quick = Samples(source, PRE, TRAIN)
    differences = []
    for index in range(min(24, len(source))):
        draws = np.random.default_rng(index).random(40)
        exact = _Exact(source, PRE, TRAIN)
        a, b = (s._read_crop(index, draws, TRAIN).numpy().astype(int) for s in (quick, exact))
        differences.append(np.abs(a - b))
    worst = np.stack(differences)
    return {"draft: levels of 255": {"mean": round(float(worst.mean()), 3), "99%": float(np.percentile(worst, 99))}}


class _Exact(Samples):
    """The same crops with every pixel decoded."""

    def _read_crop(self, index: int, draws: np.ndarray, augment: Augment) -> torch.Tensor:
        from vitkit.data.augment import random_box

        image = decode(self.source.encoded(index))
        box = random_box(draws, *image.size, augment)
        return to_tensor(image.crop(box).resize((224, 224), Image.Resampling.BILINEAR))


def in_memory(steps: int) -> dict[str, object]:
    """What share of a training step of a 0.3M-parameter model the loader takes: processor time of one thread."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (20000, 3, 32, 32), dtype=np.uint8)
    part = (pixels, rng.integers(0, 10, len(pixels)))
    source = from_arrays("random", {"train": part, "val": (pixels[:10], part[1][:10])}).split("train")
    config = ViTConfig(image_size=(32, 32), patch_size=(4, 4), width=96, depth=3, heads=3, mlp_width=384, classes=10)
    model = ViT(config)
    optimiser = torch.optim.AdamW(model.parameters())
    shares = {}
    for name in ("none", "light", "medium", "strong"):
        batches = iter(Loader(source, config.preprocessing, 128, preset(name)))
        loading, training = [], []
        for step in range(steps):
            start = time.process_time()
            batch = next(batches)
            loaded = time.process_time()
            loss = torch.nn.functional.cross_entropy(model(normalise(batch.images, config.preprocessing)), batch.labels)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            if step >= 3:
                loading.append(loaded - start)
                training.append(time.process_time() - loaded)
        share = statistics.median(loading) / (statistics.median(loading) + statistics.median(training))
        shares[name] = {
            "loader ms": round(1000 * statistics.median(loading), 2),
            "step ms": round(1000 * statistics.median(training), 1),
            "loader's share": f"{100 * share:.2f}%",
        }
    return {"parameters": sum(p.numel() for p in model.parameters()), "batch": 128, "by preset": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few images, to see that it runs; writes nothing")
    quick = parser.parse_args().quick
    results: dict[str, object] = {
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "versions": {
            "torch": torch.__version__,
            "pillow": Image.__version__,
            "torchvision": peers.import_torchvision().__version__,
        },
    }
    with tempfile.TemporaryDirectory() as temporary:
        torch.set_num_threads(1)
        # Enlarged photographs are smooth and decode quickly; with grain they are as large as a camera's files.
        for size, count, grain in (((500, 375), 96, 0.0), ((2000, 1500), 32, 0.0), ((2000, 1500), 32, 3.0)):
            name = f"{size[0]}x{size[1]}" + (" with grain" if grain else "")
            folder = make_photographs(Path(temporary) / name / "set", size, BATCH if quick else count, grain)
            results[name] = files(folder, 1 if quick else 7)
            print(name, json.dumps(results[name], indent=2))
    results["in memory"] = in_memory(8 if quick else 15)
    print("in memory", json.dumps(results["in memory"], indent=2))
    if not quick:
        out = Path(__file__).parent / "results" / "data.json"
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
