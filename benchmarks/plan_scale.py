"""The simulation of `vitkit plan --simulate` beside real trainings, and then far beyond them.

Real: torchrun with 1, 2 and 4 processes of one thread each, on JPEGs that every process decodes itself; the median time
from one step to the next, in rounds that take turns. Simulated: from what was measured in one process without
torchrun (seconds to load a batch, to compute a step; how much slower a core is while another one works), and the number
of cores. Then the simulation alone, for 8 to 1,024 nodes.

    python benchmarks/plan_scale.py --seconds 10
    python benchmarks/plan_scale.py --only-simulate      # keep the measurements, redo the table and the figure

Where the system permits it, all that is measured runs with real-time priority, so that other work on the machine
hardly counts; the results say whether it did.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent
BATCH, IMAGES, SIZE = 8, 96, 128
PROCESSES = (1, 2, 4)
NODES = (8, 16, 32, 64, 128, 256, 512, 1024)
CHANGES = {"depth": 4, "width": 96, "heads": 3, "mlp_width": 384, "patch_size": [8, 8]}


def prioritise() -> bool:
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (OSError, AttributeError):
        return False
    return True


def settings(data: Path, out: Path, processes: int, steps: int) -> Any:
    from vitkit import TrainConfig

    about = {"data": str(data), "out": str(out), "model": "vit-ti/16", "changes": CHANGES, "image_size": SIZE}
    about |= {"steps": steps, "batch_size": BATCH * processes, "lr": 1e-4, "optimizer": "adamw", "augment": "light"}
    return TrainConfig(**about, workers=0, evaluations=1, log_every=1, save_every=1e6, ema=0.0)  # type: ignore[arg-type]


def make_images(folder: Path) -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(IMAGES):
        coarse = random.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((256, 256), Image.Resampling.BICUBIC)
        path = folder / "train" / f"{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, quality=90)
    for number in range(4):
        path = folder / "val" / f"{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, quality=90)


# --- processes that are measured ---------------------------------------------------------------------


def as_rank(data: Path, out: Path, steps: int) -> None:
    """A rank of torchrun; the first one writes when its steps ended."""
    import torch

    from vitkit.training.result import Watcher
    from vitkit.training.run import train

    torch.set_num_threads(1)
    moments: list[float] = []

    class Times(Watcher):
        def step(self, *about: object) -> None:
            moments.append(time.perf_counter())

    train(settings(data, out, int(os.environ["WORLD_SIZE"]), steps), watcher=Times())
    if os.environ["RANK"] == "0":
        out.with_suffix(".json").write_text(json.dumps(np.diff(moments).tolist()))


def alone(data: Path, out: Path, seconds: float) -> None:
    """Seconds to load a batch and to compute a step, in one process without torchrun."""
    import torch

    from vitkit.data import Loader, open_data
    from vitkit.model.build import create
    from vitkit.plan.estimate import timed_step
    from vitkit.training.recipe import complete
    from vitkit.world import World

    torch.set_num_threads(1)
    config = settings(data, out, 1, 10)
    found = open_data(config.data)
    config, _ = complete(config, found, World(0, 1, torch.device("cpu")), None)
    model = create(config.model, **CHANGES, image_size=SIZE, classes=2)
    loader = Loader(found.split("train"), model.config.preprocessing, BATCH, config.augment, channels=3)
    step, loads, steps = timed_step(model, config, BATCH), [], []
    end, batches = time.perf_counter() + seconds, iter(loader)
    while time.perf_counter() < end:
        start = time.perf_counter()
        if next(batches, None) is None:
            batches = iter(loader)
            continue
        loads.append(time.perf_counter() - start)
        steps.append(sum(step()))
    out.write_text(json.dumps({"load": loads[2:], "step": steps[2:]}))


# --- what starts them --------------------------------------------------------------------------------


def start(words: list[str], *launcher: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(ROOT / "plan_scale.py"), *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def measured_alone(folder: Path, seconds: float, together: int) -> dict[str, float]:
    outs = [folder / f"alone-{n}.json" for n in range(together)]
    runs = [start(["--alone", str(folder / "data"), str(out), "--seconds", str(seconds)]) for out in outs]
    assert not any(run.wait(600) for run in runs), "a measurement failed"
    found = [json.loads(out.read_text()) for out in outs]
    about = {what: statistics.median(t for one in found for t in one[what]) for what in ("load", "step")}
    times = [t for one in found for t in one["step"]]
    return about | {"spread": statistics.pstdev(times) / statistics.mean(times)}


def measured_training(folder: Path, processes: int, steps: int, number: int) -> float:
    """Median seconds of a step."""
    out = folder / f"run-{processes}-{number}"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    run = start(["--as-rank", str(folder / "data"), str(out), "--steps", str(steps)], *launcher)
    assert run.wait(900) == 0, f"training with {processes} processes failed"
    return statistics.median(json.loads(out.with_suffix(".json").read_text())[5:])


def predicted(one: dict[str, float], two: dict[str, float], processes: int, cores: int) -> float:
    """Images per second by the simulation."""
    from vitkit.plan.simulate import Pipeline, flow, noisy

    slower = (two["load"] + two["step"]) / (one["load"] + one["step"]) if processes > 1 else 1.0
    line = Pipeline(
        ranks=processes,
        batch=BATCH,
        read=0.0,
        decode=one["load"] * slower,
        step=one["step"] * slower,
        workers=0,
        per_node=processes,
        cores=cores,
        stepping=noisy(min(0.2, one["spread"])),
    )
    return flow(line).images_per_second


def compare(folder: Path, seconds: float, steps: int, rounds: int) -> dict[str, Any]:
    make_images(folder / "data")
    cores = os.cpu_count() or 1
    parts: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    times: dict[int, list[float]] = {n: [] for n in PROCESSES}
    for number in range(rounds):  # in turns, so that other work on the machine meets all of them
        for together in parts:
            parts[together].append(measured_alone(folder, seconds, together))
        for processes in PROCESSES:
            times[processes].append(measured_training(folder, processes, steps, number))
            print(
                f"round {number}, {processes} processes: {BATCH * processes / times[processes][-1]:.1f} img/s",
                flush=True,
            )
    one, two = ({k: statistics.median(p[k] for p in parts[n]) for k in parts[n][0]} for n in parts)
    rows = []
    for processes in PROCESSES:
        speeds = sorted(BATCH * processes / t for t in times[processes])
        simulated, median = predicted(one, two, processes, cores), statistics.median(speeds)
        row = {"processes": processes, "measured": median, "lowest": speeds[0], "highest": speeds[-1]}
        rows.append(
            {k: round(v, 2) for k, v in (row | {"simulated": simulated}).items()}
            | {"ratio": round(simulated / median, 3)}
        )
    return {"one process": one, "two at once": two, "rounds": rounds, "steps": steps, "rows": rows}


def far() -> list[dict[str, Any]]:
    from vitkit.plan import Setup, plan, scale

    rows = []
    for nodes in NODES:
        gpus = 8 * nodes
        made = plan(Setup("vit-h/14", images=1_000_000_000, gpus=gpus, device="h100", epochs=30, batch_size=32 * gpus))
        many = scale(made, simulate=True)
        assert many.simulated is not None
        for case, run in many.simulated.items():
            ideal = gpus * 32 / (made.step.passes + made.step.update)
            row = {"nodes": nodes, "gpus": gpus, "case": case, "images_per_second": round(run.images_per_second)}
            row |= {"of_ideal": round(run.images_per_second / ideal, 3), "waits_for_data": round(run.waits_for_data, 4)}
            row |= {"waits_for_others": round(run.waits_for_others, 4), "failures": round(run.failures, 1)}
            row |= {"lost_share": round(run.lost_share, 4), "days": round(run.days, 3)}
            rows.append(row | {"cost": round(run.days * 24 * gpus * 3.0 * many.assumptions.price.at(case))})  # type: ignore[arg-type]
        print(rows[-2], flush=True)
    return rows


def draw(about: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    from vitkit.figures.style import save_png, styled

    with styled():
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        rows = about["measured"]["rows"]
        names = [str(row["processes"]) for row in rows]
        low = [[row["measured"] - row["lowest"] for row in rows], [row["highest"] - row["measured"] for row in rows]]
        left.errorbar(names, [row["measured"] for row in rows], yerr=low, fmt="o", capsize=4, label="measured")
        left.plot(names, [row["simulated"] for row in rows], "x--", label="simulated")
        left.set(xlabel="processes on two cores", ylabel="img/s", ylim=(0, None))
        for case in ("best", "likely", "worst"):
            own = [row for row in about["simulated"] if row["case"] == case]
            right.plot(
                [row["nodes"] for row in own],
                [100 * row["of_ideal"] * (1 - row["lost_share"]) for row in own],
                "o-",
                label=case,
            )
        right.set(xlabel="nodes of 8 H100, simulated", ylabel="% of ideal throughput", xscale="log", ylim=(0, 105))
        right.set_xticks(NODES, [f"{n:,}" for n in NODES])
        left.legend()
        right.legend()
        save_png(
            figure, path, "Measured and simulated throughput; simulated efficiency by number of nodes", "two plots"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--as-rank", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-simulate", action="store_true")
    parser.add_argument("--save", type=Path, default=ROOT / "results" / "plan_scale.json")
    parser.add_argument("--figure", type=Path, default=ROOT.parent / "docs" / "images" / "plan-scale.png")
    args = parser.parse_args()
    if args.alone or args.as_rank:
        prioritise()
        return alone(*args.alone, args.seconds) if args.alone else as_rank(*args.as_rank, args.steps)
    from harness import machine

    if args.only_simulate:
        about = json.loads(args.save.read_text())
    else:
        can = subprocess.run(["chrt", "-r", "1", "true"], capture_output=True, check=False).returncode == 0
        about = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "real-time priority": can}
        with tempfile.TemporaryDirectory() as folder:
            about["measured"] = compare(Path(folder), args.seconds, args.steps, args.rounds)
    args.save.write_text(json.dumps(about, indent=1) + "\n")
    about["simulated"] = far()
    args.save.write_text(json.dumps(about, indent=1) + "\n")
    draw(about, args.figure)
    return None


if __name__ == "__main__":
    main()
