"""Predictions for labelled images against their labels: confusion matrix, calibration, and the worst images.

Shapes: B images, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitkit.explanation.inside import predictions
from vitkit.explanation.subject import LeftOut, Section, Subject
from vitkit.figures.evaluation import confusion_finding, draw_confusion, draw_reliability, reliability_finding
from vitkit.figures.panels import new_tiles, show
from vitkit.figures.style import INK, Figure, short
from vitkit.tasks.metrics import Bins, confusion, reliability

MOST_WORST, ACROSS = 8, 4


@dataclass(frozen=True)
class Outcome:
    probability: np.ndarray  # B C
    labels: np.ndarray  # B

    @property
    def predicted(self) -> np.ndarray:
        return self.probability.argmax(axis=1)

    @property
    def confusion(self) -> np.ndarray:
        """C C: true class down, predicted across."""
        return confusion(self.labels, self.predicted, self.probability.shape[1])

    @property
    def calibration(self) -> Bins:
        return reliability(self.probability.max(axis=1), self.predicted == self.labels, bins=10)

    @property
    def worst(self) -> np.ndarray:
        """Images by the probability of their own class, lowest first."""
        return np.argsort(self.probability[np.arange(len(self.labels)), self.labels], kind="stable")


def outcome_of(subject: Subject) -> Outcome:
    """Of the labelled sample; left out when there is none, or its classes are not those of the model."""
    sample = subject.sample
    if sample.labels is None or not len(sample):
        reason = sample.no_labels or "give a labelled set of the model's classes with --data"
        raise LeftOut(f"it needs labelled images: {reason}")
    subject.need_classifier()
    return Outcome(predictions(subject.model, sample.images).numpy(), sample.labels)


def make(subject: Subject) -> Section:
    found = subject.once(outcome_of)
    names = [subject.class_name(i) for i in range(len(found.confusion))]
    return Section(
        heading="Confusion",
        finding=confusion_finding(found.confusion, names),
        alt=f"A square of {len(names)} by {len(names)} classes, true down and predicted across.",
        how="Numbers are images; colours are mistakes, as shares of their true class (their row). "
        "A good model has numbers on the diagonal alone.",
        arrays={"confusion": found.confusion, **vars(found)},
        draw=lambda: draw_confusion(found.confusion, names),
    )


def make_calibration(subject: Subject) -> Section:
    bins = subject.once(outcome_of).calibration
    return Section(
        heading="Calibration",
        finding=reliability_finding(bins),
        alt="Bars of accuracy by confidence against the diagonal, above the share of images in each bin.",
        how="On the diagonal, predictions made with 80% confidence are right 80% of the time. Where accuracy is "
        "below the confidence the model is overconfident.",
        arrays={"confidence": bins.confidence, "correct": bins.accuracy, "counts": bins.count},
        draw=lambda: draw_reliability(bins),
    )


def make_worst(subject: Subject) -> Section:
    found, sample = subject.once(outcome_of), subject.sample
    worst, wrong = found.worst[:MOST_WORST], int((found.predicted != found.labels).sum())

    def draw() -> Figure:
        images = sample.shown(worst.tolist())
        figure, grid = new_tiles(len(images), ACROSS, images[0].shape, below=0.4)
        for axes, image, i in zip(grid, images, worst, strict=False):
            both = found.labels[i], found.predicted[i]
            words = [f"{short(subject.class_name(int(c)), 12)}: {found.probability[i, c]:.0%}" for c in both]
            show(axes, image, "\nas ".join(words), INK)
        return figure

    return Section(
        heading="Worst images",
        finding=f"{wrong} of {len(sample)} images are wrong; these give their true class the least probability",
        alt=f"The {len(worst)} images with the lowest probability of their true class, worst first.",
        how="Below each image: its true class and its probability, then what it was predicted as. Wrong labels and "
        "odd images show up here first.",
        arrays={"index": worst, "names": np.array([sample.names[i] for i in worst])},
        draw=draw,
    )
