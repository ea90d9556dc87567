"""Commands that write, each with its files and how it is continued after a failure; what must be old or new then.

`test_faults.py` lets their file operations fail, `benchmarks/kills.py` kills them at any moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

import vitkit
from vitkit.curation import build_index
from vitkit.curation.clean import COLUMNS
from vitkit.training.log import read

SMALL = {"depth": 1, "width": 16, "heads": 1, "mlp_width": 16, "classes": 2}
PRELOADED = (
    "vitkit.runtime.onnx",
    "vitkit.runtime.openvino",
    "vitkit.evaluation.figures",
    "matplotlib.figure",
    "torch.export",
)
Files = dict[str, object]  # path -> what is compared of it


@dataclass(frozen=True)
class Scenario:
    arguments: str
    outputs: tuple[str, ...]
    again: Callable[[Path, list[str]], list[str]] = lambda folder, arguments: arguments  # after a failure
    together: bool = True  # all files of the output change at once
    gone: bool = False  # the old output may be gone (never mixed with the new) when a kill hits
    success: int = 0  # exit code of a command that did all; 1 when it found something


def resumed(folder: Path, arguments: list[str]) -> list[str]:
    return [*arguments, "--resume"] if (folder / "run" / "config.json").exists() else arguments


def continued(folder: Path, arguments: list[str]) -> list[str]:
    """What the message of a job says: --resume when there are pieces."""
    pieces = any(path.name == "job.json" for path in folder.glob("*.parts/*"))
    return [*(a for a in arguments if a != "--force"), "--resume"] if pieces else arguments


def swept(folder: Path, arguments: list[str]) -> list[str]:
    return [*arguments, "--resume"] if (folder / "sw" / "sweep.json").exists() else arguments


SHORT = "--steps 4 --batch-size 16 --set evaluations=2 --out run --set log_every=1"
TRAIN = f"train set.npz --init new.safetensors {SHORT}"
SCENARIOS = {
    "train": Scenario(TRAIN, ("run",), resumed, together=False),
    "evaluate": Scenario("evaluate new.safetensors set.npz --out ev", ("ev",)),
    "predict": Scenario("predict new.safetensors set.npz --out p.csv --force --batch-size 4", ("p.csv",), continued),
    "embed": Scenario("embed new.safetensors set.npz --out e.npz --force --batch-size 4", ("e.npz",), continued),
    "explain": Scenario("explain new.safetensors --out ex --only filters --only positions", ("ex",)),
    "export onnx": Scenario("export new.safetensors --to onnx --out m.onnx", ("m.onnx",)),
    "export pt2": Scenario("export new.safetensors --to torch-export --out m.pt2", ("m.pt2",)),
    "export openvino": Scenario("export new.safetensors --to openvino --out m.xml", ("m.xml", "m.bin"), gone=True),
    "convert file": Scenario("convert new.safetensors --to timm --force c.pth", ("c.pth",)),
    "convert npz": Scenario("convert new.safetensors --to google --force c.npz", ("c.npz",)),
    "convert folder": Scenario("convert new.safetensors --to huggingface --force hf", ("hf",)),
    "convert code": Scenario("convert new.safetensors --to huggingface_code --force code", ("code",)),
    "profile": Scenario("profile new.safetensors --batch 1 --seconds 0 --out time.svg", ("time.svg",)),
    "data pack": Scenario("data pack new-pics shards --workers 0", ("shards",), together=False),
    "data show": Scenario("data show set.npz --rows 2 --out s.png", ("s.png",)),
    "data check": Scenario("data check set.npz --out s.png", ("s.png",)),
    "tune": Scenario("tune new.safetensors --runtimes onnx --seconds 0", ("new.safetensors.tuned",)),
    "pretrain": Scenario(f"pretrain set.npz --init new.safetensors {SHORT}", ("run",), resumed, together=False),
    "sweep": Scenario(
        "sweep set.npz --set lr=1e-3,2e-3 --set init=new.safetensors --set steps=2 --set batch_size=16 --out sw",
        ("sw",),
        swept,
        together=False,
    ),
    "index": Scenario("index new-pics --model new.safetensors --out ix --force --batch-size 4", ("ix",)),
    "search": Scenario("search new-pics.index new-pics/a/0.png --out hits.csv", ("hits.csv",)),
    "data clean": Scenario("data clean new-pics --workers 0 --out cl", ("cl",)),
    "data apply": Scenario("data apply new-cl/issues.csv --to list.csv", ("list.csv",)),
    "data map": Scenario("data map new-pics.index --out map.html", ("map.html",)),
    "study": Scenario("study dropout --data tiny.npz --steps 1 --seeds 1 --workers 1 --out st", ("st/dropout",)),
}


def make_base(folder: Path) -> Path:
    """Two models and two sets, of 8 pixels."""
    random = np.random.default_rng(0)
    labels = np.arange(64) % 2
    images = random.integers(0, 60, (64, 8, 8, 1), dtype=np.uint8)
    images[labels == 1, 2:6, 2:6] += 150
    arrays = {"x_train": images[:40], "y_train": labels[:40], "x_val": images[40:], "y_val": labels[40:]}
    np.savez(folder / "set.npz", **arrays)
    np.savez(folder / "tiny.npz", **arrays, x_test=images[40:], y_test=labels[40:])
    for name in ("old", "new"):
        vitkit.save(vitkit.create("vit-8px/2", channels=1, **SMALL), folder / f"{name}.safetensors")
        make_pictures(folder, name, images)
    return folder


def make_pictures(folder: Path, name: str, images: np.ndarray) -> None:
    """A folder of files, other ones for each name, with its index and issues that were found in it."""
    set_, few = folder / f"{name}-pics", 12
    for number, pixels in enumerate(images[: 2 * few] if name == "old" else images[-2 * few :]):
        path = set_ / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.squeeze(2)).resize((40, 40)).save(path)
    (folder / f"{name}-cl").mkdir()
    rows = f"{','.join(COLUMNS)}\n{name}-pics/a/0.png,label,,a,b,1,\n{name}-pics/b/1.png,junk,,b,drop,1,\n"
    (folder / f"{name}-cl" / "issues.csv").write_text(rows)
    (folder / f"{name}-cl" / "clean.json").write_text(json.dumps({"data": f"{name}-pics"}))
    with contextlib.chdir(folder):
        build_index(f"{name}-pics")


def content(path: Path) -> object:
    """What must be old or new: the bytes, but for what holds times and for logs, which are read; damage raises."""
    data = path.read_bytes()
    if path.suffix == ".jsonl":
        return [{k: v for k, v in line.items() if k != "seconds"} for line in read(path)]
    if path.name in ("result.json", "tuned.json", "config.json", "dropout.json", "evaluation.json"):
        return sorted(json.loads(data))
    if path.suffix in (".npz", ".pth", ".pt2"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            return sorted((i.filename.split("/", 1)[-1], i.CRC) for i in archive.infolist() if path.suffix == ".npz")
    tables = ("p", "bad-files", "hits", "list", "issues")
    if path.suffix in (".onnx", ".xml", ".bin", ".md", ".csv", ".svg", ".index") and path.stem not in tables:
        return len(data) > 0  # times, or names that a tracer counts
    return hashlib.sha256(data).hexdigest()


def state(folder: Path, outputs: tuple[str, ...]) -> Files:
    """All finished files of the outputs; hidden ones are leftovers, and checked by `leftovers`."""
    paths = [p for name in outputs for p in [folder / name, *(folder / name).rglob("*")] if p.is_file()]
    skipped = ("checkpoints", "events.out", "attempts", "stacks")  # they depend on when they were written
    return {
        str(p.relative_to(folder)): content(p)
        for p in paths
        if not any(part.startswith((".", *skipped)) for part in p.relative_to(folder).parts)
    }


def leftovers(folder: Path) -> list[str]:
    """Hidden files and pieces, but for locks, which nobody holds, and the metadata of a sharded checkpoint."""
    paths = [p for p in folder.rglob("*") if p.name.startswith(".") or p.name.endswith(".parts")]
    return [str(p.relative_to(folder)) for p in paths if p.name not in (".metadata", ".lock")]


def check_state(where: str, scenario: Scenario, old: Files, new: Files, found: Files, code: int) -> None:
    """After a command that ended with this code, minus the signal of a kill: all is old or all is new."""
    if code == 0:
        assert found == new, f"{where}: it said that all went well"
    elif not scenario.together:
        grow = (".jsonl", "bad-files.csv", "best.safetensors", "pack.json")  # or are written more than once
        logs = [p for p in found if p.endswith(grow)]
        assert all(found[p] in (old.get(p), new[p]) or p in logs for p in found), f"{where}: {found}"
    elif scenario.gone and found.keys() != old.keys():
        assert not any(path.endswith(".xml") for path in found), where
    else:
        assert found in (old, new), f"{where}: neither old nor new: {found}"
