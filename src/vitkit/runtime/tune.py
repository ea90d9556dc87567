"""Try every runtime that is here, in every precision, with more and less merging; keep the fastest that is accurate.

First the speed of every runtime and precision at one batch size, then that of the fastest of them with everything
that computes less. Then, from the fastest to the slowest, accuracy, on a quarter of the images first; the first that
keeps its promise is the winner: nothing slower can beat it. At last its batch sizes and threads. What is measured is
kept at once (`kept.py`), so that a search which is killed continues where it was.

The promise is about other images: by what was lost and won on these, 200 others must lose no more than `max_drop`
with a probability of 90%. The drop on these alone would be too good: it is that of the one that looked best on them.
Where even no loss at all on so few images could not show that, only what computes the same is measured.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice, product
from pathlib import Path

import torch
from torch import Tensor

from vitkit.errors import ConfigError, VitkitError
from vitkit.model.base import VisionModel
from vitkit.progress import SILENT, Progress
from vitkit.runtime.base import Calibration, Choice, Runtime, build, thread_count
from vitkit.runtime.confirm import Confirmed, confirm
from vitkit.runtime.kept import Kept, Row, digest_of_images, versions
from vitkit.runtime.reductions import SCALES, Reduction, plain_reductions, reductions, sure_enough
from vitkit.runtime.speed import images_per_second, in_words
from vitkit.runtime.table import RUNTIMES
from vitkit.runtime.tuned import digest_of, machine
from vitkit.runtime.verify import Check, Images, compare_outputs, outputs_of
from vitkit.tasks.paired import kept_on
from vitkit.world import has_bf16

FEWEST = 20  # images; fewer say nothing about int8 and merging, which are then not chosen
_BATCH = 8  # for throughput, while configurations are compared
_SIZES = (1, 4, 8, 16, 32)
_MAKING = {"eager": 0.1, "compiled": 45.0, "onnx": 4.0, "openvino": 5.0}  # seconds, roughly, until the first is known
_COMPARING = 0.4  # the share of a budget after which methods of merging are no longer compared
_MEASURING = 0.7  # and speeds no longer measured; the rest is for accuracy and batch sizes
_FASTEST = 3  # runtimes and precisions that are tried with reductions
_LOOKED_AT = 32  # images, by which the speed of early exit is measured: it depends on them
_EARLY = 0.5  # share of the allowed drop that is spent on early exit, chosen on the same images
KEPT = 0.9  # probability of a promise
_HOPELESS = 0.05  # the same by a quarter of the images, below which the others are not asked
_OUT_OF_TIME = "left out: --budget"


@dataclass(frozen=True)
class Tuned:
    rows: list[Row]
    winner: Row
    images: str
    labelled: bool
    device: str
    count: int = 0  # of the images
    max_drop: float = 0.0
    confirmed: Confirmed | None = None  # on images that took no part in the choice

    @property
    def score_words(self) -> str:
        metric = None if self.winner.check is None else self.winner.check.metric
        return metric.words if self.labelled and metric is not None else "agreement with the model"

    def report(self) -> dict[str, object]:
        rows = [{**asdict(row), "check": row.check and row.check.to_dict()} for row in self.rows]
        about = {"pictures": self.images, "labelled": self.labelled, "device": self.device, "rows": rows}
        return about | ({} if self.confirmed is None else {"confirmed": self.confirmed.to_dict()})


def images_needed(max_drop: float) -> int:
    """So many images can show that a promise is kept, if none of them is lost."""
    return FEWEST + bisect_left(range(FEWEST, 10_000), True, key=lambda n: kept_on(0, 0, n, max_drop) >= KEPT)


def whole_images(kinds: list[str], batch_size: int, calibrated: bool, bf16: bool) -> Iterator[Choice]:
    """Every runtime and precision, nothing reduced."""
    for kind in kinds:
        plain = Choice(kind, batch_size=batch_size)
        yield plain
        if bf16 and RUNTIMES[kind].bf16:
            yield replace(plain, bf16=True)
        if RUNTIMES[kind].usable(int8=True):
            yield replace(plain, int8=True)
            if calibrated:
                yield replace(plain, int8=True, calibrated=True)


def tune(
    model: VisionModel,
    images: Images,
    max_drop: float = 0.005,
    latency: bool = False,
    kinds: list[str] | None = None,
    calibration: Calibration | None = None,
    seconds: float = 1.0,
    progress: Progress = SILENT,
    budget: float | None = None,
    kept: Path | None = None,
    check_all: bool = False,
    held: Images | None = None,
) -> Tuned:
    """`max_drop` is of the accuracy (R2, for values), or of the agreement where there are no labels.

    budget     seconds for all of it: what does not fit is left out, the likeliest winners come first
    kept       a file for what was measured, from which a search that was killed continues
    check_all  also the accuracy of what is slower than the winner, for a figure
    held       images that take no part in the choice: the winner must keep its promise on them too
    """
    if not model.config.classes:
        raise ConfigError("the model has no classifier (classes=0), so no configuration has an accuracy")
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]  # sets stand by class
    about: dict[str, object] = {"model": digest_of(model)}
    about |= {"images": digest_of_images(images), "machine": machine(), **versions()}
    about |= {"seconds": seconds, "threads": thread_count(None), "calibrated": calibration is not None}
    about |= {"device": next(model.parameters()).device.type}
    measured = Kept(kept, about, model)
    search = _Search(model, images, calibration, seconds, progress, measured, max_drop, budget, check_all, held)
    size = 1 if latency else min(_BATCH, len(images))
    kinds = kinds or [name for name, row in RUNTIMES.items() if row.usable()]
    device = next(model.parameters()).device
    whole = list(whole_images(kinds, size, calibration is not None, has_bf16(device)))
    if search.lossy or check_all:
        search.measure_all(whole, min(_FASTEST, len(whole)) * len(plain_reductions(model)[1:]))
        search.measure_all(search.reduced())
        if search.lossy and (early := search.early_exits()):
            search.measure_all(early)
    else:
        search.measure_all([choice for choice in whole if choice.exact])
    winner = search.refined(search.first_accurate(), latency)
    labelled = images.labels is not None
    return Tuned(search.rows, winner, images.name, labelled, device.type, len(images), max_drop, search.confirmed)


@dataclass
class _Search:
    """What `tune` has measured so far."""

    model: VisionModel
    images: Images
    calibration: Calibration | None
    seconds: float
    progress: Progress
    kept: Kept
    max_drop: float
    budget: float | None = None
    check_all: bool = False
    held: Images | None = None
    confirmed: Confirmed | None = None
    rows: list[Row] = field(default_factory=list)
    answers: dict[Choice, Tensor] = field(default_factory=dict)  # outputs for the images
    opened: tuple[Choice, Runtime] | None = None  # one at a time: each holds all weights
    started: float = field(default_factory=time.perf_counter)

    @property
    def count(self) -> int:
        """Of all images, to choose by and to confirm with."""
        return len(self.images) + (0 if self.held is None else len(self.held))

    @cached_property
    def lossy(self) -> bool:
        """Whether these images can show that a configuration which changes answers keeps its promise."""
        labels, have = self.images.labels, self.count
        one_class = self.model.outputs.kind == "classes" and (labels is None or labels.ndim == 1)
        needed = images_needed(self.max_drop) if one_class else FEWEST
        if have < needed:
            self.progress.note(
                f"{have} images cannot show that no more than {self.max_drop:.2%} is lost: int8, merging and smaller "
                f"images are not chosen; give {needed} or more, or a larger --max-drop"
            )
        return have >= needed

    def open(self, choice: Choice) -> Runtime:
        if self.opened is None or self.opened[0] != choice:
            self.opened = None  # before another takes its memory
            self.opened = (choice, build(self.model, choice, self.calibration))
        return self.opened[1]

    def outputs(self, choice: Choice, count: int | None = None) -> Tensor:
        """For the first so many images; those that were computed before are not computed again."""
        known = self.answers.get(choice)
        have, wanted = 0 if known is None else len(known), len(self.images) if count is None else count
        if wanted > have:
            found = outputs_of(self.open(choice), self.images[have:wanted], self.model.config, choice.batch_size)
            self.answers[choice] = found if known is None else torch.cat([known, found])
        return self.answers[choice][:wanted]

    @cached_property
    def expected(self) -> Tensor:
        """Outputs of the model itself."""
        return outputs_of(build(self.model, Choice()), self.images, self.model.config, _BATCH)

    @cached_property
    def expected_of_held(self) -> Tensor:
        assert self.held is not None
        return outputs_of(build(self.model, Choice()), self.held, self.model.config, _BATCH)

    @cached_property
    def typical(self) -> Images:
        """A few images with as many easy ones among them as among all: these leave early."""
        order = self.expected.softmax(dim=-1).amax(dim=-1).argsort()
        few = order[torch.linspace(0, len(order) - 1, min(_LOOKED_AT, len(order))).long()]
        return self.images[few[torch.randperm(len(few), generator=torch.Generator().manual_seed(0))]]

    def speeds(self, runtimes: dict[str, Runtime], choice: Choice) -> dict[str, float]:
        batches = (self.typical if choice.sure else self.images).batches(self.model.config, choice.batch_size)
        return images_per_second(runtimes, list(batches) if choice.sure else [next(batches)], self.seconds)

    def late(self, share: float = 1.0, more: float = 0.0) -> bool:
        """Whether `more` seconds do not fit into this share of the budget."""
        return self.budget is not None and time.perf_counter() - self.started + more > share * self.budget

    def add(self, row: Row, place: str = "") -> Row:
        self.rows.append(row)
        self.progress.note(f"{place}  {row.words}".lstrip())
        return row

    # --- speed ---------------------------------------------------------------------------------------

    def measure_all(self, choices: list[Choice], later: int = 0) -> None:
        """`later`: how many more there will be, about."""
        known = [choice for choice in choices if choice in self.kept.rows]
        again = f", {len(known)} of them measured before" if known else ""
        then = f", then about {later} that compute less" if later else ""
        in_all = in_words(self.remaining([*choices, *choices[-1:] * later]))
        self.progress.note(f"{len(choices)} configurations{again}{then}: about {in_all}")
        for number, choice in enumerate(choices, start=1):
            if choice in self.kept.rows:
                self.add(self.kept.rows[choice], f"[{number}/{len(choices)}, kept]")
            elif self.late(_MEASURING, self.expected_seconds(choice)) and any(row.ratio for row in self.rows):
                self.rows.append(Row(choice, problem=_OUT_OF_TIME))
            else:
                self.kept.add(self.measure(choice))
                left = in_words(self.remaining(choices[number:]))
                last = number == len(choices)
                self.add(self.kept.rows[choice], f"[{number}/{len(choices)}{'' if last else f', about {left} left'}]")
            self.progress.update("measuring", number, len(choices))
        if missed := sum(row.problem == _OUT_OF_TIME for row in self.rows[-len(choices) :]):
            self.progress.note(f"{missed} configurations {_OUT_OF_TIME}")

    def remaining(self, choices: list[Choice]) -> float:
        """Seconds, and no more than the budget has left."""
        todo = [choice for choice in choices if choice not in self.kept.rows]
        total = sum(map(self.expected_seconds, todo))
        passes = (len(todo) if self.check_all and not self.kept.rows else 0) + 3  # over the images, for accuracy
        total += passes * self.batch_seconds * len(self.images) / _BATCH
        over = float("inf") if self.budget is None else self.budget - (time.perf_counter() - self.started)
        return max(0.0, min(total, over))

    def expected_seconds(self, choice: Choice) -> float:
        """What configurations of the same runtime took, or a rough guess where there was none yet."""
        took = [row.seconds for row in self.kept.rows.values() if row.choice.runtime == choice.runtime]
        rough = 2 * self.seconds + 8 * self.batch_seconds + _MAKING.get(choice.runtime, 5.0)
        return sum(took) / len(took) if took else rough

    @cached_property
    def batch_seconds(self) -> float:
        """Of PyTorch as it is, for a batch: the second one, for the first allocates."""
        eager, batch = build(self.model, Choice()), next(self.images.batches(self.model.config, _BATCH))
        eager.run(batch)
        before = time.perf_counter()
        eager.run(batch)
        return time.perf_counter() - before

    def measure(self, choice: Choice) -> Row:
        """Beside PyTorch as it is, in turns: the ratio holds also when the machine is busy."""
        before = time.perf_counter()
        try:
            speeds = self.speeds({"it": self.open(choice), "eager": build(self.model, Choice())}, choice)
            check = self.check(choice) if self.check_all else None
            took = time.perf_counter() - before
            return Row(choice, speeds["it"], speeds["it"] / speeds["eager"], check, seconds=took)
        except (VitkitError, RuntimeError) as e:
            return Row(choice, problem=str(e).splitlines()[0][:100], seconds=time.perf_counter() - before)

    @property
    def fastest(self) -> list[Choice]:
        """Runtimes and precisions as they are, the fastest first."""
        rows = [row for row in self.rows if row.ratio and not row.choice.reduced]
        return [row.choice for row in sorted(rows, key=_speedup, reverse=True)[:_FASTEST]]

    def reduced(self) -> list[Choice]:
        """The fastest, with everything that computes less: smaller images first, which need no comparing of methods."""

        def late(images: int) -> bool:
            return self.late(_COMPARING, images / _BATCH * self.batch_seconds)

        several = len(self.images) >= FEWEST
        tried = reductions(self.model, self.images, self.expected, late) if several else plain_reductions(self.model)
        tried = sorted((one for one in tried if one != Reduction()), key=lambda one: one.scale)
        return [replace(base, merge=one.merge, scale=one.scale) for one, base in product(tried, self.fastest)]

    def early_exits(self) -> list[Choice]:
        """A smaller look first, then, of each precision, the fastest as it is, or with the most merging that may do."""
        truth = self.expected.argmax(-1) if self.images.labels is None else self.images.labels
        measured = [row.choice for row in sorted(self.rows, key=_speedup, reverse=True) if row.ratio]
        if self.model.outputs.kind != "classes" or truth.ndim != 1 or self.late(_MEASURING):
            return []
        found = []
        for whole in {choice.precision: choice for choice in reversed(self.fastest)}.values():
            merged = (c for c in measured if c.merge and replace(c, merge=0) == whole and self.hopeful(c))
            for full, scale in product([whole, *islice(merged, 1)], SCALES[1:]):
                if (small := replace(whole, scale=scale)) in measured:
                    sure = sure_enough(self.outputs(small), self.outputs(full), truth, _EARLY * self.max_drop)
                    found += [] if sure is None else [replace(full, scale=scale, sure=sure)]
        return found

    # --- accuracy ------------------------------------------------------------------------------------

    def check(self, choice: Choice) -> Check:
        return compare_outputs(self.model, self.expected, self.outputs(choice), self.images, exact=False)

    def checked(self, place: int) -> Check:
        row = self.rows[place]
        if row.check is None:
            row = self.rows[place] = replace(row, check=self.check(row.choice))
            self.kept.add(row)
        assert row.check is not None
        return row.check

    def first_accurate(self) -> Row:
        usable = [i for i, row in enumerate(self.rows) if row.ratio is not None and (self.lossy or row.choice.exact)]
        for i in sorted(usable, key=lambda i: -_speedup(self.rows[i])):
            row = self.rows[i]
            asking = 0.0 if row.check is not None else self.count / (row.speed or 1.0)  # seconds
            if not row.choice.exact and self.late(more=asking):
                continue  # what computes the same needs no proof that it is accurate enough
            self.progress.note(f"accuracy of {row.choice.name} ...")
            if not self.hopeful(row.choice):
                self.progress.note(f"{row.choice.name}: loses too much on a quarter of the images")
            elif (drop := self.checked(i).drop) > self.max_drop + 1e-9:
                self.progress.note(f"{row.choice.name}: loses {drop:.2%} on {len(self.images)} images")
            elif self.keeps_promise(row.choice):
                return self.rows[i]
        raise ConfigError("no runtime could run the model; `vitkit predict --runtime eager` says why")

    def hopeful(self, choice: Choice) -> bool:
        """Whether a quarter of the images leaves a chance."""
        few = len(self.images) // 4
        if choice.exact or few < FEWEST:
            return True
        outputs = self.outputs(choice, few)
        seen = confirm(self.model, self.expected[:few], outputs, self.images[:few])
        return seen is None or kept_on(seen.lost, seen.won, few, self.max_drop) >= _HOPELESS

    def keeps_promise(self, choice: Choice) -> bool:
        """By these images and the held-out ones; what computes the same needs no proof."""
        self.confirmed = None
        if choice.exact or (seen := confirm(self.model, self.expected, self.outputs(choice), self.images)) is None:
            return True
        if self.held is not None:
            after = outputs_of(self.open(choice), self.held, self.model.config, choice.batch_size)
            self.confirmed = confirm(self.model, self.expected_of_held, after, self.held)
            assert self.confirmed is not None
            self.progress.note(f"{choice.name}: {self.confirmed.words()}")
            seen += self.confirmed
        chance = kept_on(seen.lost, seen.won, seen.images, self.max_drop)
        self.progress.note(
            f"{choice.name}: 200 other images lose at most {self.max_drop:.2%} with a probability of {chance:.0%}"
        )
        return chance >= KEPT

    def refined(self, winner: Row, latency: bool) -> Row:
        """Other batch sizes (for throughput) and numbers of threads; neither changes an answer."""
        cores = thread_count(None)
        sizes = [winner.choice.batch_size] if latency else [s for s in _SIZES if s <= len(self.images)]
        best = winner
        for threads in (None, *([cores // 2] if cores > 2 else [])):
            choices = (replace(winner.choice, batch_size=size, threads=threads) for size in sizes)
            for choice in (c for c in choices if c != winner.choice and not self.late()):
                runtime = self.open(replace(winner.choice, threads=threads))
                speed = self.speeds({"it": runtime}, choice)["it"]
                row = self.add(Row(choice, speed, check=winner.check))
                if speed > (best.speed or 0) * 1.03:  # less is noise
                    best = row
        return best


def _speedup(row: Row) -> float:
    return row.ratio or 0.0
