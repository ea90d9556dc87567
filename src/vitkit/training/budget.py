"""A budget that is kept: what a run costs is measured before it starts, and cut to what the time allows.

Five rules, in this order:

model       without --model and --init, for small images, the largest of a few that sees every image often enough
size        with --init and no --image-size, the largest size up to the checkpoint's own at which the run sees every
            image twice and evaluates the whole test split (with a frozen backbone: at which all features fit)
evaluation  validation takes a tenth of the budget at most and the test split what then leaves seven tenths for
            learning; what does not fit is evaluated on a part of the split, by class in equal shares
length      batches are so small that a run makes a few dozen steps
rate        with --init and no --lr, the learning rate by a short search (`rates`), where seven tenths are left for it

What was chosen and measured goes into config.json: a run that is resumed does not choose again.

Sizes are predicted from the smallest one by multiply-adds, and the one that is chosen is measured itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from vitkit.checkpoints.family import Checkpoint
from vitkit.data import Dataset
from vitkit.errors import ConfigError
from vitkit.evaluation.linear import FOLDS
from vitkit.model.config import AnyConfig, Size, ViTConfig
from vitkit.tasks import Task
from vitkit.training import rates
from vitkit.training.config import TrainConfig
from vitkit.training.costs import Costs, measured
from vitkit.training.loop import FEW, MOST, ending
from vitkit.training.parts import EVALUATED, task_for, validation_split
from vitkit.training.recipe import ONCE, choose_augmentation, complete, larger_models
from vitkit.training.states import frozen_blocks, views_of
from vitkit.world import World

LEARNING = 0.7  # of a budget is for learning
VALIDATION = 0.1  # at most; half of it, where that is enough for a few looks
SEARCH = 0.1  # at most, for the learning rate of fine-tuning
BASELINE = 0.05  # of a budget, and
BASELINE_SECONDS = 10.0  # at most
PASSES = 2.0  # over the training images, for which a smaller image size is taken
LARGER = 6.0  # passes, for which a larger model is taken
LEAST_GRID = 7  # patches along the shorter side: below, photographs are hardly recognised
STEPS, LEAST_STEPS, LEAST_BATCH = 40, 4, 8
LEAST_IMAGES = 16  # of a split that is evaluated
ENOUGH_IMAGES = 100  # of validation, for several looks
HEAD = 0.25  # of a budget; beyond, one part of the images is held out to choose its strength, not five in turn


@dataclass(frozen=True)
class Wanted:
    """What a run would do without a limit."""

    budget: float
    train: int
    validation: int
    test: int
    batch: int
    evaluations: int = 0  # asked for
    views: int = 1  # of every image, with a frozen backbone or frozen blocks
    batch_is_fixed: bool = False


@dataclass(frozen=True)
class Cut:
    """What fits into a budget."""

    train: int
    validation: int
    test: int
    batch: int
    evaluations: int
    learning: float  # seconds
    passes: float  # over all training images
    whole: bool  # enough to learn from, and every test image evaluated
    needs: float  # the shortest budget that could be kept
    folds: int = FOLDS  # of the cross-validation of a head
    states: Literal["", "once", "each"] = ""  # how frozen blocks are run


def cut_steps(wanted: Wanted, costs: Costs, spent: float) -> Cut:
    """A run by steps, `spent` seconds after its start; frozen blocks run once, or in every step: what learns more."""
    each = _cut_steps(wanted, costs.by_images(), spent)
    if not costs.once:
        return each
    once = _cut_steps(wanted, costs.by_states(), spent + wanted.train * wanted.views * costs.once)
    return replace(once, states="once") if once.passes > each.passes else replace(each, states="each")


def _cut_steps(wanted: Wanted, costs: Costs, spent: float) -> Cut:
    """Time for evaluation first, the rest is for learning."""
    left = wanted.budget - spent - ending(spent)
    room = max(0.06 * wanted.budget, left - LEARNING * wanted.budget)
    half = room / 2 if wanted.test * costs.evaluated > room / 2 else room - wanted.test * costs.evaluated
    validation, evaluations = _validation(wanted, costs, min(VALIDATION * wanted.budget, half))
    test = _affordable(wanted.test, room - validation * evaluations * costs.evaluated, costs.evaluated)
    learning = left - (validation * evaluations + test) * costs.evaluated
    batch = wanted.batch
    while not wanted.batch_is_fixed and batch >= 2 * LEAST_BATCH and learning < STEPS * costs.step(batch):
        batch //= 2
    passes = learning / costs.step(batch) * batch / max(1, wanted.train)
    least = min(LEAST_IMAGES, wanted.validation) + min(LEAST_IMAGES, wanted.test)
    needs = spent + ending(spent) + LEAST_STEPS * costs.step(batch) + least * costs.evaluated
    whole = test == wanted.test and passes >= PASSES
    return Cut(wanted.train, validation, test, batch, evaluations, learning, passes, whole, needs)


def _validation(wanted: Wanted, costs: Costs, room: float) -> tuple[int, int]:
    """Images, and how often they are evaluated."""
    if not wanted.validation:
        return 0, 1
    once = wanted.validation * costs.evaluated
    looks = wanted.evaluations or min(MOST, max(FEW, int(room / 2 / max(once, 1e-9))))
    if looks * once <= room:
        return wanted.validation, looks
    part = int(room / looks / costs.evaluated)
    if part < ENOUGH_IMAGES and not wanted.evaluations:
        part, looks = int(room / costs.evaluated), 1
    return min(wanted.validation, max(LEAST_IMAGES, part)), looks


def _affordable(count: int, seconds: float, each: float) -> int:
    return count if count * each <= seconds else min(count, max(LEAST_IMAGES, int(seconds / each)))


def cut_features(wanted: Wanted, costs: Costs, spent: float) -> Cut:
    """A head on a frozen backbone: every image is seen once (or in several views), then the head learns."""
    left = wanted.budget - spent - ending(spent)
    folds = 1 if wanted.train * costs.head > HEAD * wanted.budget else FOLDS
    head = costs.head if folds == FOLDS else 1.5 * costs.head / FOLDS
    each = costs.evaluated * wanted.views + head
    needed = wanted.train * each + (wanted.validation + wanted.test) * costs.evaluated
    train, validation, test = wanted.train, wanted.validation, wanted.test
    if needed > left:
        validation = _affordable(validation, VALIDATION * wanted.budget, costs.evaluated)
        test = _affordable(test, 1.5 * VALIDATION * wanted.budget, costs.evaluated)
        train = min(train, max(0, int((left - (validation + test) * costs.evaluated) / each)))
    least = min(LEAST_IMAGES, wanted.validation) + min(LEAST_IMAGES, wanted.test)
    needs = spent + ending(spent) + min(wanted.train, 4 * LEAST_IMAGES) * each + least * costs.evaluated
    passes = wanted.views * train / max(1, wanted.train)
    return Cut(train, validation, test, wanted.batch, 1, train * each, passes, needed <= left, needs, folds)


# --- choosing ----------------------------------------------------------------------------------------


Measure = Callable[[TrainConfig], Costs]


@dataclass
class Chooser:
    """Costs by image size: measured where they were asked for, else predicted from the last that were measured."""

    config: TrainConfig
    wanted: Wanted
    measure: Measure
    clock: Callable[[], float]  # seconds that are over
    own: AnyConfig | None = None  # the checkpoint's, where its size may be changed

    def __post_init__(self) -> None:
        self.known: dict[Size | None, Costs] = {}

    def cut(self, size: Size | None) -> Cut:
        if size not in self.known:
            self.known[size] = self.measure(self.config.replace(image_size=size) if size else self.config)
        return self._cut(self.known[size])

    def again(self, size: Size | None) -> Cut:
        """Measured once more; the lower costs count."""
        once = self.known.pop(size)
        self.cut(size)
        self.known[size] = Costs(*map(min, once, self.known[size]))
        return self._cut(self.known[size])

    def _cut(self, costs: Costs) -> Cut:
        how = cut_features if self.config.head == "converge" else cut_steps
        return how(self.wanted, costs, self.clock() + baseline_seconds(self.config))

    def predicted(self, size: Size) -> Cut:
        last, costs = list(self.known.items())[-1]
        assert last is not None
        assert isinstance(self.own, ViTConfig)
        more = work(self.own, size) / work(self.own, last)
        grown = {name: more * getattr(costs, name) for name in ("image", "evaluated", "once")}
        return self._cut(costs._replace(**grown))

    def size(self) -> Size | None:
        """The largest that fits, by prediction and then by measurement, else the smallest; None: nothing to choose."""
        sizes = sizes_of(self.own) if self.own is not None else []
        if len(sizes) < 2:
            return None
        self.cut(sizes[-1])
        for size in sizes[:-1]:
            if self.predicted(size).whole and self.cut(size).whole:
                return size
        return sizes[-1]


def open_size(asked: TrainConfig, init: Checkpoint | None, task: Task) -> AnyConfig | None:
    """The checkpoint's configuration, where the image size is left to the budget."""
    fixed = not asked.budget or asked.image_size is not None or "image_size" in asked.changes
    return None if init is None or task.pretrains or fixed else init.config


