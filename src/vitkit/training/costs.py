"""What a run costs, measured on a few images with a model that is thrown away: no bit of the run knows of it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.checkpoints.family import Checkpoint
from vitkit.data import Batch, Dataset, normalise
from vitkit.data.order import Order, stratified_order
from vitkit.evaluation.linear import Minimised
from vitkit.evaluation.run import evaluating
from vitkit.progress import SILENT
from vitkit.training import threads
from vitkit.training.config import TrainConfig
from vitkit.training.loop import Loop
from vitkit.training.parts import Parts, assemble
from vitkit.training.result import Watcher
from vitkit.training.states import excluded, frozen_blocks, images_seen, states_of
from vitkit.world import World

HEAD_WORK = 4000.0  # evaluations of the objective by which a head on features is found: 3,973 for the digits
THREADS_SHARE, THREADS_SECONDS = 0.012, 1.2  # of a budget, or at all, until no new round of measuring begins
_READ = 16  # images from which the cost of reading is taken
_ONCE = 20.0  # times as long as enough: too long to be timed twice


class Costs(NamedTuple):
    """Seconds, by all processes together."""

    image: float  # to learn from an image, reading it included
    update: float  # of the weights, once a step
    evaluated: float  # to evaluate an image, reading it included
    head: float = 0.0  # to train a head on the features of an image
    once: float = 0.0  # to read an image and compute the states of frozen blocks, where `image` begins at these

    def by_images(self) -> Costs:
        """Where everything is computed in every step."""
        return self._replace(image=self.image + self.once, evaluated=self.evaluated + self.once, once=0.0)

    def by_states(self) -> Costs:
        """After the pass over the training images; those that are evaluated are counted as if each were new."""
        return self._replace(evaluated=self.evaluated + self.once)

    def step(self, batch: int) -> float:
        return batch * self.image + self.update


def measured(
    config: TrainConfig, data: Dataset, world: World, init: Checkpoint | None, teacher: nn.Module | None = None
) -> Costs:
    """The costs of a configuration, from a model of its own that learns from a few images and is thrown away."""
    enough = min(1.0, max(0.02, 0.004 * config.budget))
    with trial(config, few(data), world, init, teacher) as timed:
        reading, once = timed.reading() / max(1, min(config.workers, os.cpu_count() or 1)), 0.0
        if (
            config.states != "each"
            and frozen_blocks(config)
            and not excluded(timed.parts, images_seen(data.splits, config))
        ):
            once, reading = per_image(timed.states, 64, enough) + reading, 0.0
            timed.learn_from_states()
        evaluated = per_image(timed.evaluate, 64, enough)
        head = timed.head() if config.head == "converge" else 0.0
        if config.head == "converge":
            return Costs(0.0, 0.0, (evaluated + reading) / world.size, head)
        image = per_image(timed.learn, max(1, config.batch_size // world.size), enough)
        return Costs((image + reading) / world.size, timed.update(), (evaluated + reading) / world.size, once=once)


@contextmanager
def trial(
    config: TrainConfig, data: Dataset, world: World, init: Checkpoint | None, teacher: nn.Module | None = None
) -> Iterator[Timed]:
    """The parts of a run on these images, without a trace: neither random numbers nor a checkpoint in memory change."""
    alone = World(0, 1, world.device)
    every = {"train_images": 0, "validation_images": 0, "test_images": 0, "cache": False, "compile": "no"}
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        parts = assemble(config.replace(out=folder, workers=0, **every), alone, data, SILENT, init, teacher)
        for tensor in (*parts.model.parameters(), *parts.model.buffers()):
            tensor.data = tensor.data.clone()
        yield Timed(parts)


def by_threads(
    config: TrainConfig, data: Dataset, world: World, init: Checkpoint | None, teacher: nn.Module | None = None
) -> dict[int, float]:
    """Seconds of a step, or of features with a frozen backbone, by number of threads; of at most 2% of a budget."""
    seconds = THREADS_SHARE * config.budget if config.budget else THREADS_SECONDS
    with trial(config, few(data), world, init, teacher) as timed:
        timed.reading()
        frozen = config.head == "converge"
        work = timed.evaluate if frozen else timed.step
        count, _ = _grown(work, 64 if frozen else config.batch_size, seconds / 12)
        return threads.timed(lambda: work(count), threads.numbers(), seconds)


def per_image(run: Callable[[int], object], most: int, enough: float) -> float:
    """Seconds for an image: with ever more of them, until a run takes long enough to be timed.

    The shorter of two: what else a machine does makes a run longer, never shorter.
    """
    count, took = _grown(run, most, enough)
    return min(took, _timed(run, count) if took < _ONCE * enough else took) / count


def _grown(run: Callable[[int], object], most: int, enough: float) -> tuple[int, float]:
    """So many images that a run takes long enough, and how long that is."""
    count, warm = 1, False
    while (took := _timed(run, count)) < enough and not (warm and count >= most):
        count, warm = min(4 * count, most), True
    return count, took


def _timed(call: Callable[..., object], *arguments: int) -> float:
    before = time.monotonic()
    call(*arguments)
    return time.monotonic() - before


class Timed:
    """The parts of a run, one at a time."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.loop = parts, Loop(parts, Watcher(), time.monotonic())
        self.batch: Batch | None = None

    def reading(self) -> float:
        """Seconds for an image; the images are kept for what follows."""
        samples = self.parts.loader.samples
        indices = np.arange(min(_READ, len(samples.source)))
        before = time.monotonic()
        self.batch = samples.load(0, Order(indices, np.zeros_like(indices)))
        return (time.monotonic() - before) / len(indices)

    def images(self, count: int) -> Batch:
        """So many, the few over and over."""
        assert self.batch is not None
        rows = np.arange(count) % len(self.batch)
        return Batch(self.batch.images[rows], self.batch.labels[rows], self.batch.indices[rows], self.batch.keys[rows])

    def learn(self, count: int) -> None:
        self.parts.wrapped.train()
        self.loop.backward(*self.loop.inputs(self.images(count), 1.0)).item()

    def step(self, count: int) -> None:
        """Learning and update; the weights stay as they are."""
        self.learn(count)
        for group in (group for optimizer in self.parts.optimizers for group in optimizer.param_groups):
            group["lr"] = 0.0
        self.loop.update()

    def update(self) -> float:
        self.loop.update()  # the first makes what the optimiser remembers
        return min(_timed(self.loop.update) for _ in range(2))

    def evaluate(self, count: int) -> None:
        model = self.parts.on_input(self.parts.model)
        with evaluating(model):
            model(self.seen(count)).sum().item()

    def seen(self, count: int) -> Tensor:
        return normalise(self.images(count).images.to(self.parts.world.device), self.parts.loader.pre)

    def states(self, count: int) -> Tensor:
        with evaluating(self.parts.model):
            return states_of(self.parts, self.seen(count)).cpu()

    def learn_from_states(self) -> None:
        assert self.batch is not None
        self.batch.images = self.states(len(self.batch)).clone()
        self.parts.trainee.start = frozen_blocks(self.parts.config)

    def head(self) -> float:
        """Seconds for the features of an image: of an objective of this width, times how often it is evaluated."""
        task, width = self.parts.task, next(iter(self.parts.model.classifiers)).in_features
        if task.loss_name == "mse":  # in closed form
            return 0.0
        count = max(64, min(1024, (1 << 22) // (width * task.count)))
        x = torch.linspace(-1, 1, count * width, dtype=torch.float64).view(count, width)
        labels = self.images(count).labels
        y = task.targets(x, labels, np.empty(0, dtype=np.uint64))[1]
        y = y.to(x.dtype) if y.is_floating_point() else y
        weights = Minimised(task, x, y).weights.requires_grad_()
        took = []
        for _ in range(3):
            before = time.monotonic()
            task.criterion(nn.functional.linear(x, weights[:, :-1], weights[:, -1]), y).backward()
            took.append(time.monotonic() - before)
        return HEAD_WORK * min(took) / count


def few(data: Dataset) -> Dataset:
    """Some images of the training split, every class at its share, or values from all of their range."""
    source, count = data.split("train"), 4 * _READ
    rows = np.sort(stratified_order(source.groups)[:count])
    if source.label_kind == "values":
        places = np.linspace(0, len(source) - 1, num=min(count, len(source))).astype(int)
        rows = np.sort(np.argsort(source.labels[:, 0], kind="stable")[places])
    return Dataset(source.take(rows, "all", {}), ["train"] * len(rows), split_missing=False)
