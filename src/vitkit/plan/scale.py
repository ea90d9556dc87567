"""A plan for many machines: network, storage, checkpoints and failures; days and money as ranges.

The closed forms stand here; with `simulate` the input pipeline and the failures are simulated as well (`simulate.py`).
What is taken for granted is in one table (`assumptions.py`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from vitkit.plan.assumptions import ASSUMED, Assumptions, Case
from vitkit.plan.estimate import Plan
from vitkit.plan.simulate import Failures, Flow, Pipeline, best_interval, expected, flow, noisy, survive

CASES: tuple[Case, ...] = ("best", "likely", "worst")
LEAST_INTERVAL = 60.0  # seconds between checkpoints, at least
RUNS = 20  # simulated runs, of which the mean is taken
Spread = tuple[float, float, float]  # best, likely, worst


@dataclass(frozen=True)
class Scale:
    """Seconds and bytes; triples are the best, the likely and the worst case."""

    nodes: int
    network_bytes: float  # out of each node, in one step
    network_rate: float  # bytes/s, on average over a step
    storage_rate: float  # bytes/s that each node must read
    storage_bytes: float  # that each node reads in an epoch
    shards: int
    index_bytes: float  # of all samples; mapped once for all processes of a node
    checkpoint_bytes: float
    checkpoint_seconds: Spread  # until it is written, in the background
    interval: Spread  # between checkpoints, by Young
    node_failures: Spread  # in the whole run
    fed: Spread  # share of the needed images that storage and cores of a node deliver
    efficiency: Spread  # share of the time that failures and checkpoints leave
    days: Spread
    cost: Spread
    assumptions: Assumptions
    simulated: dict[Case, Simulated] | None = None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Simulated:
    images_per_second: float
    step: float
    waits_for_data: float
    waits_for_others: float
    days: float
    days_first_tenth: float  # a run in ten is shorter
    days_last_tenth: float  # a run in ten is longer
    failures: float
    lost_share: float  # of the time, done twice or spent on restarts


def scale(made: Plan, assumed: Assumptions = ASSUMED, simulate: bool = False, seed: int = 0) -> Scale:
    setup, gpus = made.setup, made.setup.gpus
    share = gpus if setup.shard else 1
    weights = made.memory.parameters * share
    held = weights + made.memory.optimizer * share
    # A ring passes through every node once: DDP sums gradients (2 x), FSDP gathers twice and scatters once.
    ring = 2 * weights * setup.shard + (1 if setup.shard else 2) * made.memory.gradients * share
    sent = (gpus - 1) / gpus * ring * (made.machines > 1)
    cases = [_case(made, assumed, case, held) for case in CASES]
    columns = {name: tuple(c[name] for c in cases) for name in cases[0]}
    runs = {case: _simulate(made, assumed, case, held, seed) for case in CASES} if simulate else None
    return Scale(
        nodes=made.machines,
        network_bytes=sent,
        network_rate=sent / made.step.total,
        storage_rate=made.images_per_second / made.machines * setup.image_bytes,
        storage_bytes=setup.images * setup.image_bytes / made.machines,
        shards=made.shards,
        index_bytes=assumed.index.likely * setup.images,
        checkpoint_bytes=held,
        **columns,  # type: ignore[arg-type]
        assumptions=assumed,
        simulated=runs,
    )


def _failures(made: Plan, assumed: Assumptions, case: Case, held: float) -> tuple[Failures, float]:
    """How runs fail, and the seconds in which a checkpoint is written."""
    writers = made.machines if made.setup.shard else 1
    writing = held / writers / assumed.written.at(case)
    copying = held / writers / assumed.copied.at(case)  # what training waits for
    mtbf = 3600 * assumed.node_mtbf.at(case) / made.machines
    interval = max(best_interval(mtbf, copying), writing, LEAST_INTERVAL)
    return Failures(mtbf, assumed.restart.at(case), copying, interval), writing


def _case(made: Plan, assumed: Assumptions, case: Case, held: float) -> dict[str, float]:
    failures, writing = _failures(made, assumed, case, held)
    need = made.images_per_second / made.machines / assumed.step.at(case)
    read = assumed.storage.at(case) / made.setup.image_bytes
    fed = min(1.0, read / need, assumed.cores.at(case) * assumed.decoded.at(case) / need)
    work = 3600 * made.hours * assumed.step.at(case) / fed
    seconds = expected(work, failures)
    price = (made.setup.price or 0.0) * assumed.price.at(case)
    return {
        "checkpoint_seconds": writing,
        "interval": failures.interval,
        "node_failures": seconds / failures.mtbf,
        "fed": fed,
        "efficiency": work / seconds,
        "days": seconds / 86400,
        "cost": seconds / 3600 * made.setup.gpus * price,
    }


def pipeline(made: Plan, assumed: Assumptions, case: Case) -> Pipeline:
    """How images reach the ranks of a plan."""
    setup, per_node = made.setup, math.ceil(made.setup.gpus / made.machines)
    step = (made.step.passes + made.step.update) * assumed.step.at(case)
    return Pipeline(
        ranks=setup.gpus,
        batch=setup.per_device,
        read=setup.per_device * setup.image_bytes / assumed.storage.at(case),
        decode=setup.per_device / assumed.decoded.at(case),
        step=step,
        exchange=made.step.exchange,
        workers=max(1, round(assumed.cores.at(case) / per_node)),
        per_node=per_node,
        decoding=noisy(0.2),
        stepping=noisy(assumed.spread.at(case), assumed.slow_steps.at(case)),
    )


def _simulate(made: Plan, assumed: Assumptions, case: Case, held: float, seed: int) -> Simulated:
    line = pipeline(made, assumed, case)
    steps = max(60, min(400, 4 * line.workers * line.ahead, round(600_000 / line.ranks)))
    found: Flow = flow(line, max(steps, 2 * line.workers * line.ahead + 40), seed)
    failures, _ = _failures(made, assumed, case, held)
    runs = [survive(made.steps * found.step, failures, seed + run) for run in range(RUNS)]
    days = sorted(run.seconds / 86400 for run in runs)
    total = sum(run.seconds for run in runs)
    return Simulated(
        found.images_per_second,
        found.step,
        found.waits_for_data,
        found.waits_for_others,
        days=sum(days) / RUNS,
        days_first_tenth=days[RUNS // 10],
        days_last_tenth=days[-1 - RUNS // 10],
        failures=sum(run.failures for run in runs) / RUNS,
        lost_share=sum(run.lost + run.restarting for run in runs) / total,
    )
