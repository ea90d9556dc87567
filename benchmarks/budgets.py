"""Is a budget kept? Runs of 1 and 2 minutes (5 and 10 with --long), timed from outside, the command's start included.

    python benchmarks/budgets.py                                    # digits and CIFAR-10, idle: about 20 minutes
    python benchmarks/budgets.py --photos FOLDER --busy --long      # all of it
    python benchmarks/budgets.py --quick                            # a minute, to see that it runs

Every set is trained from scratch, fine-tuned from a ViT-S/14 made for 518 pixels, and as a head on that one frozen. The
weights are random: they are here for what they cost, and their accuracies mean nothing. `--busy` runs each case once
more beside a process that keeps one core busy. `--only` takes cases by number; results are added to the file, so that a
long table can be measured in parts.

Columns: time by budget (1.1 is the limit), the share of the run spent on learning (0.7 is the goal; starting up,
measuring, baseline, evaluation and saving are the rest), the image size chosen, passes over the data, validation and
test images evaluated, test accuracy, and the baseline's accuracy on validation.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from harness import RESULTS, machine, save, table

SHORT, LONG = (1.0, 2.0), (5.0, 10.0)  # minutes
WAYS = {"scratch": [], "init": ["--init", "S14"], "frozen": ["--init", "S14", "--freeze", "backbone"]}


class Case(NamedTuple):
    data: str
    how: str  # a name of WAYS
    minutes: float
    busy: bool

    @property
    def key(self) -> list[Any]:
        return [Path(self.data).name, self.how, self.minutes, self.busy]


def cases(args: argparse.Namespace) -> list[Case]:
    sets = [*args.data, *([args.photos] if args.photos else [])]
    minutes = [0.4] if args.quick else [*SHORT, *(LONG if args.long else ())]
    neighbours = [False, True] if args.busy else [False]
    every = [Case(d, how, m, b) for b in neighbours for d in sets for how in WAYS for m in minutes]
    return [case for case in every if not (case.how != "scratch" and case.data == "digits")]  # 8 pixels at 518: nobody


def checkpoint(folder: Path) -> Path:
    """A ViT-S/14 for 518 pixels with random weights."""
    import vitkit

    path = folder / "s14.safetensors"
    if not path.exists():
        vitkit.save(vitkit.create("vit-s/16", patch_size=14, image_size=518), path)
    return path


def _spin() -> None:
    while True:
        sum(range(10_000))


@contextmanager
def neighbour(there: bool) -> Iterator[None]:
    """A process that keeps one core busy."""
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) if there else None
    if process is not None:
        process.start()
        time.sleep(1.0)
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.join()


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """`vitkit train DATA --budget ...` as a user would type it."""
    start = str(checkpoint(folder))
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    options = [start if word == "S14" else word for word in WAYS[case.how]]
    command = [sys.executable, "-m", "vitkit", "train", case.data, *options, "--budget", f"{60 * case.minutes:.0f}s"]
    with neighbour(case.busy):
        before = time.monotonic()
        done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
        seconds = time.monotonic() - before
    name, how, minutes, busy = case.key
    row: dict[str, Any] = {"data": name, "how": how, "minutes": minutes, "busy": busy}
    if done.returncode:
        return {**row, "error": done.stderr.strip().splitlines()[-1][:200]}
    result, config = (json.loads((out / file).read_text()) for file in ("result.json", "config.json"))
    baseline = [round(one["score"], 4) for one in result["baseline"]]
    return {
        **row,
        "time / budget": round(seconds / (60 * minutes), 3),
        "learning": round(result["learning"] / seconds, 3),
        "size": config["model"]["image_size"][0],
        "batch": config["train"]["batch_size"],
        "passes": round(result["epochs"], 2),
        "validation": "/".join(map(str, result["images"].get("validation", ()))),
        "test": "/".join(map(str, result["images"].get("test", ()))),
        "accuracy": round(result["test"].get("top1", 0.0), 4),
        "baseline": " ".join(map(str, baseline)),
        "loaded": (out / "best.safetensors").is_file(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=["digits", "cifar10"])
    parser.add_argument("--photos", help="a folder of photographs, one folder for each class")
    parser.add_argument("--busy", action="store_true", help="also beside a busy neighbour")
    parser.add_argument("--long", action="store_true", help="also 5 and 10 minutes")
    parser.add_argument("--quick", action="store_true", help="24 seconds each, on digits")
    parser.add_argument("--only", nargs="+", type=int, metavar="N", help="cases by number; --list shows them")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--save", type=Path, default=None)
    args = parser.parse_args()
    if args.quick:
        args.data = ["digits"]
    chosen = list(enumerate(cases(args)))
    if args.list:
        print("\n".join(f"{n}: {' '.join(map(str, case.key))}" for n, case in chosen))
        return 0
    path, about = args.save or RESULTS / "budgets.json", machine()
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() and not args.quick else []
    with tempfile.TemporaryDirectory() as folder:
        for n, case in chosen:
            if not args.only or n in args.only:
                row = measure(case, Path(folder))
                print(row, flush=True)
                rows = [*(r for r in rows if [r[k] for k in ("data", "how", "minutes", "busy")] != case.key), row]
                save("budgets", args.save, about, rows, args.quick)
    whole = [row for row in rows if "error" not in row]
    if whole:
        print(table(whole))
    kept = [row for row in whole if row["time / budget"] <= 1.1 and row["learning"] >= 0.7]
    print(f"{len(kept)} of {len(rows)} within 1.1 of the budget with 70% for learning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
