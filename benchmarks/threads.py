"""Training beside busy neighbours: how fast a step is with one thread and with all, by how OpenMP's threads wait.

A thread that waits for the others spins by default: where another process has taken its core, all of them spin until
it is back. With OMP_WAIT_POLICY=passive, which `vitkit train` sets, they sleep. Every figure is of a process of its
own, since the policy is read once; the order of the cases turns from round to round.

    python benchmarks/threads.py             # about four minutes
    python benchmarks/threads.py --quick     # half a minute, to see that it runs
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import machine, save, table

STEP = """
import sys, time, torch, torch.nn.functional as F, vitkit
torch.set_num_threads(int(sys.argv[1]))
model = vitkit.create("hybrid-32px/8").train()
images, labels = torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))
def step():
    start = time.perf_counter()
    F.cross_entropy(model(images), labels).backward()
    return time.perf_counter() - start
step(), step()
spent = []
while sum(spent) < float(sys.argv[2]):
    spent.append(step())
print(128 * len(spent) / sum(spent))
"""
BUSY = "while True: pass"
#        name: threads (0: all), OMP_WAIT_POLICY
CASES = {"one thread": (1, ""), "all, spinning": (0, ""), "all, sleeping": (0, "passive")}


def speed(threads: int, policy: str, seconds: float) -> float:
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")}
    environment = kept | ({"OMP_WAIT_POLICY": policy} if policy else {})
    words = [sys.executable, "-c", STEP, str(threads or os.cpu_count() or 1), str(seconds)]
    return float(subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout)


def beside(neighbours: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(neighbours)]
    try:
        found: dict[str, list[float]] = {name: [] for name in CASES}
        for turn in range(rounds):
            names = list(CASES)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                found[name].append(speed(*CASES[name], seconds))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    one = statistics.median(found["one thread"])
    rows = []
    for name, speeds in found.items():
        median = statistics.median(speeds)
        low, high = min(speeds), max(speeds)
        about = {
            "img/s": round(median),
            "least": round(low),
            "most": round(high),
            "to one thread": round(median / one, 2),
        }
        rows.append({"busy neighbours": neighbours, "threads": name, **about})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each process")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    about, rows = machine(), []
    for neighbours in (0, 1, 2):
        rows += beside(neighbours, *((1, 1.0) if args.quick else (args.rounds, args.seconds)))
    print(table(rows))
    save(Path(__file__).stem, args.save, about, rows, args.quick)


if __name__ == "__main__":
    main()
