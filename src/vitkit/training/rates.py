"""The learning rate of fine-tuning with a budget, by a short search before the run.

A few dozen steps at the recipe's rate and at others three times as high or low, each from the same weights, on the same
batches and by the run's schedule made short. What decides is the loss on training images that are held out; validation
and test see none of it. Short runs overrate high rates a little, so another rate must win clearly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from torch import nn

from vitkit.checkpoints.family import Checkpoint
from vitkit.data import Batch, Dataset, Loader
from vitkit.data.order import stratified_order
from vitkit.errors import TrainError
from vitkit.training.config import TrainConfig
from vitkit.training.costs import Costs, trial
from vitkit.world import World

RATES = 3  # that are tried
APART = 3.0  # times
LEAST, MOST = 20, 48  # steps at each
HELD_OUT, HELD_SHARE = 200, 0.2  # images at most, and of all
CLEAR = 0.95  # of the loss of the recipe's rate: only below is another one taken

Loss = Callable[[float, int], float]  # after so many steps at a rate


class Search(NamedTuple):
    losses: dict[float, float]  # by rate, in the order in which they were tried
    steps: int  # at each

    @property
    def lr(self) -> float:
        """The best, where it is clearly better than the first, which is the recipe's."""
        first, best = next(iter(self.losses)), min(self.losses, key=self.losses.__getitem__)
        return best if self.losses[best] < CLEAR * self.losses[first] else first

    def text(self) -> str:
        first, found = next(iter(self.losses)), sorted(self.losses.items())
        losses = ", ".join(f"{loss:.3g} at {rate:g}" for rate, loss in found)
        chosen = f"{self.lr:g}, as it was" if self.lr == first else f"{self.lr:g} in place of {first:g}"
        return f"learning rate: {chosen}; loss on held-out images after {self.steps} steps each: {losses} (else: --lr)"


def affordable(room: float, costs: Costs, batch: int, images: int) -> int:
    """Steps at each rate within `room` seconds; 0: too few to tell anything."""
    steps = int((room / RATES - held_out(images) * costs.evaluated) / max(1e-9, costs.step(batch)))
    return min(MOST, steps) if steps >= LEAST else 0


def held_out(images: int) -> int:
    return min(HELD_OUT, int(HELD_SHARE * images))


def search(lr: float, steps: int, room: float, loss: Loss, clock: Callable[[], float] = time.monotonic) -> Search:
    """The recipe's rate, a higher one, and then whichever side is better. None is begun that would take too long."""
    started, losses = clock(), dict[float, float]()
    while (rate := following(lr, losses)) is not None:
        before = clock()
        losses[rate] = loss(rate, steps)
        if 2 * clock() - before - started > room:
            break
    return Search(losses, steps)


def following(lr: float, losses: Mapping[float, float]) -> float | None:
    """The rate to try next."""
    if not losses:
        return lr
    higher = rounded(APART * lr)
    if higher not in losses:
        return higher
    third = rounded(APART * higher) if losses[higher] < losses[lr] else rounded(lr / APART)
    return None if third in losses else third


def rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def loss_of(
    config: TrainConfig, data: Dataset, world: World, init: Checkpoint | None, teacher: nn.Module | None = None
) -> Loss:
    """By training for so many steps, from the run's first weights."""
    part = divided(data, config.seed)

    def loss(rate: float, steps: int) -> float:
        with trial(config.replace(lr=rate, ema=0.0), part, world, init, teacher) as timed:
            batches = forever(timed.parts.loader)
            try:
                for step in range(steps):
                    timed.loop.step = step
                    timed.loop.train_step(next(batches), step / steps)
            except TrainError:  # it diverged
                return math.inf
            found = timed.loop.metrics(timed.parts.validation)["loss"]
            return found if math.isfinite(found) else math.inf

    return loss


def divided(data: Dataset, seed: int) -> Dataset:
    """The training split in two: to learn from, and held out by class in equal shares."""
    source = data.split("train")
    names = np.full(len(source), "train", dtype=object)
    names[stratified_order(source.groups, seed)[: held_out(len(source))]] = "val"
    return Dataset(source.take(np.arange(len(source)), "all", {}), list(names), split_missing=False)


def forever(loader: Loader) -> Iterator[Batch]:
    while True:
        yield from loader
