"""A study from its name to its result: how long, which learning rates, how many seeds; then every arm, and write.

Nothing of that is fixed beforehand. The length of a training is doubled until validation accuracy gains next to
nothing; learning rates are searched until the best one has a worse neighbour on both sides; three seeds of the arms
that the study is about show how much seeds differ, and so how many it takes to see the effect that it looks for. What
the budget does not buy is said. Decisions are kept beside the result: a study that is resumed after a kill keeps
them, and so its numbers.
"""

from __future__ import annotations

import math
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch

from vitkit.errors import ConfigError, did_you_mean
from vitkit.io import read_json, write_json
from vitkit.model.build import Model, build
from vitkit.model.config import AnyConfig, ResNetConfig
from vitkit.model.summary import summarize
from vitkit.plan.estimate import timed_step
from vitkit.progress import SILENT, Progress
from vitkit.study import variants
from vitkit.study.numbers import POWER, deviation, power, seeds_for
from vitkit.study.runs import Outcome, Run, Trainer, train_config
from vitkit.study.search import Tried, at_edge, chosen, next_rates
from vitkit.study.sets import Sets, open_sets
from vitkit.study.studies import STUDIES
from vitkit.study.table import BATCH, Arm, Context, Result, Row, Setting, Study, Table
from vitkit.study.write import write

T = TypeVar("T")
SEARCH, AFTER = 1 / 6, 1 / 2  # a training of the search takes this share of the steps; if it follows another, that one
SEARCHED = 8  # trainings of a search, about: three rates, the neighbours of the best, two of them again
SEARCH_SEED = 1000  # none of the seeds that count
LEAST_STEPS = 20
FIRST_EPOCHS, MOST_EPOCHS = 2, 100  # the shortest and the longest training that is tried
LEAST_SEEDS, MOST_SEEDS = 3, 20
SAME = [f.name for f in fields(Run) if f.name in Arm.__dataclass_fields__ and f.name not in ("measure", "before")]
CURVE = 100
STILL = 0.01  # what twice the length gains at a plateau, at most


def named(name: str) -> Study:
    if name not in STUDIES:
        raise ConfigError(f"there is no study {name!r}.{did_you_mean(name, STUDIES)} `vitkit study` lists them all")
    return STUDIES[name]


def run(
    name: str,
    data: str = "",
    out: Path = Path("studies"),
    budget: float = 5400.0,
    steps: int = 0,
    seeds: int = 0,
    workers: int = 1,
    progress: Progress = SILENT,
) -> Result:
    """Everything: `out/runs` remembers each training, `out/NAME` gets table, figure and finding."""
    study = named(name)
    if seeds < 0 or steps < 0 or workers < 1:
        raise ConfigError("--seeds and --steps must be at least 1, or 0 for as many as it takes; --workers at least 1")
    sets, start = open_sets(data or study.data), time.perf_counter()
    asked = {"data": sets.describe(), "budget": budget, "workers": workers, "steps": steps, "seeds": seeds}
    decisions = Decisions(out / name / "plan.json", asked)
    with Trainer(sets, out / "runs", workers) as trainer:
        work = _Trainings(study, sets, trainer, progress)
        if not (steps and seeds):
            work.cost = Cost(**decisions.take("cost", lambda: vars(measured_cost(work.arms, sets.sizes))))
        length = decisions.take("length", lambda: work.length(budget * workers) if not steps else (steps, None))
        work.steps, plateau = length
        work.search()
        count = decisions.take("seeds", lambda: seeds or work.enough_seeds(budget * workers))
        table = work.table(count)
    here, trained = round(time.perf_counter() - start, 1), round(sum(row.spent for row in table.rows), 1)
    command = f"vitkit study {name} --data {sets.name} --steps {work.steps} --seeds {count}"
    chance = power(study.effect, deviation(study.effects(table)), count) if count > 1 else None
    about = (command, work.steps, BATCH, count, machine(), here, table.data, trained, study.effect)
    result = Result(study, table, study.find(table), Context(*about, chance, plateau))
    write(result, out / name)
    return result


