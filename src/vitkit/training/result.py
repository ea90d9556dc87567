"""What a run tells while it goes, and what it reached."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypedDict

from vitkit.checkpoints.load import load
from vitkit.display import Drawing, Grid, Part, Shown
from vitkit.model.base import VisionModel
from vitkit.progress import Progress
from vitkit.tasks import Metric

DATA = "data.json"  # in the folder of a run: what the set consisted of


class Watcher(Progress):
    """What a run tells while it goes; the command draws it, others may ignore it. `shown` is open while it runs."""

    shown: AbstractContextManager[object] = nullcontext()
    wants_stop = False  # the run is then saved and ends, as after Ctrl-C

    def aside(self, text: str) -> None:
        """A line below those of steps, where there is something to say."""
        if text:
            self.note(f"      {text}")

    def step(self, progress: float, line: Line, rate: Rate) -> None:
        """After every logged step."""

    def evaluated(self, line: Line, score: str, best: str) -> None:
        """After every evaluation: the score, and the best so far, as they are written; "" without images for it."""

    def expected(self, score: str) -> None:
        """After an evaluation: the score that is expected at the end, with a band, as it is written."""

    def scored(self, progress: float, score: float, higher: bool) -> None:
        """After every evaluation that has a score, as a number; `higher`: more is better."""


class Line(TypedDict, total=False):
    """A line of the log."""

    step: int
    epoch: float
    loss: float | None  # the mean since the last line; None: no finite one
    lr: float
    skipped: int
    threads: int  # where a budget lets them change


class Rate(NamedTuple):
    """How far the run is: seconds of training, and images seen."""

    seconds: float
    images: int
    neighbours: float = 0.0  # cores that other processes take, and that are missing here


@dataclass(frozen=True)
class Result(Shown):
    """What a run reached, and where it is. `.model` is its best model, loaded when it is first asked for."""

    out: Path
    score: Metric  # the one of the metrics that decides
    steps: int
    epochs: float
    seconds: float
    validation: dict[str, float]  # of the last weights (their average where one is kept)
    best: dict[str, float]  # with "score", the one of the metrics that decides, and its "step"
    test: dict[str, float] = field(default_factory=dict)  # of the best weights, when there is a test split
    skipped: int = 0  # steps whose loss was not finite
    bad_files: int = 0
    start: dict[str, float] = field(default_factory=dict)  # before the first step, where they tell something
    verdict: str = ""  # whether it worked: of pre-training; of others, where it did not
    learning: float = 0.0  # seconds of steps; with a frozen backbone of features and head
    images: dict[str, tuple[int, int]] = field(default_factory=dict)  # of validation and test: evaluated, and there
    baseline: tuple[dict[str, object], ...] = ()  # what linear models on simple features reach, as `Baseline` has it
    advice: tuple[str, ...] = ()  # what would help most, the most promising first

    @cached_property
    def model(self) -> VisionModel:
        return load(self.out)

    def to_dict(self) -> dict[str, object]:
        unsaid = {"score", *(name for name in ("start", "verdict") if not getattr(self, name))}
        return {**{f.name: getattr(self, f.name) for f in fields(self) if f.name not in unsaid}, "out": str(self.out)}

    def scores(self) -> list[tuple[str, str, float]]:
        """Split, weights and score: of the last weights, of those that are kept, and of these on the test split."""
        key, step = self.score.key, int(self.best.get("step", self.steps))
        last = step == self.steps  # then the best weights are the last ones
        kept = f"kept weights, step {step:,}"
        found = (
            ("validation", f"last weights, step {self.steps:,}", {} if last else self.validation),
            ("validation", kept if last else f"{kept}, selected by validation", self.best),
            ("test", kept, self.test),
        )
        return [(split, weights, metrics[key]) for split, weights, metrics in found if key in metrics]

    def of_images(self, split: str) -> str:
        """How many images a score is of: "372 images", "800 of 3,077 images"; "" where it is not known."""
        count, there = self.images.get(split, (0, 0))
        return "" if not there else f"{there:,} images" if count == there else f"{count:,} of {there:,} images"

    def rows(self) -> list[tuple[str, str]]:
        """Metric and value, for people."""
        rows = []
        for split, weights, value in self.scores():
            of = "; ".join(filter(None, (weights, self.of_images(split))))
            rows.append((f"{split} {self.score.words} ({of})", self.score.text(value)))
        for one in self.baseline:
            of = f"linear on {one['features']}; {one['evaluated']:,} images"
            rows.append((f"baseline: validation {self.score.words} ({of})", self.score.text(float(str(one["score"])))))
        rows.append(("time", f"{self.seconds:.0f} s, {self.steps:,} steps, {self.epochs:.1f} epochs"))
        if self.verdict:
            rows.append(("verdict", self.verdict))
        if self.bad_files:
            rows.append(("unreadable files", f"{self.bad_files}, listed in bad-files.csv of the run"))
        if self.skipped:
            rows.append(("steps left out", f"{self.skipped}: their loss was not finite"))
        return rows

    def parts(self) -> Iterable[Part]:
        yield Grid([("metric", "value"), *self.rows(), ("run", str(self.out))])
        if self.advice:
            yield f"What would help most: {self.advice[0]}"
        if (curves := self.out / "curves.png").is_file():
            yield Drawing(curves.read_bytes(), "loss and score by step")
