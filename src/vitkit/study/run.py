"""A study from its name to its result: plan, choose learning rates, train every arm with every seed, write.

The plan says how many steps a budget buys here. It is made once, from a few timed steps of every arm, and kept
beside the result: a study that is resumed after a kill keeps its plan, and so its numbers.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from vitkit.errors import ConfigError, did_you_mean
from vitkit.io import read_json, write_json
from vitkit.model.build import build
from vitkit.model.config import AnyConfig, ResNetConfig
from vitkit.model.summary import summarize
from vitkit.plan.estimate import timed_step
from vitkit.progress import SILENT, Progress
from vitkit.study import variants
from vitkit.study.runs import Outcome, Run, finish, recall, train_config
from vitkit.study.sets import Sets, open_sets
from vitkit.study.studies import STUDIES
from vitkit.study.table import BATCH, Arm, Context, Result, Row, Setting, Study, Table
from vitkit.study.write import write

SEARCH = 1 / 3  # a training of the search takes this share of the steps
SEARCH_SEED = 1000  # none of the seeds that count
LEAST_STEPS = 20
MOST_EPOCHS = 100


def named(name: str) -> Study:
    if name not in STUDIES:
        raise ConfigError(f"there is no study {name!r}.{did_you_mean(name, STUDIES)} `vitkit study` lists them all")
    return STUDIES[name]


def run(
    name: str,
    data: str = "digits",
    out: Path = Path("studies"),
    budget: float = 600.0,
    steps: int = 0,
    seeds: int = 3,
    progress: Progress = SILENT,
) -> Result:
    """Everything: `out/runs` remembers each training, `out/NAME` gets table, figure and finding."""
    study = named(name)
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds} must be at least 1; 3 give an interval")
    sets, start = open_sets(data), time.perf_counter()
    plan = Plan(steps, 0.0) if steps else kept_plan(out / name / "plan.json", study, sets, seeds, budget)
    trainings = _Trainings(study, sets, plan, seeds, out / "runs", progress)
    rows = tuple(trainings.row(arm) for arm in trainings.arms)
    table = Table(rows, {**sets.describe(), "channels": sets.setting.channels, "classes": sets.setting.classes})
    command = f"vitkit study {name} --data {data} --steps {plan.steps} --seeds {seeds}"
    here, trained = round(time.perf_counter() - start, 1), round(sum(row.spent for row in rows), 1)
    context = Context(command, plan.steps, BATCH, seeds, machine(), here, sets.describe(), trained)
    result = Result(study, table, study.find(table), context)
    write(result, out / name)
    return result


def machine() -> str:
    threads = torch.get_num_threads()
    cores = f"{threads} {torch.backends.cpu.get_cpu_capability()} core{'s' if threads != 1 else ''}"
    return f"{cores}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}"


class _Trainings:
    """All trainings of a study, each remembered when it is finished."""

    def __init__(self, study: Study, sets: Sets, plan: Plan, seeds: int, folder: Path, progress: Progress) -> None:
        self.study, self.sets, self.steps, self.seeds = study, sets, plan.steps, seeds
        self.folder, self.progress = folder, progress
        self.arms = study.arms(sets.setting)
        self.rates: dict[str, float] = {}  # by arm
        self.done, self.total, self.start = 0, count_trainings(self.arms, seeds), time.monotonic()
        minutes = f", about {plan.seconds / 60:.1f} minutes" if plan.seconds else ""
        progress.note(f"{study.name}: {self.total} trainings of up to {plan.steps:,} steps{minutes}")

    def row(self, arm: Arm) -> Row:
        searched, counted = self._search(arm), summarize(arm.config)
        lr = self.rates[arm.name]
        runs = [self._run(arm, lr, seed) for seed in range(self.seeds)]
        outcomes = [self._finish(one, f"{arm.name}, seed {one.seed}") for one in runs]
        return Row(
            name=arm.name,
            accuracy=tuple(o.accuracy for o in outcomes),
            tags=arm.tags,
            lr=lr if arm.length else None,
            at_edge=bool(searched) and lr in (min(arm.rates), max(arm.rates)),
            params=counted["params"],
            macs=round(counted["gmacs"] * 1e9),
            images=of_length(self.steps, arm.length) * min(BATCH, len(self.sets.part(arm.share, 0))),
            seconds=sum(o.cpu_seconds for o in outcomes) / len(outcomes),
            spent=sum(o.cpu_seconds for o in (*outcomes, *searched)),
            extra=tuple(o.measured for o in outcomes) if arm.measure else (),
            losses=tuple(tuple(o.losses) for o in outcomes),
        )

    def _search(self, arm: Arm) -> list[Outcome]:
        """Choose the best learning rate of the fixed search on val, or take that of the arm it is borrowed from."""
        if not arm.length or arm.rate_of:
            self.rates[arm.name] = self.rates[arm.rate_of] if arm.length else 0.0
            return []
        runs = [self._run(arm, lr, SEARCH_SEED, searching=True) for lr in arm.rates]
        outcomes = [self._finish(one, f"{arm.name}, learning rate {one.lr:g}") for one in runs]
        self.rates[arm.name] = max(zip(runs, outcomes, strict=True), key=lambda pair: pair[1].accuracy)[0].lr
        return outcomes

    def _run(self, arm: Arm, lr: float, seed: int, searching: bool = False) -> Run:
        before = None
        if arm.before is not None:  # a search starts from the first seed's weights: one training less
            before = self._run(arm.before, self.rates[arm.before.name], 0 if searching else seed)
        share, split, measure = (SEARCH, "val", "") if searching else (1, "test", arm.measure)
        steps = of_length(self.steps, arm.length * share)
        return Run(arm.config, steps, lr, seed, arm.variant, arm.share, split, measure, before, arm.fresh_positions)

    def _finish(self, one: Run, what: str) -> Outcome:
        known = recall(one, self.sets, self.folder)
        outcome = known or finish(one, self.sets, self.folder)
        self.done += 1
        took = "remembered" if known else f"{time.monotonic() - self.start:.0f} s"
        self.progress.note(f"{self.done:3}/{self.total}  {outcome.accuracy:6.1%}  {what}  ({took})")
        self.progress.update(self.study.name, self.done, self.total)
        return outcome


@dataclass(frozen=True)
class Plan:
    steps: int
    seconds: float  # that the whole study is expected to take


def of_length(steps: int, length: float) -> int:
    return max(1, round(steps * length)) if length else 0


def count_trainings(arms: Iterable[Arm], seeds: int) -> int:
    """Trainings and, for arms that are not trained, evaluations."""
    return sum(seeds + (len(arm.rates) if arm.length and not arm.rate_of else 0) for arm in arms)


def cost(arms: Iterable[Arm], seeds: int, seconds: dict[str, float], sizes: dict[str, int]) -> tuple[float, float]:
    """Seconds per step of the study, and seconds that do not depend on its steps."""
    per_step = fixed = 0.0
    for arm in arms:
        searched = count_trainings([arm], 0)
        per_step += arm.length * (seeds + SEARCH * searched) * seconds[arm.name]
        evaluated = sizes["test"] * seeds * (1.5 if arm.measure else 1.0) + sizes["val"] * searched
        fixed += evaluated * seconds[arm.name] / BATCH / 3  # a forward pass is about a third of a step
    return per_step, fixed


def bought(budget: float, per_step: float, fixed: float, images: int) -> Plan:
    """As many steps as fit into the budget, at most 100 times over the training images."""
    steps = min(max(0, int((budget - fixed) / per_step)), MOST_EPOCHS * images // BATCH)
    return Plan(steps, fixed + steps * per_step)


def seconds_per_step(arm: Arm) -> float:
    """The fastest of a few steps."""
    model = build(arm.config)
    variants.apply(model, arm.variant)
    step = timed_step(model, train_config(1e-3), BATCH)
    return min(sum(step()) for _ in range(4))


def for_budget(study: Study, sets: Sets, seeds: int, budget: float) -> Plan:
    arms = study.arms(sets.setting)
    one_of_each = {arm.config: arm for arm in reversed(arms)}
    speeds = {config: seconds_per_step(arm) for config, arm in one_of_each.items()}
    per_step, fixed = cost(arms, seeds, {arm.name: speeds[arm.config] for arm in arms}, sets.sizes)
    least = fixed + LEAST_STEPS * per_step
    if budget < least:
        trained = f"with {seeds} seeds ({count_trainings(arms, seeds)} trainings)"
        enough = f"needs a budget of at least {least / 60 + 0.05:.1f}m here {trained}"
        raise ConfigError(f"{study.name} {enough}; give --budget {int(least // 60) + 1}m")
    return bought(budget, per_step, fixed, len(sets.train))


def kept_plan(path: Path, study: Study, sets: Sets, seeds: int, budget: float) -> Plan:
    """The plan of an earlier start with the same options, or a new one, which is kept."""
    asked = {"data": sets.describe(), "budget": budget, "seeds": seeds}
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = read_json(path)
        if known["asked"] == asked:
            return Plan(int(known["steps"]), float(known["seconds"]))
    plan = for_budget(study, sets, seeds, budget)
    write_json(path, {"asked": asked, "steps": plan.steps, "seconds": plan.seconds}, indent=1)
    return plan


DIGITS = Setting(8, 1, 10)  # the default set
DIGITS_SIZES = {"train": 1467, "val": 160, "test": 170}


@lru_cache(maxsize=1000)
def training_macs(config: AnyConfig) -> float:
    """Multiply-adds of one step: forwards, and twice as many backwards."""
    return float(3 * BATCH * summarize(config)["gmacs"] * 1e9)


@lru_cache(maxsize=1)
def machine_speed() -> dict[bool, float]:
    """Multiply-adds a second in training, of a ViT (False) and of a CNN (True): two small models, timed now."""
    models: dict[bool, AnyConfig] = {False: DIGITS.vit(), True: DIGITS.resnet()}
    return {cnn: training_macs(config) / seconds_per_step(Arm("", config)) for cnn, config in models.items()}


def expected(study: Study, seeds: int, budget: float) -> tuple[int, Plan]:
    """Trainings and the plan of a study on digits, from the speed of this machine."""
    arms, speed = study.arms(DIGITS), machine_speed()
    seconds = {a.name: training_macs(a.config) / speed[isinstance(a.config, ResNetConfig)] for a in arms}
    per_step, fixed = cost(arms, seeds, seconds, DIGITS_SIZES)
    return count_trainings(arms, seeds), bought(budget, per_step, fixed, DIGITS_SIZES["train"])