def machine() -> str:
    cpu = torch.backends.cpu.get_cpu_capability()
    return f"one {cpu} core for each training, torch {torch.__version__}, Python {platform.python_version()}"


class Decisions:
    """What was decided for a study, in a file; with other options everything is decided again."""

    def __init__(self, path: Path, asked: dict[str, object]) -> None:
        self.path, self.kept = path, dict[str, object](asked=asked)
        with suppress(OSError, ValueError, TypeError, KeyError):
            known = read_json(path)
            if known["asked"] == asked:
                self.kept = known

    def take(self, what: str, decide: Callable[[], T]) -> T:
        if what not in self.kept:
            self.kept[what] = decide()
            write_json(self.path, self.kept, indent=1)
        return self.kept[what]  # type: ignore[return-value]


@dataclass(frozen=True)
class Cost:
    """Seconds of one core: of a step of all arms, with one seed and in a search; of evaluating one seed of all arms."""

    seed: float
    search: float
    evaluation: float

    def steps(self, budget: float, seeds: int) -> int:
        return max(0, int((budget - seeds * self.evaluation) / (seeds * self.seed + self.search)))

    def seeds(self, budget: float, steps: int) -> int:
        return max(0, int((budget - steps * self.search) / (steps * self.seed + self.evaluation)))


