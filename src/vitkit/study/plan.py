"""How long a study takes here, and how many steps a budget buys.

The plan is made once, from a few timed steps of every arm, and kept beside the result: a study that goes on
after a kill keeps its plan, and so its numbers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vitkit.checkpoints.write import replacing
from vitkit.errors import ConfigError
from vitkit.model.build import build
from vitkit.model.config import AnyConfig, ResNetConfig
from vitkit.model.summary import summarize
from vitkit.study import variants
from vitkit.study.fit import BATCH
from vitkit.study.sets import Sets
from vitkit.study.table import Arm, Setting, Study
from vitkit.train import TrainConfig, optim

RATES = (1e-3, 4e-3, 1.6e-2)  # the fixed search, for every arm that is trained from the start
RATES_AFTER = (2.5e-4, 1e-3, 4e-3)  # and for those that go on from trained weights
SEARCH = 1 / 3  # a training of the search takes this share of the steps
SEARCH_SEED = 1000  # none of the seeds that count
LEAST_STEPS = 20
MOST_EPOCHS = 100


@dataclass(frozen=True)
class Plan:
    steps: int
    seconds: float  # that the whole study is expected to take


def of_length(steps: int, length: float) -> int:
    return max(1, round(steps * length)) if length else 0


def trainings(arms: Iterable[Arm], seeds: int) -> int:
    """Trainings and, for arms that are not trained, judgements."""
    return sum(seeds + (len(RATES) if arm.length and not arm.rate_of else 0) for arm in arms)


def cost(arms: Iterable[Arm], seeds: int, seconds: dict[str, float], sizes: dict[str, int]) -> tuple[float, float]:
    """Seconds per step of the study, and seconds that do not depend on its steps."""
    per_step = fixed = 0.0
    for arm in arms:
        searched = len(RATES) if arm.length and not arm.rate_of else 0
        per_step += arm.length * (seeds + SEARCH * searched) * seconds[arm.name]
        judged = sizes["test"] * seeds * (1.5 if arm.measure else 1.0) + sizes["val"] * searched
        fixed += judged * seconds[arm.name] / BATCH / 3  # a forward pass is about a third of a step
    return per_step, fixed


def seconds_per_step(arm: Arm, timed: int = 3) -> float:
    """The fastest of a few steps."""
    model = build(arm.config)
    variants.apply(model, arm.variant)
    optimizers = optim.build(model, TrainConfig(optimizer="adamw", lr=1e-3, weight_decay=0.05))
    images = torch.randn(BATCH, arm.config.channels, *arm.config.image_size)
    labels = torch.zeros(BATCH, dtype=torch.int64)
    best = float("inf")
    for _ in range(1 + timed):
        began = time.perf_counter()
        F.cross_entropy(model(images), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        best = min(best, time.perf_counter() - began)
    return best


def for_budget(study: Study, sets: Sets, seeds: int, budget: float) -> Plan:
    """As many steps as fit into the budget, at most 100 times over the set."""
    arms = study.arms(Setting(sets.side, sets.channels, sets.classes))
    speeds: dict[AnyConfig, float] = {}
    for arm in arms:
        if arm.config not in speeds:
            speeds[arm.config] = seconds_per_step(arm)
    seconds = {arm.name: speeds[arm.config] for arm in arms}
    sizes = {"test": len(sets.test), "val": len(sets.val)}
    per_step, fixed = cost(arms, seeds, seconds, sizes)
    steps = int((budget - fixed) / per_step)
    if steps < LEAST_STEPS:
        least = fixed + LEAST_STEPS * per_step
        raise ConfigError(
            f"{study.name} needs a budget of at least {least / 60 + 0.05:.1f}m here with {seeds} seeds "
            f"({trainings(arms, seeds)} trainings); give --budget {int(least // 60) + 1}m"
        )
    steps = min(steps, MOST_EPOCHS * len(sets.train) // BATCH)
    return Plan(steps, fixed + steps * per_step)


def kept(path: Path, asked: dict[str, Any]) -> Plan | None:
    """The plan of an earlier start of the same study, or None."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Plan(int(found["steps"]), float(found["seconds"])) if found["asked"] == asked else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(path: Path, asked: dict[str, Any], plan: Plan) -> None:
    content = json.dumps({"asked": asked, "steps": plan.steps, "seconds": plan.seconds}, indent=1)
    with replacing(path) as file:
        file.write(content.encode())


# --- the list of studies -----------------------------------------------------------------------------

DIGITS = {"train": 1467, "val": 160, "test": 170}  # what the default set has


@lru_cache(maxsize=1000)
def training_macs(config: AnyConfig) -> float:
    """Multiply-adds of one step: forwards, and twice as many backwards."""
    return float(3 * BATCH * summarize(config)["gmacs"] * 1e9)


@lru_cache(maxsize=1)
def machine_speed() -> dict[bool, float]:
    """Multiply-adds a second in training, of a ViT (False) and of a CNN (True): two small models, timed now."""
    s = Setting(8, 1, 10)
    found = {}
    for cnn, config in ((False, s.vit()), (True, s.resnet())):
        found[cnn] = training_macs(config) / seconds_per_step(Arm("", config))
    return found


def expected_minutes(study: Study, seeds: int, budget: float) -> tuple[int, float, int]:
    """Trainings, minutes and steps of each on digits, from the speed of this machine."""
    arms = study.arms(Setting(8, 1, 10))
    speed = machine_speed()
    seconds = {}
    for arm in arms:
        seconds[arm.name] = training_macs(arm.config) / speed[isinstance(arm.config, ResNetConfig)]
    per_step, fixed = cost(arms, seeds, seconds, DIGITS)
    steps = min(max(0, int((budget - fixed) / per_step)), MOST_EPOCHS * DIGITS["train"] // BATCH)
    return trainings(arms, seeds), (fixed + steps * per_step) / 60, steps
