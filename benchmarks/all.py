"""Every benchmark, one after another, within half an hour: `make bench`.

    python benchmarks/all.py              # long ones in a short form, kept as NAME-quick.json
    python benchmarks/all.py --long       # all of them whole: some hours

What does not fit into the time is named at the end, and the exit code is then 1. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from harness import RESULTS

HERE = Path(__file__).parent
MINUTES = 30.0
# In the order of worth. Options of the short form; None: it is short as it is.
BENCHMARKS: dict[str, list[str] | None] = {
    "forward": ["--seconds", "10"],
    "train_step": ["--seconds", "10"],
    "load": None,
    "data": None,
    "inference": ["--seconds", "5"],
    "serve": None,
    "plan": None,
    "attention": None,
    "explain": ["--quick"],
    "training": ["--quick"],
    "time_to_accuracy": ["--quick"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="everything whole, without a limit")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--minutes", type=float, default=MINUTES)
    args = parser.parse_args()
    start, failed = time.monotonic(), {}
    for name in args.only:
        script = HERE / f"{name}.py"
        if not script.exists():
            continue
        left = None if args.long else max(1.0, 60 * args.minutes - (time.monotonic() - start))
        options = [] if args.long else BENCHMARKS[name] or []
        if "--quick" in options:
            options = [*options, "--save", str(RESULTS / f"{name}-quick.json")]
        print(f"== {name} {' '.join(options)}", flush=True)
        try:
            done = subprocess.run([sys.executable, str(script), *options], check=False, timeout=left)
            if done.returncode:
                failed[name] = f"ended with code {done.returncode}"
        except subprocess.TimeoutExpired:
            failed[name] = f"did not fit into {args.minutes:g} minutes"
    for name, why in failed.items():
        print(f"{name}: {why}", file=sys.stderr)
    print(f"{(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