class _Trainings:
    """All trainings of a study, each remembered when it is finished."""

    def __init__(self, study: Study, sets: Sets, trainer: Trainer, progress: Progress) -> None:
        self.study, self.sets, self.trainer, self.progress = study, sets, trainer, progress
        self.arms = study.arms(sets.setting)
        self.cost = Cost(0.0, 0.0, 0.0)
        self.steps = 0
        self.rates: dict[str, float] = {}  # by arm
        self.searched: dict[str, list[Outcome]] = defaultdict(list)
        self.done, self.start = 0, time.monotonic()

    def length(self, budget: float) -> tuple[int, bool]:
        """Steps, and whether twice as many gain next to nothing for the arm that needs most."""
        epoch = len(self.sets.train) / BATCH
        # a fifth is for finding the length itself
        most = min(self.cost.steps(0.8 * budget, LEAST_SEEDS), round(MOST_EPOCHS * epoch))
        if most < LEAST_STEPS:
            least = LEAST_SEEDS * self.cost.evaluation + LEAST_STEPS * (LEAST_SEEDS * self.cost.seed + self.cost.search)
            minutes = int(least / self.trainer.workers / 60) + 1
            raise ConfigError(f"{self.study.name} needs at least {minutes} minutes here; give --budget {minutes}m")
        slowest = next(arm for arm in self.arms if arm.name == (self.study.slowest or self.arms[0].name))
        steps = max(LEAST_STEPS, min(most, round(FIRST_EPOCHS * epoch)))
        reached = self._length_tried(slowest, steps) if 2 * steps <= most else 0.0
        while 2 * steps <= most:
            before, reached = reached, self._length_tried(slowest, 2 * steps)
            if reached - before < STILL:  # longer trainings may even lose: they know the images by heart
                return steps, True
            steps *= 2
        self.progress.note(f"the budget buys {most:,} steps for each training, before a plateau was seen")
        return most, False

    def _length_tried(self, arm: Arm, steps: int) -> float:
        runs = [self._run(arm, arm.rates[1], SEARCH_SEED + i, "val", steps) for i in range(2)]
        found = self._finish(runs, [f"{arm.name}, {steps:,} steps" for _ in runs])
        return sum(outcome.accuracy for outcome in found) / len(found)

    def search(self) -> None:
        """The learning rate of every arm, chosen on val; an arm may take that of another."""
        trained = [arm for arm in self.arms if arm.length and not arm.rate_of]
        for group in ([a for a in trained if a.before is None], [a for a in trained if a.before is not None]):
            tried: dict[str, Tried] = {arm.name: {} for arm in group}
            while wanted := [(arm, *one) for arm in group for one in next_rates(tried[arm.name], arm.rates)]:
                runs = [self._run(arm, lr, SEARCH_SEED + seed, "val", searching=True) for arm, lr, seed in wanted]
                words = [f"{arm.name}, learning rate {lr:g}" for arm, lr, _ in wanted]
                for (arm, lr, _), outcome in zip(wanted, self._finish(runs, words), strict=True):
                    tried[arm.name].setdefault(lr, []).append(merit(arm, outcome))
                    self.searched[arm.name].append(outcome)
            self.rates |= {name: chosen(found) for name, found in tried.items()}
        for arm in self.arms:
            if arm.rate_of or not arm.length:
                self.rates[arm.name] = self.rates[arm.rate_of] * arm.factor if arm.length else 0.0

    def enough_seeds(self, budget: float) -> int:
        """As many as see the effect with 80% power, by the spread of a pilot; fewer when the budget is short."""
        about = self.study.compared([arm.name for arm in self.arms])
        table = self.table(LEAST_SEEDS, [arm for arm in self.arms if arm.name in about])
        spread, effect = deviation(self.study.effects(table)), self.study.effect
        most = max(LEAST_SEEDS, min(MOST_SEEDS, self.cost.seeds(budget, self.steps)))
        seeds = seeds_for(effect, spread, LEAST_SEEDS, most)
        chance = power(effect, spread, seeds)
        short = "" if chance >= POWER else ", underpowered: a larger --budget buys more"
        self.progress.note(f"{seeds} seeds: {self.study.sought} would be seen with {chance:.0%} power{short}")
        return seeds

    def table(self, seeds: int, arms: list[Arm] | None = None) -> Table:
        arms = self.arms if arms is None else arms
        about = self.study.compared([arm.name for arm in self.arms])
        counts = [seeds if arm.name in about else min(seeds, self.study.others or seeds) for arm in arms]
        each = [(arm, seed) for arm, count in zip(arms, counts, strict=True) for seed in range(count)]
        runs = [self._run(arm, self.rates[arm.name], seed, "test") for arm, seed in each]
        found = iter(self._finish(runs, [f"{arm.name}, seed {seed}" for arm, seed in each]))
        rows = (self._row(arm, list(islice(found, count))) for arm, count in zip(arms, counts, strict=True))
        facts = {"channels": self.sets.setting.channels, "classes": self.sets.setting.classes}
        return Table(tuple(rows), {**self.sets.describe(), **facts})

    def _row(self, arm: Arm, outcomes: list[Outcome]) -> Row:
        lr, model = self.rates[arm.name], built(arm)
        kept = drawn_steps(of_length(self.steps, arm.length)) if self.study.curves else []
        return Row(
            name=arm.name,
            accuracy=tuple(o.accuracy for o in outcomes),
            tags=arm.tags,
            lr=lr if arm.length else None,
            at_edge=bool(arm.length) and not arm.rate_of and at_edge(lr),
            params=sum(p.numel() for p in model.parameters()),
            macs=round(summarize(arm.config)["gmacs"] * 1e9),
            images=of_length(self.steps, arm.length) * min(BATCH, len(self.sets.part(arm.share, 0))),
            seconds=round(sum(o.cpu_seconds for o in outcomes) / len(outcomes), 2),
            spent=sum(o.cpu_seconds for o in (*outcomes, *self.searched[arm.name])),
            extra=tuple(o.measured for o in outcomes) if arm.measure else (),
            losses=tuple(tuple(float(f"{o.losses[i]:.9g}") for i in kept if i < len(o.losses)) for o in outcomes),
            steps=tuple(kept),
        )

    def _run(self, arm: Arm, lr: float, seed: int, split: str, steps: int = 0, searching: bool = False) -> Run:
        before = None
        if arm.before is not None:  # a search starts from the first seed's weights: one training less
            before = self._run(arm.before, self.rates[arm.before.name], 0 if searching else seed, "test")
        steps = of_length(steps or self.steps, arm.length)
        if searching:  # a handful of steps would tell nothing of a learning rate
            steps = max(min(steps, LEAST_STEPS), round(steps * searched_share(arm)))
        measure = arm.measure if split == "test" else ""
        own = {name: getattr(arm, name) for name in SAME}
        return Run(**own, steps=steps, lr=lr, seed=seed, split=split, measure=measure, before=before)

    def _finish(self, runs: list[Run], words: list[str]) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        for number, outcome, remembered in self.trainer(runs):
            found[number] = outcome
            self.done += 1
            took = "remembered" if remembered else f"{time.monotonic() - self.start:.0f} s"
            self.progress.note(f"{self.done:3}  {outcome.accuracy:6.1%}  {words[number]}  ({took})")
            self.progress.update(self.study.name, len(found), len(runs))
        return [found[number] for number in range(len(runs))]


