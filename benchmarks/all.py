"""Every benchmark, one after another: `make bench` in under 45 minutes, `make bench-full` whole, in some hours.

    python benchmarks/all.py              # the short forms
    python benchmarks/all.py --long       # all of them whole

Results go to `results/NAME.json`, each with the machine, the commit and the day; `results/bench.json` says which of
them belong together, and how long each took. Stopped? The same command resumes: what was measured at this commit on
this day is not measured again (`--restart` does). What each one prints is in `results/logs/NAME.txt`. Run it on a
quiet machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import RESULTS, machine
from vitkit.progress import Bar

HERE = Path(__file__).parent
SUMMARY = RESULTS / "bench.json"
# name -> options of the short form, and the minutes it takes, for the bar. In the order of worth.
BENCHMARKS: dict[str, tuple[str, float]] = {
    "forward": ("--seconds 8 --rounds 7 --no-memory", 3.5),
    "train_step": ("--seconds 8 --rounds 5 --no-memory", 4.0),
    "inference": ("--seconds 5", 7.0),
    "time_to_accuracy": ("--short", 11.5),
    "serve": ("--seconds 16 --requests 6000", 2.5),
    "plan": ("", 3.0),
    "load": ("", 2.0),
    "data": ("", 2.0),
    "explain": ("--parts layer --seconds 5", 1.0),
    "training": ("--only processes", 1.0),
    "attention": ("--seconds 1", 2.0),
}
WHOLE_ONLY = ("shards", "storage", "ray_engine", "plan_scale", "curation", "kills", "soak")  # too long for a short form


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="everything whole: some hours")
    parser.add_argument("--only", nargs="+", choices=[*BENCHMARKS, *WHOLE_ONLY])
    parser.add_argument("--restart", action="store_true", help="measure again what was measured at this commit today")
    args = parser.parse_args()
    form = "long" if args.long else "short"
    summary = resumed(form, args.restart)
    names = args.only or [*BENCHMARKS, *(WHOLE_ONLY if args.long else ())]
    left = [name for name in names if name not in summary["minutes"]]
    failed = []
    with Bar() as bar:
        for done, name in enumerate(names):
            if name in left:
                bar.note(f"{name} ({done + 1} of {len(names)}, {waiting(left[left.index(name) :], args.long)})")
                if not measure(name, args.long, summary, bar):
                    failed.append(name)
    for name in failed:
        print(f"{name} failed: see {RESULTS.name}/logs/{name}.txt", file=sys.stderr)
    print(f"{sum(summary['minutes'].values()):.1f} minutes in all, {len(failed)} failed", flush=True)
    return 1 if failed else 0


def short_form(name: str) -> tuple[str, float]:
    return BENCHMARKS.get(name, ("", 60.0))


def waiting(names: list[str], long: bool) -> str:
    return "hours left" if long else f"about {sum(short_form(name)[1] for name in names):.0f} minutes left"


def resumed(form: str, restart: bool) -> dict[str, Any]:
    """What was measured at this commit on this day, in this form; else a new summary."""
    about = machine()
    if SUMMARY.exists() and not restart:
        found: dict[str, Any] = json.loads(SUMMARY.read_text())
        same = all(found["machine"].get(key) == about[key] for key in ("commit", "date", "cpu", "threads"))
        if same and found["form"] == form:
            return found
    return {"machine": about, "form": form, "minutes": {}}


def measure(name: str, long: bool, summary: dict[str, Any], bar: Bar) -> bool:
    """One benchmark in a process of its own; the summary tells once it is done."""
    options, expected = short_form(name)
    log = RESULTS / "logs" / f"{name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("w") as out:
        command = [sys.executable, str(HERE / f"{name}.py"), *([] if long else options.split())]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            minutes = (time.monotonic() - started) / 60
            bar.update(name, min(minutes, 0.99 * expected), None if long else expected)
            time.sleep(0.5)
    if process.returncode:
        return False
    summary["minutes"][name] = round((time.monotonic() - started) / 60, 2)
    SUMMARY.write_text(json.dumps(summary, indent=1) + "\n")
    return True


if __name__ == "__main__":
    sys.exit(main())
