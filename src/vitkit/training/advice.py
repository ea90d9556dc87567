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

from vitkit.errors import shell_word
from vitkit.tasks.base import Metric
from vitkit.training.baseline import Baseline

POINTS = 4  # evaluations that a forecast needs
FIRST = 0.25  # of the run, before which nothing is forecast
SHAPES = ("exp 1.5", "exp 3", "exp 6", "exp 12", "power 0.5", "power 1", "log")  # of how a score approaches its end
BAND = 1.28  # standard deviations to either side: four in five of a normal law
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


def forecast(curve: Sequence[tuple[float, float]], most: float = math.inf, images: int = 0) -> Forecast | None:
    """From (progress, score) so far; None while it is too early to tell.

    most    no score is above it
    images  that a score is the share of: so much noise there is at least
    """
    if len(curve) < POINTS or not FIRST <= curve[-1][0] < 1 or not np.isfinite(curve).all():
        return None
    x, y = np.array(curve, dtype=np.float64).T
    weights = (x / x[-1]) ** 2  # the start says less about the end
    ends, errors = np.array([_fitted(shape, x, y, weights, most) for shape in SHAPES]).T
    chance = max(0.0, y[-1] * (1 - y[-1]) / images) if images else 0.0
    noise = max(float(errors.min()), chance, 1e-8)
    trust = np.exp(-0.5 * len(x) * (errors - errors.min()) / noise)
    expected = float(np.average(ends, weights=trust))
    spread = float(np.average((ends - expected) ** 2, weights=trust))
    half = BAND * math.sqrt(noise + spread) + 0.25 * max(0.0, expected - float(y[-1]))
    return Forecast(expected, expected - half, min(expected + half, most))


def _fitted(shape: str, x: np.ndarray, y: np.ndarray, weights: np.ndarray, most: float) -> tuple[float, float]:
    """The score at the end, by least squares with a rise and no more than `most`; the mean squared error."""
    rise, end = _shape(shape, x), float(_shape(shape, np.ones(1))[0])
    limit = 0.0 if shape.startswith("exp") else end  # where the shape ends at the latest
    mean, mid = np.average(rise, weights=weights), np.average(y, weights=weights)
    slope = np.average((rise - mean) * (y - mid), weights=weights) / np.average((rise - mean) ** 2, weights=weights)
    slope = max(0.0, float(slope))  # it gets better, or stays
    start = mid - slope * mean
    if start + slope * limit > most:  # then it ends there
        slope = float(np.average((rise - limit) * (y - most), weights=weights))
        slope = max(0.0, slope / float(np.average((rise - limit) ** 2, weights=weights)))
        start = most - slope * limit
    return start + slope * end, float(np.average((start + slope * rise - y) ** 2, weights=weights))


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
    if rise <= max(0.005, 2 * standard_error(seen.metric, seen.score, seen.evaluated)):
        return None
    gain = rise
    if seen.losses is not None and seen.losses[0] < 0.5 * seen.losses[1]:  # mostly learned by heart
        gain *= seen.losses[0] / seen.losses[1]
    what = f"validation {seen.metric.words} still rose in the last quarter, from {score(before)} to {score(scores[-1])}"
    return Remedy(gain, f"more time: {what}")


def standard_error(metric: Metric, score: float, images: int) -> float:
    """Of a score that is a share of images; 0 for others."""
    share = min(1.0, max(0.0, score))
    return math.sqrt(share * (1 - share) / max(1, images)) if metric.percent else 0.0


def more_data(seen: Seen) -> Remedy | None:
    """By how much twice the images lower the error of a linear model; and by how much the model learned by heart."""
    reasons, gain = [], 0.0
    if seen.baselines and len(curve := seen.baselines[-1].curve) > 1:
        (few, less), (many, more) = curve[-2:]
        if more - less > standard_error(seen.metric, more, seen.baselines[-1].evaluated) and less < 1:
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
    """Where images are few and none was used, or one whose model is worse than the simplest features."""
    best = max(seen.baselines, key=lambda b: b.score, default=None)
    worse = best is not None and best.score > seen.score
    simple = f"a linear model on {best.features} is better ({seen.metric.text(best.score)})" if best and worse else ""
    gain = best.score - seen.score if best and worse else 0.0
    if seen.init:
        return Remedy(gain, f"another checkpoint: {simple}") if worse else None
    if not (line := few_images(seen.images, seen.side)):
        return None
    gain += 0.5 * seen.missing * (1 - seen.images / FEW_IMAGES)
    return Remedy(gain, f"a checkpoint: {line}{'; ' if simple else ''}{simple}")


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
    lists = f"`vitkit data clean {shell_word(seen.data)}` lists them"
    return Remedy(share, f"cleaner labels: {found} ({by.agreed:.0%} agree): {lists}")