def drawn_steps(steps: int) -> list[int]:
    """Of how many steps the losses are part of the result: the first ten, and about a hundred of all."""
    return sorted({*range(min(10, steps)), *range(0, steps, -(-steps // CURVE) or 1)})


def searched_share(arm: Arm) -> float:
    return SEARCH if arm.before is None else AFTER


def merit(arm: Arm, outcome: Outcome) -> float:
    """What a learning rate is chosen by: accuracy, or of a pre-training how low its own loss is in the last quarter.

    Its features may be worse than random ones for a while: by their accuracy the smallest rate would win.
    """
    if not arm.task:
        return outcome.accuracy
    last = outcome.losses[-max(1, len(outcome.losses) // 4) :]
    loss = sum(last) / len(last)
    return -loss if math.isfinite(loss) else -math.inf


def of_length(steps: int, length: float) -> int:
    return max(1, round(steps * length)) if length else 0


def measured_cost(arms: Iterable[Arm], sizes: dict[str, int]) -> Cost:
    """From a few timed steps of every arm."""
    arms = list(arms)
    speeds = {config: seconds_per_step(arm) for config, arm in {arm.config: arm for arm in reversed(arms)}.items()}
    return cost([(arm, speeds[arm.config]) for arm in arms], sizes)


def cost(arms: list[tuple[Arm, float]], sizes: dict[str, int]) -> Cost:
    """Arms with the seconds of a step; a forward pass is about a third of it."""
    seed = sum(arm.length * seconds for arm, seconds in arms)
    search = sum(arm.length * searched_share(arm) * seconds for arm, seconds in arms if not arm.rate_of) * SEARCHED
    images = sum((1.5 if arm.measure else 1.0) * seconds for arm, seconds in arms)
    return Cost(seed, search, sizes["test"] * images / BATCH / 3)


def built(arm: Arm) -> Model:
    """Its model, with fresh weights."""
    model = build(arm.config)
    variants.apply(model, arm.variant)
    return model


def seconds_per_step(arm: Arm) -> float:
    """The fastest of a few steps."""
    step = timed_step(built(arm), train_config(1e-3), BATCH)
    return min(sum(step()) for _ in range(4))


SETTING = Setting(16, 3, 10)  # CIFAR-10 as most studies see it
SIZES = {"train": 45_000, "val": 5_000, "test": 10_000}


@lru_cache(maxsize=1000)
def training_macs(config: AnyConfig) -> float:
    """Multiply-adds of one step: forwards, and twice as many backwards."""
    return float(3 * BATCH * summarize(config)["gmacs"] * 1e9)


@lru_cache(maxsize=1)
def machine_speed() -> dict[bool, float]:
    """Multiply-adds a second in training, of a ViT (False) and of a CNN (True): two small models, timed now."""
    models: dict[bool, AnyConfig] = {False: SETTING.vit(), True: SETTING.resnet()}
    return {cnn: training_macs(config) / seconds_per_step(Arm("", config)) for cnn, config in models.items()}


def expected(study: Study, budget: float, workers: int) -> tuple[int, int]:
    """Arms, and the steps that the budget buys for each training with three seeds, from the speed of this machine."""
    arms, speed = study.arms(SETTING), machine_speed()
    seconds = [(a, training_macs(a.config) / speed[isinstance(a.config, ResNetConfig)]) for a in arms]
    return len(arms), cost(seconds, SIZES).steps(budget * workers, LEAST_SEEDS)
