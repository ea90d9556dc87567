"""What the rest of a run will bring, and what would help most: each sentence made from the run's own numbers.

`forecast` fits curves that flatten to the validation scores so far. `advise` weighs four remedies by what each could
add to the score: more time by how the curve ends, more data by a learning curve in halves and by the gap between
training and validation, a checkpoint where images are few, cleaner labels by what cross-validation disagrees with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vitkit.tasks.base import Metric
from vitkit.training.baseline import Baseline

POINTS = 4  # evaluations that a forecast needs
FIRST = 0.25  # of the run, before which nothing is forecast
SHAPES = ("exp 1.5", "exp 3", "exp 6", "power 0.5", "power 1", "log")  # of how a score approaches its end
FEW_IMAGES = 20_000  # photographs; fewer hardly train a ViT from scratch
SMALL_SIDE = 48  # pixels; larger images count as photographs
AGREED = 0.8  # of the labels must be agreed with before the others are doubted
_LAST = 0.25  # of the run, whose rise tells whether it was long enough


@dataclass(frozen=True)
class Forecast:
    """A score at the end of the run, and a band that holds it four times in five."""

    expected: float
    low: float
    high: float

    def text(self, metric: Metric) -> str:
        return f"{metric.text(self.expected)} ({metric.text(self.low)} to {metric.text(self.high)})"


def forecast(curve: Sequence[tuple[float, float]], most: float = math.inf) -> Forecast | None:
    """From (progress, score) so far; None while it is too early to tell. `most`: no score is above it."""
    if len(curve) < POINTS or not FIRST <= curve[-1][0] < 1:
        return None
    x, y = (np.array(column, dtype=np.float64) for column in zip(*curve, strict=True))
    if not np.isfinite(y).all():
        return None
    weights = np.sqrt(x / x[-1])  # the start says less about the end
    ends, errors = [], []
    for shape in SHAPES:
        basis, end = (
            np.stack([np.ones_like(x), _shape(shape, x)], axis=1),
            np.array([1.0, _shape(shape, np.ones(1))[0]]),
        )
        found = np.linalg.lstsq(basis * weights[:, None], y * weights, rcond=None)[0]
        found[1] = max(found[1], 0.0)  # it gets better, or stays
        found[0] = np.average(y - found[1] * basis[:, 1], weights=weights**2)
        ends.append(float(end @ found))
        errors.append(float(np.average((basis @ found - y) ** 2, weights=weights**2)))
    noise = max(min(errors), 1e-8)
    trust = np.exp(-0.5 * len(x) * (np.array(errors) / noise - 1))
    expected = float(np.average(ends, weights=trust))
    spread = math.sqrt(float(np.average((np.array(ends) - expected) ** 2, weights=trust)))
    half = 1.28 * math.sqrt(noise * (1 + 2 / len(x)) + spread**2) + 0.25 * max(0.0, expected - float(y[-1]))
    return Forecast(min(expected, most), min(expected - half, most), min(expected + half, most))


def _shape(name: str, x: np.ndarray) -> np.ndarray:
    """Rises with x."""
    kind, _, rate = name.partition(" ")
    if kind == "exp":
        return -np.exp(-float(rate) * x)
    return np.log(x + 1e-3) if kind == "log" else -((x + 0.05) ** -float(rate))


# --- at the end --------------------------------------------------------------------------------------


class Curves(NamedTuple):
    """What a run has seen on its way. Scores are such that more is better."""

    scores: tuple[tuple[float, float], ...] = ()  # progress, validation score
    losses: tuple[float, float] | None = None  # of training and of validation, at the end
    baselines: tuple[Baseline, ...] = ()  # the last one on the best features


@dataclass(frozen=True)
class Seen:
    """What is known at the end of a run."""

    metric: Metric
    data: str
    images: int  # to learn from
    side: int  # of the images, in pixels
    init: bool
    evaluated: int  # validation images
    on_the_way: Curves

    @property
    def score(self) -> float:
        return max((score for _, score in self.on_the_way.scores), default=0.0)

    @property
    def losses(self) -> tuple[float, float] | None:
        return self.on_the_way.losses

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        return self.on_the_way.baselines

    @property
    def missing(self) -> float:
        """What a perfect score would add."""
        return max(0.0, 1.0 - self.score)


@dataclass(frozen=True)
class Remedy:
    gain: float  # of the score, a rough estimate for ordering
    text: str


def advise(seen: Seen) -> list[str]:
    """The most promising first; none where nothing stands out."""
    if not seen.metric.higher or not seen.on_the_way.scores:
        return []
    remedies = filter(None, (more_time(seen), more_data(seen), checkpoint(seen), cleaner_labels(seen)))
    return [remedy.text for remedy in sorted(remedies, key=lambda remedy: -remedy.gain)]


def more_time(seen: Seen) -> Remedy | None:
    """Where the score still rose in the last quarter of the run, by more than chance."""
    progress, scores = (np.array(column) for column in zip(*seen.on_the_way.scores, strict=True))
    if len(scores) < 3 or progress[0] > 1 - _LAST:
        return None
    before = float(np.interp(1 - _LAST, progress, scores))
    rise, score = float(scores[-1]) - before, seen.metric.text
    if rise <= max(0.005, 2 * standard_error(seen)):
        return None
    gain = rise
    if seen.losses is not None and seen.losses[0] < 0.5 * seen.losses[1]:  # mostly learned by heart
        gain *= seen.losses[0] / seen.losses[1]
    what = f"validation {seen.metric.words} still rose in the last quarter, from {score(before)} to {score(scores[-1])}"
    return Remedy(gain, f"more time: {what}")


def standard_error(seen: Seen) -> float:
    share = min(1.0, max(0.0, seen.score))
    return math.sqrt(share * (1 - share) / max(1, seen.evaluated)) if seen.metric.percent else 0.0


def more_data(seen: Seen) -> Remedy | None:
    """By how much twice the images lower the error of a linear model; and by how much the model learned by heart."""
    reasons, gain = [], 0.0
    if seen.baselines and len(curve := seen.baselines[-1].curve) > 1:
        (few, less), (many, more) = curve[-2:]
        if more > less and less < 1:
            gain = seen.missing * (more - less) / (1 - less)
            scores = f"{seen.metric.text(less)} with {few:,} images and {seen.metric.text(more)} with {many:,}"
            reasons.append(f"a linear model on {seen.baselines[-1].features} reaches {scores}")
    if seen.losses is not None and seen.losses[0] < 0.5 * seen.losses[1]:
        gain = max(gain, 0.2 * seen.missing * (1 - seen.losses[0] / seen.losses[1]))
        reasons.append(f"the loss is {seen.losses[0]:.2f} in training and {seen.losses[1]:.2f} in validation")
    return Remedy(gain, f"more data: {', and '.join(reasons)}") if reasons and gain > 0.002 else None


def few_images(images: int, side: int) -> str:
    """A line where there are too few photographs to learn from scratch; "" where there are not."""
    if images >= FEW_IMAGES or side <= SMALL_SIDE:
        return ""
    return f"{images:,} images are few for a ViT from scratch: `--init CHECKPOINT` starts from what others have learned"


def checkpoint(seen: Seen) -> Remedy | None:
    line = few_images(seen.images, seen.side)
    if seen.init or not line:
        return None
    gain = 0.5 * seen.missing * (1 - seen.images / FEW_IMAGES)
    best = max((b.score for b in seen.baselines), default=-math.inf)
    if best > seen.score:
        simple = f"even a linear model on edges and colours is better ({seen.metric.text(best)})"
        return Remedy(gain + best - seen.score, f"a checkpoint: {line}; {simple}")
    return Remedy(gain, f"a checkpoint: {line}")


def cleaner_labels(seen: Seen) -> Remedy | None:
    """Where cross-validation on good features doubts more labels than chance would."""
    trusted = [b for b in seen.baselines if b.checked and b.agreed >= AGREED]
    if not trusted:
        return None
    by = max(trusted, key=lambda b: b.agreed)
    share = by.doubtful / by.checked
    if share < 0.02:
        return None
    found = f"{by.doubtful:,} of {by.checked:,} labels seem wrong by cross-validation on {by.features}"
    return Remedy(share, f"cleaner labels: {found} ({by.agreed:.0%} agree): `vitkit data clean {seen.data}` lists them")
