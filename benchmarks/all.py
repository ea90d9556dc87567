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
# In the order of worth, with the options of the short form. The long form measures memory too, and for longer.
BENCHMARKS = {
    "forward": "--seconds 6 --no-memory",
    "train_step": "--seconds 6 --rounds 3 --no-memory",
    "load": "",
    "data": "",
    "inference": "--seconds 4 --budget 30s",
    "serve": "--seconds 16 --requests 6000",
    "plan": "",
    "attention": "--seconds 1",
    "explain": "--quick --parts layer report",
    "training": "--quick",
    "time_to_accuracy": "--quick",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="everything whole, without a limit")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--minutes", type=float, default=MINUTES)
    args = parser.parse_args()
    start, failed = time.monotonic(), {}
    for name in args.only:
        begun = time.monotonic()
        left = None if args.long else max(1.0, 60 * args.minutes - (begun - start))
        options = [] if args.long else BENCHMARKS[name].split()
        if "--quick" in options:
            options += ["--save", str(RESULTS / f"{name}-quick.json")]
        print(f"== {name} {' '.join(options)}", flush=True)
        try:
            done = subprocess.run([sys.executable, str(HERE / f"{name}.py"), *options], check=False, timeout=left)
            how = f"ended with code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            how = f"did not fit into {args.minutes:g} minutes"
        if how:
            failed[name] = how
        print(f"== {name}: {how or 'done'} after {(time.monotonic() - begun) / 60:.1f} minutes", flush=True)
    for name, how in failed.items():
        print(f"{name}: {how}", file=sys.stderr)
    print(f"{(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
