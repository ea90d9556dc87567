"""A choice, confirmed on images that did not take part in it: what is lost there, its interval, and McNemar's test."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitkit.model.base import VisionModel
from vitkit.runtime.verify import Images
from vitkit.tasks.paired import drop_interval, mcnemar

_EVERY = 3  # image is held out


@dataclass(frozen=True)
class Confirmed:
    """Of the held-out images, how many only the model had right, and how many only the configuration."""

    images: int
    lost: int
    won: int
    labelled: bool = True  # False: right is what the model says

    def __add__(self, other: Confirmed) -> Confirmed:
        counts = {name: getattr(self, name) + getattr(other, name) for name in ("images", "lost", "won")}
        return replace(self, **counts)

    @property
    def drop(self) -> float:
        return (self.lost - self.won) / self.images

    @property
    def interval(self) -> tuple[float, float]:
        """Of the drop, 95%."""
        return drop_interval(self.lost, self.won, self.images)

    @property
    def p(self) -> float:
        """McNemar's test."""
        return mcnemar(self.lost, self.won)

    def words(self) -> str:
        what = "accuracy" if self.labelled else "agreement"
        (low, high), share = self.interval, f"{100 * self.drop:.2f} points of {what} are lost"
        counts = f"{self.lost} images lost, {self.won} won"
        interval = f"95% interval {100 * low:.2f} to {100 * high:.2f}"
        return f"on {self.images} held-out images {share} ({interval}; {counts}, McNemar p = {self.p:.2g})"

    def to_dict(self) -> dict[str, object]:
        low, high = self.interval
        return {**vars(self), "drop": self.drop, "interval": [low, high], "mcnemar_p": self.p}


def hold_out(images: Images, fewest: int) -> tuple[Images, Images | None]:
    """Images to choose by, and every third to confirm with; None where these would be fewer than `fewest`."""
    if len(images) < _EVERY * fewest:
        return images, None
    held = torch.arange(len(images)) % _EVERY == _EVERY - 1
    return images[~held], images[held]


def confirm(model: VisionModel, ours: Tensor, theirs: Tensor, images: Images) -> Confirmed | None:
    """From the outputs of the model and of a configuration; None where an image has no one right class."""
    labels = images.labels
    if model.outputs.kind != "classes" or (labels is not None and labels.ndim != 1):
        return None
    truth = ours.argmax(-1) if labels is None else labels
    before, after = ours.argmax(-1) == truth, theirs.argmax(-1) == truth
    counts = [int((before & ~after).sum()), int((~before & after).sum())]
    return Confirmed(len(truth), counts[0], counts[1], labels is not None)
