"""Plans against what is measured on this CPU: memory at the peak of a training step, and its time.

    python benchmarks/plan.py            # about four minutes
    python benchmarks/plan.py --quick    # a minute

Memory is measured in a process of its own, with glibc told to give freed blocks back at once
(MALLOC_MMAP_THRESHOLD_): otherwise it keeps what it may need again, and with gradient checkpointing a process
then holds three times what the step needs. Time is planned from shallow copies of the model and measured
on the whole one, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from harness import machine, megabytes_in_use, peak_megabytes_of, save, table
from vitkit.model.build import create
from vitkit.plan import Setup
from vitkit.plan.estimate import measured_step, timed_step
from vitkit.plan.memory import training_memory
from vitkit.plan.setup import complete

GOAL = 0.15
CASES: tuple[tuple[str, int, bool, str], ...] = (
    ("vit-32px/4", 64, False, "muon"),
    ("vit-ti/16", 16, False, "adamw"),
    ("vit-ti/16", 16, True, "adamw"),
    ("vit-s/16", 8, False, "muon"),
    ("vit-b/16", 4, False, "adamw"),
)


def case(name: str, batch: int, checkpointing: bool, optimizer: str) -> dict[str, Any]:
    model = create(name)
    setup = complete(Setup(name, batch_size=batch, checkpointing=checkpointing, optimizer=optimizer))
    planned = training_memory(model.config, setup.train, batch).peak / 2**20
    held = memory_in_a_process(name, batch, checkpointing, optimizer)
    expected, real = float("inf"), float("inf")
    step = timed_step(model, setup.train, batch)
    step()
    for _ in range(3):  # in turns, so that what else the machine does meets both alike
        expected = min(expected, measured_step(model.config, setup, seconds=2.0).total)
        real = min(real, *(sum(step()) for _ in range(2)))
    return {
        "model": name,
        "batch": batch,
        "checkpointing": checkpointing,
        "optimizer": optimizer,
        "planned_mb": round(planned),
        "measured_mb": round(held),
        "memory_ratio": round(planned / held, 3),
        "planned_seconds": round(expected, 3),
        "measured_seconds": round(real, 3),
        "time_ratio": round(expected / real, 3),
        "goal": GOAL,
    }


def memory_in_a_process(*what: Any) -> float:
    command = [sys.executable, __file__, "--memory-of", json.dumps(what)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.split()[-1])


def memory_of(name: str, batch: int, checkpointing: bool, optimizer: str) -> None:
    setup = complete(Setup(name, batch_size=batch, checkpointing=checkpointing, optimizer=optimizer))
    timed_step(create("mu"), setup.train, 1)()  # libraries are loaded
    before = megabytes_in_use()
    step = timed_step(create(name), setup.train, batch)
    step()  # an optimiser makes its state in the first step
    print(peak_megabytes_of(step) - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.memory_of:
        return memory_of(*json.loads(args.memory_of))
    about, rows = machine(), []
    for one in CASES[:1] if args.quick else CASES:
        start = time.perf_counter()
        rows.append(case(*one))
        print(table(rows[-1:]), f"({time.perf_counter() - start:.0f} s)", flush=True)
    return save("plan", args.save, about, rows, args.quick)


if __name__ == "__main__":
    main()
