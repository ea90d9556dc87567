"""Reading checkpoints: seconds, and the most memory needed on top of the model itself, beside each family's own reader.

Every figure comes from a process of its own that imports its system, loads one file, and touches every
weight once (so that memory-mapped weights count too). "on top" is (peak - before) / size of the model - 1:
0 means that nothing but the model was ever in memory; the limit we hold ourselves to is 1.2.

    python benchmarks/load.py              # ViT-B/16, a few minutes; --only vit-l/16 for the large one
    python benchmarks/load.py --quick      # ViT-Ti/16 only
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness import arguments, machine, megabytes_in_use, peak_megabytes_of, save, table

TIMM = {"vit-ti/16": "vit_tiny_patch16_224", "vit-b/16": "vit_base_patch16_224", "vit-l/16": "vit_large_patch16_224"}
FILES = {
    "native": "m.safetensors",
    "google": "m.npz",
    "big_vision": "m.npz",
    "timm": "m.safetensors",
    "huggingface": "folder",
    "torchvision": "m.pth",
}
PEERS = {
    "google": "timm",
    "big_vision": "timm",
    "timm": "timm",
    "huggingface": "transformers",
    "torchvision": "torchvision",
}
LIMIT = 1.2


def reader(system: str, format: str, model: str, path: str) -> Any:
    """A function that loads the file, with everything imported beforehand."""
    if system == "vitkit":
        import vitkit.checkpoints.load as ours

        return lambda: ours.load(path)
    import peers

    if system == "transformers":
        transformers = peers.import_transformers()
        cls = transformers.ViTForImageClassification
        return lambda: cls.from_pretrained(path)
    if system == "torchvision":
        torchvision = peers.import_torchvision()
        sizes = {"vit-ti/16": None, "vit-b/16": "vit_b_16", "vit-l/16": "vit_l_16"}
        build = getattr(torchvision.models, sizes[model] or "vit_b_16")

        def load_torchvision() -> Any:
            made = build()
            made.load_state_dict(torch.load(path, weights_only=True))
            return made

        return load_torchvision
    timm = peers.import_timm()
    more = {"no_embed_class": True} if format == "big_vision" else {}
    return lambda: timm.create_model(TIMM[model], checkpoint_path=path, **more)


def measure(system: str, format: str, model: str, path: str) -> None:
    """In a process of its own: seconds and megabytes, printed."""
    call = reader(system, format, model, path)
    kept: list[Any] = []

    def load_and_touch() -> None:
        start = time.perf_counter()
        kept.append(call())
        kept.append(time.perf_counter() - start)
        for parameter in kept[0].parameters():
            parameter.detach().sum()

    before = megabytes_in_use()
    peak = peak_megabytes_of(load_and_touch)
    print(kept[1], peak - before)


def run(system: str, format: str, model: str, path: Path, repeats: int) -> tuple[float, float] | None:
    found = []
    for _ in range(repeats):
        command = [sys.executable, __file__, "--memory-of", f"{system} {format} {model} {path}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return None
        seconds, megabytes = map(float, done.stdout.split()[-2:])
        found.append((seconds, megabytes))
    return min(s for s, _ in found), min(m for _, m in found)


def write(format: str, model: str, folder: Path) -> tuple[Path, float]:
    """A checkpoint of that format, and the size of its model in megabytes."""
    import vitkit
    from vitkit.checkpoints import writing
    from vitkit.checkpoints.family import Checkpoint

    made = vitkit.create(model, positioned_prefix="none" if format == "big_vision" else "all")
    path = folder / FILES[format]
    writing.write(Checkpoint(made.config, dict(made.state_dict())), path, format)
    return path, sum(p.numel() * p.element_size() for p in made.parameters()) / 2**20


def main() -> None:
    assert __doc__
    parser = arguments(__doc__, ("vit-b/16",), ("vitkit", "timm", "transformers", "torchvision"))
    args = parser.parse_args()
    if args.memory_of:
        return measure(*args.memory_of.split(" ", 3))
    models = ["vit-ti/16"] if args.quick else args.only or ["vit-b/16"]
    about, rows = machine(), []
    for model in models:
        for format in FILES:
            with tempfile.TemporaryDirectory() as folder:
                path, size = write(format, model, Path(folder))
                for system in ("vitkit", PEERS.get(format)):
                    if system is None or (got := run(system, format, model, path, 1 if args.quick else 2)) is None:
                        continue
                    row = {"model": model, "format": format, "system": system, "model_mb": round(size, 1)}
                    rows.append(row | {"seconds": round(got[0], 3), "on_top": round(got[1] / size - 1, 2)})
        print(table([row for row in rows if row["model"] == model]), flush=True)
    worst = max(row["on_top"] for row in rows if row["system"] == "vitkit")
    print(f"vitkit needs at most {worst:.2f}x the model's size on top of the model; the limit is {LIMIT}")
    save("load", args.save, about, rows, args.quick)
    return None


if __name__ == "__main__":
    main()
