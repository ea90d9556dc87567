"""A training step by threads and by processes, alone and beside busy neighbours.

A thread that waits for the others spins by default: where another process has taken its core, all of them spin until
it is back. With OMP_WAIT_POLICY=passive they sleep at once; with GOMP_SPINCOUNT=1000, which `vitkit train` sets, they
spin for some microseconds and then sleep. Processes have a thread each, the images of a batch in equal parts, and
exchange gradients once a step, as with torchrun. A step is forward, backward, clipping and Muon. Every figure is of
processes of its own, since both are read once; the order of the cases turns from round to round.

    python benchmarks/threads.py             # about a quarter of an hour
    python benchmarks/threads.py --quick     # half a minute, to see that it runs
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import machine, save, table

BUSY = "while True: pass"
CORES = os.cpu_count() or 1
BRIEFLY = {"GOMP_SPINCOUNT": "1000"}
#        name: threads, processes, how a thread waits
CASES: dict[str, tuple[int, int, dict[str, str]]] = {
    "one thread": (1, 1, BRIEFLY),
    "all threads, spinning": (CORES, 1, {}),
    "all threads, spinning briefly": (CORES, 1, BRIEFLY),
    "all threads, sleeping": (CORES, 1, {"OMP_WAIT_POLICY": "passive"}),
    "as many processes": (1, CORES, BRIEFLY),
}
#         name: images of a step, on all processes
MODELS = {"hybrid-32px/8-m": 256, "vit-32px/4": 128, "vit-28px/7": 128, "vit-ti/16": 16}
OURS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")


def steps(name: str, threads: int, seconds: float) -> None:
    """Of one process; the first prints images a second."""
    import torch

    import vitkit
    from vitkit.plan.memory import Step
    from vitkit.training.optim import Muon
    from vitkit.training.parts import wrap
    from vitkit.training.recipe import precision_for
    from vitkit.world import joined

    with joined("cpu") as world:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        model = vitkit.create(name)
        half = precision_for(model.config, world.device)
        step = Step(model, vitkit.TrainConfig(optimizer="muon", lr=0.01, weight_decay=0.05, precision=half))
        images, labels = step.batch(MODELS[name] // world.size)
        images.normal_()
        step.trainee = wrap(step.trainee, world, shard=False)  # type: ignore[assignment]
        for optimizer in step.optimizers:
            if isinstance(optimizer, Muon):
                optimizer.world = world
        spent, count = 0.0, -2  # the first two allocate
        while world.largest(spent)[0] < seconds:
            start = time.perf_counter()
            for optimizer in step.optimizers:
                optimizer.zero_grad(set_to_none=True)
            step.loss(images, labels).backward()
            step.update()
            count += 1
            spent += time.perf_counter() - start if count > 0 else 0.0
        if world.first:
            print(MODELS[name] * count / spent)


def speed(name: str, case: str, seconds: float) -> float:
    threads, processes, waiting = CASES[case]
    kept = {k: v for k, v in os.environ.items() if k not in OURS} | waiting
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    place |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)} if processes > 1 else {}
    words = [sys.executable, __file__, "--model", name, "--threads", str(threads), "--seconds", str(seconds)]
    ranks = [kept | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    started = [subprocess.Popen(words, env=rank, stdout=subprocess.PIPE, text=True) for rank in ranks]
    answers = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{name}, {case}: a process has failed; its message is above")
    return float(answers[0])


def beside(name: str, neighbours: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(neighbours)]
    try:
        found: dict[str, list[float]] = {case: [] for case in CASES}
        for turn in range(rounds):
            cases = list(CASES)
            for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
                found[case].append(speed(name, case, seconds))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    one = statistics.median(found["one thread"])
    rows = []
    for case, speeds in found.items():
        median, low, high = (round(f(speeds)) for f in (statistics.median, min, max))
        about = {
            "img/s": median,
            "least": low,
            "most": high,
            "to one thread": round(statistics.median(speeds) / one, 2),
        }
        rows.append({"model": name, "busy neighbours": neighbours, "step": case, **about})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each process")
    parser.add_argument("--model", choices=MODELS, help="only the speed of this one, with --threads")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--neighbours", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.model:
        steps(args.model, args.threads, args.seconds)
        return
    about, rows = machine(), []
    for name in args.models[: 1 if args.quick else None]:
        for neighbours in args.neighbours[: 2 if args.quick else None]:
            rows += beside(name, neighbours, *((1, 0.5) if args.quick else (args.rounds, args.seconds)))
            print(table(rows[-len(CASES) :]), flush=True)
    save(Path(__file__).stem, args.save, about, rows, args.quick)


if __name__ == "__main__":
    main()