def sizes_of(config: AnyConfig) -> list[Size]:
    """The checkpoint's own image size and the smaller ones of the same shape, down to a few patches; largest first."""
    if not isinstance(config, ViTConfig):
        return [config.image_size]
    (h, w), (p, q) = config.image_size, config.patch_size
    short = min(h // p, w // q)
    smaller = [(p * max(1, round(h / p * n / short)), q * max(1, round(w / q * n / short))) for n in range(short)]
    return [config.image_size, *(smaller[n] for n in range(short - 1, LEAST_GRID - 1, -1))]


def work(config: ViTConfig, size: Size) -> float:
    """In proportion to the multiply-adds of the blocks for an image of this size."""
    tokens = math.prod(size) / math.prod(config.patch_size)
    return tokens * (4 * config.width**2 + 2 * config.width * config.mlp_width + 2 * tokens * config.width)


def baseline_seconds(config: TrainConfig) -> float:
    """What the baseline before a run may take."""
    most = min(BASELINE_SECONDS, BASELINE * config.budget) if config.budget else BASELINE_SECONDS
    return most if config.baseline == "yes" else 0.0


def keep(
    asked: TrainConfig,
    config: TrainConfig,
    reasons: list[str],
    data: Dataset,
    world: World,
    init: Checkpoint | None,
    started: float,
    teacher: nn.Module | None = None,
    measure: Measure | None = None,
) -> tuple[TrainConfig, list[str]]:
    """A completed configuration cut to its budget, with a line for every choice.

    asked    the configuration before it was completed
    started  `time.monotonic()` when the clock of the budget began
    measure  what gives the costs of a configuration, in place of measuring them
    """
    task = task_for(config, data.split("train"))
    if config.shard or (task.pretrains and world.size > 1):  # nothing that one process could measure alone
        return config, reasons

    def costs_of(config: TrainConfig) -> Costs:
        return Costs(*world.largest(*(measure(config) if measure else measured(config, data, world, init, teacher))))

    def clock() -> float:
        return world.largest(time.monotonic() - started)[0]

    chooser = Chooser(config, _wanted(asked, config, data, task), costs_of, clock, open_size(asked, init, task))
    larger, names = "", larger_models(asked, data.split("train"), task)
    for name in names if names and chooser.cut(None).passes >= LARGER else ():  # while the next one sees enough
        bigger, lines = complete(asked, data, world, None, name)
        one = Chooser(bigger, _wanted(asked, bigger, data, task), costs_of, clock)
        if one.cut(None).passes < LARGER:
            break
        larger, chooser, config, reasons = name, one, bigger, lines
    size = chooser.size()
    cut = chooser.cut(size)
    if cut.needs > config.budget:  # perhaps something else kept the machine busy for a moment
        cut = chooser.again(size)
    known, wanted = chooser.known[size], chooser.wanted
    costs = known.by_states() if cut.states == "once" else known.by_images()
    if cut.needs > config.budget:
        raise ConfigError(_too_short(asked, chooser, cut, size))
    if size == (chooser.own.image_size if chooser.own else None):
        size = None
    changes: dict[str, object] = {"image_size": size} if size else {}
    if cut.batch != config.batch_size:
        changes["batch_size"] = cut.batch
    if changes:  # what follows from them, such as the learning rate, is chosen again
        config, reasons = complete(asked.replace(**changes), data, world, init.config if init else None, larger)
    seconds = {"step": costs.step(cut.batch), "evaluated image": costs.evaluated}
    if config.head == "converge":
        head = cut.learning - cut.train * wanted.views * costs.evaluated
        seconds = {"evaluated image": costs.evaluated, "head": head, "folds": cut.folds}
    kept: dict[str, object] = {"costs": seconds}
    kept |= {"evaluations": cut.evaluations} if config.head != "converge" else {}
    if not asked.states and (cut.states == "each" or (frozen_blocks(config) and cut.passes <= ONCE)):
        kept["states"] = "each"
    for split, count, there in _splits(cut, wanted):
        name = f"{split}_images"
        kept[name] = count if count < there else getattr(asked, name)
    if asked.augment is None and not asked.recipe and config.head != "converge":  # how often images are seen is known
        reasons = [line for line in reasons if not line.startswith("augmentation:")]
        kept |= choose_augmentation(asked, task, data.split("train"), reasons, cut.passes)
    config, said = config.replace(**kept), list[str]()
    fixed = asked.lr or asked.recipe or config.head == "converge" or task.pretrains or world.size > 1
    if init is not None and not fixed:
        before, loss = chooser.clock(), rates.loss_of(config, data, world, init, teacher)
        config, said = _rate(config, cut, known.by_images(), loss, chooser.clock)
        over = min(cut.learning, chooser.clock() - before)
        cut = replace(cut, learning=cut.learning - over, passes=cut.passes * (1 - over / max(1e-9, cut.learning)))
    return config, [*reasons, *_reasons(config, cut, chooser, costs, size), *said]


def _rate(
    config: TrainConfig, cut: Cut, costs: Costs, loss: rates.Loss, clock: Callable[[], float]
) -> tuple[TrainConfig, list[str]]:
    """The learning rate of fine-tuning, searched where the time for learning allows it."""
    room = min(SEARCH * config.budget, cut.learning - LEARNING * config.budget)
    steps = rates.affordable(room, costs, cut.batch, cut.train)
    if not steps:
        few = f"{rates.LEAST} steps at each of {rates.RATES} rates"
        return config, [f"learning rate: {config.lr:g}, not searched for, since there is no time for {few}"]
    found = rates.search(config.lr, steps, room, loss, clock)
    return config.replace(lr=found.lr), [found.text()]


def _splits(cut: Cut, wanted: Wanted) -> list[tuple[str, int, int]]:
    """Name, images that fit, images that are there."""
    names = ("train", "validation", "test")
    return [(name, getattr(cut, name), getattr(wanted, name)) for name in names]


def _wanted(asked: TrainConfig, config: TrainConfig, data: Dataset, task: Task) -> Wanted:
    def count(split: str, most: int) -> int:
        there = data.splits.get(split, 0)
        return min(most, there) if most else there

    most = asked.validation_images
    validation = min(most or EVALUATED, EVALUATED) if task.pretrains else count(validation_split(data.splits), most)
    return Wanted(
        budget=config.budget,
        train=count("train", asked.train_images),
        validation=validation,
        test=0 if task.pretrains else count("test", asked.test_images),
        batch=config.batch_size,
        evaluations=asked.evaluations,
        views=config.views if config.head == "converge" else views_of(config),
        batch_is_fixed=bool(asked.batch_size or asked.recipe),
    )


def _reasons(config: TrainConfig, cut: Cut, chooser: Chooser, costs: Costs, size: Size | None) -> list[str]:
    wanted, own = chooser.wanted, chooser.own
    frozen = config.head == "converge"
    each = f"{_seconds(costs.evaluated)} for an evaluated image"
    if not frozen:
        each = f"{_seconds(costs.step(cut.batch))} for a step of {cut.batch} images, {each}"
    lines = [f"budget: {duration(config.budget)}; measured: {each}"]
    if size is not None and own is not None:
        was = "not all features would be computed" if frozen else f"the data would be seen less than {PASSES:g} times"
        if wanted.test > cut.test:
            was += ", and not all test images evaluated"
        lines.append(
            f"image size: {size[1]}x{size[0]}, since at the checkpoint's own {own.image_size[1]}x{own.image_size[0]} "
            f"{was}; positions are resized (else: --image-size)"
        )
    if cut.states == "each" or (config.states == "each" and cut.passes <= ONCE):
        lines.append("states: frozen blocks run in every step, for the budget is too short for a pass that keeps them")
    if not frozen:
        lines.append(f"length: about {cut.passes:.1f} passes over {wanted.train:,} images in {cut.learning:.0f} s")
    for split, count, there in _splits(cut, wanted):
        if count < there:
            few = f"{split}: {count:,} of {there:,} images, by class in equal shares, for the budget"
            lines.append(few + (" (`vitkit evaluate` takes all)" if split == "test" else ""))
    return lines


def _too_short(asked: TrainConfig, chooser: Chooser, cut: Cut, size: Size | None) -> str:
    at = size or asked.image_size or (chooser.own.image_size if chooser.own else None)
    where = f" at {at[1]}x{at[0]} pixels" if at else ""
    what = f"--budget {duration(asked.budget)} cannot be kept: what was measured{where} needs {cut.needs:.0f} s"
    least = "the features of a few images" if chooser.config.head == "converge" else f"{LEAST_STEPS} steps"
    smaller = ", or leave out --image-size" if asked.image_size and asked.init else ""
    return f"{what} for {least} and an evaluation. The nearest that can: --budget {duration(1.1 * cut.needs)}{smaller}"


def duration(seconds: float) -> str:
    """At least so long, as --budget takes it: 90 -> "90s", 150 -> "150s", 301 -> "6m"."""
    return f"{math.ceil(seconds / 60)}m" if seconds > 300 or not seconds % 60 else f"{math.ceil(seconds)}s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms"
