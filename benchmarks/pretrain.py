"""What pre-training without labels is worth, and what masking saves. Every result is kept; run again to continue.

    python benchmarks/pretrain.py [--short]

- value: CIFAR-10 with 1% and 10% of the labels. Half of the time pre-trains on all images without labels, half
  fine-tunes on the labelled ones; beside it all of the time trains from scratch on them. Equal total time, three
  seeds, paired differences.
- speed: a training step of MAE at 75% masking beside the same encoder on all patches, and Hugging Face's MAE.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import vitkit
from vitkit.io import write_json
from vitkit.model.vit import ViT
from vitkit.tasks.pretraining.mae import MaeOptions, MaskedAutoencoder

RESULTS = Path(__file__).parent / "results" / "pretrain.json"


def labelled_share(data: str, share: float, folder: Path) -> str:
    """A set with so many of the labelled images of each class to train on, and the whole test split."""
    train, test = (vitkit.open_data(data).split(split) for split in ("train", "test"))
    rows = np.sort(np.concatenate([m[: max(1, round(len(m) * share))] for m in train.members]))
    parts = {"x_train": train.pixels[rows], "y_train": train.labels[rows], "x_test": test.pixels, "y_test": test.labels}
    path = folder / f"{share:g}.npz"
    np.savez(path, classes=np.array(train.classes), **{k: np.asarray(v) for k, v in parts.items()})
    return str(path)


def value(data: str, share: float, method: str, seed: int, seconds: float) -> dict[str, float | str]:
    """Test accuracy after `seconds` in all, with pre-training (`method`) or from scratch ("")."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few, init, verdict = labelled_share(data, share, folder), None, ""
        if method:
            pre = vitkit.pretrain(data, method=method, budget=seconds / 2, seed=seed, out=folder / "pre")
            init, verdict, seconds = str(pre.out), pre.verdict, seconds / 2
        run = vitkit.train(few, init=init, budget=seconds, seed=seed, out=folder / "run")
        return {"top1": run.test["top1"], "verdict": verdict}


def steps_a_second(step: object, images: torch.Tensor, rounds: int) -> float:
    """Images per second of forward and backward, the best of a few rounds."""
    best = 0.0
    for _ in range(rounds):
        before = time.perf_counter()
        step(images).backward()  # type: ignore[operator]
        best = max(best, len(images) / (time.perf_counter() - before))
    return best


def speed(rounds: int, batch: int, size: int) -> dict[str, float]:
    torch.manual_seed(0)
    images, noise = torch.randn(batch, 3, size, size), torch.rand(batch, (size // 16) ** 2)
    model = vitkit.create("vit-ti/16", image_size=size, classes=0)
    assert isinstance(model, ViT)
    ours = MaskedAutoencoder(model, MaeOptions(decoder_depth=2, decoder_width=96))
    found = {"mae": steps_a_second(lambda x: ours.losses(x, noise).mean(), images, rounds)}
    found["all patches"] = steps_a_second(lambda x: model.tokens(x).square().mean(), images, rounds)
    import peers

    transformers = peers.import_transformers()
    sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    decoder = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 384}
    config = transformers.ViTMAEConfig(image_size=size, **sizes, **{f"decoder_{k}": v for k, v in decoder.items()})
    peer = transformers.ViTMAEForPreTraining(config)
    found["hugging face mae"] = steps_a_second(lambda x: peer(x, noise=noise).loss, images, rounds)
    return {name: round(rate, 2) for name, rate in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--short", action="store_true", help="A minute, on digits: shows that it runs, measures nothing."
    )
    parser.add_argument("--minutes", type=float, default=30, help="Of each run, pre-training included.")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--methods", default="mae,lejepa,dino,masked-patch")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    data, shares, seeds, seconds = given.data, (0.01, 0.1), (0, 1, 2), 60 * given.minutes
    if given.short:
        data, shares, seeds, seconds = "digits", (0.1,), (0,), 8.0
    out = given.out.with_stem(f"{given.out.stem}-short") if given.short else given.out
    kept = json.loads(out.read_text()) if out.exists() else {}
    jobs = {f"{data} {s:.0%} {m or 'scratch'} {seed} {seconds:g}s": (s, m, seed) for seed in seeds for s in shares
            for m in ("", *given.methods.split(",")[: 1 if given.short else None])}  # fmt: skip
    for name, (share, method, seed) in jobs.items():
        if name not in kept:
            kept[name] = value(data, share, method, seed, seconds)
            write_json(out, kept)
        print(name, kept[name], flush=True)
    if "speed" not in kept:
        kept["speed"] = speed(*((1, 2, 64) if given.short else (8, 16, 224)))
        write_json(out, kept)
    print("img/s:", kept["speed"])
    for share in shares:
        for method in given.methods.split(","):
            pairs = [
                (f"{data} {share:.0%} {method} {s} {seconds:g}s", f"{data} {share:.0%} scratch {s} {seconds:g}s")
                for s in seeds
            ]
            gains = [kept[a]["top1"] - kept[b]["top1"] for a, b in pairs if a in kept and b in kept]
            if gains:
                margin = (
                    4.303 * np.std(gains, ddof=1) / np.sqrt(3) if len(gains) == 3 else float("nan")
                )  # t, 95%, 3 seeds
                print(f"{method} at {share:.0%} labels: {np.mean(gains):+.2%} +- {margin:.2%} over from scratch")
    if given.short:
        shutil.rmtree(out, ignore_errors=True) if out.is_dir() else out.unlink()


if __name__ == "__main__":
    main()
