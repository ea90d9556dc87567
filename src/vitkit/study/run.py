"""A study from its name to its result: choose learning rates, train every arm with every seed, write."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vitkit.errors import ConfigError, did_you_mean
from vitkit.model.summary import summarize
from vitkit.study import plan as planning
from vitkit.study.fit import BATCH
from vitkit.study.plan import RATES, RATES_AFTER, SEARCH, SEARCH_SEED, Plan, of_length
from vitkit.study.runs import Run, finish, recall
from vitkit.study.sets import Sets, open_sets
from vitkit.study.studies import STUDIES
from vitkit.study.table import Arm, Finding, Row, Setting, Study, Table


@dataclass(frozen=True)
class Watcher:
    """Told what is going on; by default nobody is."""

    plan: Callable[[Plan, int], None] = lambda plan, trainings: None
    done: Callable[[str, float, bool], None] = lambda what, accuracy, remembered: None


@dataclass(frozen=True)
class Result:
    study: Study
    table: Table
    finding: Finding
    about: dict[str, Any] = field(default_factory=dict)


def named(name: str) -> Study:
    if name not in STUDIES:
        hint = did_you_mean(name, STUDIES)
        raise ConfigError(f"there is no study {name!r}.{hint} `vitkit study` lists them all")
    return STUDIES[name]


def run(
    name: str,
    data: str = "digits",
    out: Path = Path("studies"),
    budget: float = 600.0,
    steps: int = 0,
    seeds: int = 3,
    watcher: Watcher | None = None,
) -> Result:
    """Everything: `out/runs` remembers each training, `out/NAME` gets table, figure and finding."""
    from vitkit.study.write import write

    study, watcher = named(name), watcher or Watcher()
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds} must be at least 1; 3 give an interval")
    sets = open_sets(data)
    plan = _plan(study, sets, out, budget, steps, seeds)
    arms = study.arms(Setting(sets.side, sets.channels, sets.classes))
    watcher.plan(plan, planning.trainings(arms, seeds))
    began = time.perf_counter()
    table = carry_out(arms, sets, plan.steps, seeds, out / "runs", watcher)
    about = {"command": _command(name, data, plan.steps, seeds), "steps": plan.steps, "batch": BATCH, "seeds": seeds}
    about |= {"machine": machine(), "seconds_here": round(time.perf_counter() - began, 1), "data": sets.about()}
    about |= {"training_seconds": round(sum(row.spent for row in table.rows), 1)}
    result = Result(study, table, study.find(table), about)
    write(result, out / name)
    return result


def _plan(study: Study, sets: Sets, out: Path, budget: float, steps: int, seeds: int) -> Plan:
    if steps:
        return Plan(steps, 0.0)
    asked = {"data": sets.about(), "budget": budget, "seeds": seeds}
    path = out / study.name / "plan.json"
    plan = planning.kept(path, asked)
    if plan is None:
        plan = planning.for_budget(study, sets, seeds, budget)
        planning.keep(path, asked, plan)
    return plan


def _command(name: str, data: str, steps: int, seeds: int) -> str:
    """The command that gives the same numbers again on the same machine."""
    return f"vitkit study {name} --data {data} --steps {steps} --seeds {seeds}"


def machine() -> str:
    cpu = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    cores = f"{threads} {cpu} core{'s' if threads != 1 else ''}"
    return f"{cores}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}"


# --- the trainings -----------------------------------------------------------------------------------


def carry_out(arms: list[Arm], sets: Sets, steps: int, seeds: int, folder: Path, watcher: Watcher) -> Table:
    folder.mkdir(parents=True, exist_ok=True)
    rates: dict[str, float] = {}
    rows = []
    for arm in arms:
        row, rates[arm.name] = _row(arm, sets, steps, seeds, folder, watcher, rates)
        rows.append(row)
    data = {**sets.about(), "channels": sets.channels, "classes": sets.classes}
    return Table(tuple(rows), data)


def _row(
    arm: Arm, sets: Sets, steps: int, seeds: int, folder: Path, watcher: Watcher, rates: dict[str, float]
) -> tuple[Row, float]:
    lr, searched = _rate(arm, sets, steps, folder, watcher, rates)
    results = []
    for seed in range(seeds):
        one = _run(arm, steps, lr, seed, rates)
        results.append(_finished(one, sets, folder, watcher, f"{arm.name}, seed {seed}"))
    counted = summarize(arm.config)
    tried = RATES_AFTER if arm.before else RATES
    extra = [{k: v for k, v in r.items() if k not in _ALWAYS} for r in results]
    row = Row(
        name=arm.name,
        accuracy=tuple(r["accuracy"] for r in results),
        about=arm.about,
        lr=lr if arm.length else None,
        at_edge=bool(arm.length) and not arm.rate_of and lr in (tried[0], tried[-1]),
        params=counted["params"],
        macs=round(counted["gmacs"] * 1e9),
        pictures=of_length(steps, arm.length) * min(BATCH, len(sets.part(arm.share, 0))),
        seconds=sum(r["cpu_seconds"] for r in results) / len(results),
        spent=sum(r["cpu_seconds"] for r in (*results, *searched)),
        extra=tuple(extra) if any(extra) else (),
        losses=tuple(tuple(r["losses"]) for r in results),
    )
    return row, lr


_ALWAYS = ("accuracy", "losses", "seconds", "cpu_seconds")


def _rate(
    arm: Arm, sets: Sets, steps: int, folder: Path, watcher: Watcher, rates: dict[str, float]
) -> tuple[float, list[dict[str, Any]]]:
    """The best learning rate of the fixed search, judged on val; or that of the arm it is borrowed from."""
    if not arm.length:
        return 0.0, []
    if arm.rate_of:
        return rates[arm.rate_of], []
    tried, results = RATES_AFTER if arm.before else RATES, []
    for lr in tried:
        one = _run(arm, steps, lr, SEARCH_SEED, rates, searching=True)
        results.append(_finished(one, sets, folder, watcher, f"{arm.name}, learning rate {lr:g}"))
    scores = [r["accuracy"] for r in results]
    return tried[scores.index(max(scores))], results


def _run(arm: Arm, steps: int, lr: float, seed: int, rates: dict[str, float], searching: bool = False) -> Run:
    before = None
    if arm.before is not None:  # a search starts from the first seed's weights: one training less
        before = _run(arm.before, steps, rates[arm.before.name], 0 if searching else seed, rates)
    return Run(
        config=arm.config,
        steps=of_length(steps, arm.length * (SEARCH if searching else 1)),
        lr=lr,
        seed=seed,
        variant=arm.variant,
        share=arm.share,
        judged="val" if searching else "test",
        measure="" if searching else arm.measure,
        before=before,
        fresh_positions=arm.fresh_positions,
    )


def _finished(one: Run, sets: Sets, folder: Path, watcher: Watcher, what: str) -> dict[str, Any]:
    remembered = recall(one, sets, folder) is not None
    found = finish(one, sets, folder)
    watcher.done(what, found["accuracy"], remembered)
    return found
