"""What methods of pre-training share: a task without labels, what is evaluated while it runs, and the verdict.

A method is a `Method` (its options, what it makes of a batch) and a `Learner` (the model and what the method adds: a
decoder, a teacher). Everything random about an image comes from its key, so the number of processes changes nothing.

Shapes: B images, N evaluated images, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data import Source
from vitkit.data.keys import Keys, uniforms
from vitkit.errors import ConfigError
from vitkit.model.base import Outputs
from vitkit.model.build import Model
from vitkit.model.jsonable import Jsonable
from vitkit.model.vit import ViT
from vitkit.tasks.base import Metric, Settings, Task
from vitkit.tasks.pretraining import health
from vitkit.tasks.result import Recorded, Records
from vitkit.tasks.trainee import Trainee

KNN = Metric("knn", "k-NN accuracy")
RETRIEVAL = Metric("retrieval", "accuracy of finding an image by a changed view of it")
SIDE = 32  # pixels of the images that the raw-pixel baseline compares
SAME, FLAT = 0.005, 2.0  # a spread or an effective rank below is a collapse


@dataclass(frozen=True)
class Options(Jsonable):
    """Of a method: --set task.NAME=VALUE."""

    def __post_init__(self) -> None:
        self.check_fields()


class Learner(Trainee):
    """In training `forward(images, targets)` gives the loss of each image; when evaluating, `forward(images)` what is
    recorded of each: see `observe`."""

    plain = False

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        if not isinstance(model, ViT):
            raise ConfigError(
                "pre-training works on the tokens of a ViT, which a ResNet has not; choose another --model"
            )

    @property
    def vit(self) -> ViT:
        assert isinstance(self.model, ViT)
        return self.model

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.training and targets is not None:
            return self.losses(images, targets)
        return torch.cat([*self.observe(images).values()], dim=1)

    def losses(self, images: Tensor, targets: Tensor) -> Tensor:
        """The loss of each image, B."""
        raise NotImplementedError

    def observe(self, images: Tensor) -> dict[str, Tensor]:
        """Each B n: features of the images and of a changed view, their pixels, where the last block looks."""
        entropies: list[Tensor] = []
        changed = changed_view(images)
        kept: Model = self.kept
        assert isinstance(kept, ViT)
        features = kept(images, on_weights=lambda w: entropies.append(health.attention_entropy(w)), layers=[-1])
        pixels, view_pixels = (
            F.interpolate(x, [min(SIDE, n) for n in x.shape[-2:]], mode="bilinear", antialias=True).flatten(1)
            for x in (images, changed)
        )
        seen = {"features": features, "views": kept(changed), "pixels": pixels, "view_pixels": view_pixels}
        return {**seen, "entropy": entropies[0][:, None]}

    @property
    def layout(self) -> dict[str, int]:
        """The widths of what `observe` gives."""
        config = self.model.config
        with torch.no_grad():
            device = next(self.model.parameters()).device
            seen = self.observe(torch.zeros(1, config.channels, *config.image_size, device=device))
        return {name: x.shape[1] for name, x in seen.items()}


def changed_view(images: Tensor) -> Tensor:
    """The upper left of each image, an eighth smaller, enlarged and with less contrast: always the same change."""
    h, w = images.shape[-2:]
    box = images[..., : h - h // 8, : w - w // 8]
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return mean + 0.8 * (F.interpolate(box, [h, w], mode="bilinear", align_corners=False) - mean)


def noise(keys: Keys, purpose: str, count: int, like: Tensor) -> Tensor:
    """Numbers in [0, 1) that belong to the images: B count."""
    return torch.from_numpy(uniforms(keys, purpose, count)).to(like.device, torch.float32)


class Method(Task):
    kind = None
    losses: ClassVar[tuple[str, ...]] = ("own",)
    score = KNN
    pretrains = True
    options: ClassVar[type[Options]] = Options

    def __init__(self, outputs: Outputs, count: int, settings: Settings | None = None, flip_safe: bool = True) -> None:
        super().__init__(outputs, count, settings)
        self.flip_safe, self.classes, self.patches = flip_safe, 0, 0
        known, given = self.options.__dataclass_fields__, dict(self.settings.options)
        self.chosen = self.options.from_dict(given) if given.keys() <= known.keys() else self._unknown(given)
        self.layout: Mapping[str, int] = {}

    def _unknown(self, given: Mapping[str, object]) -> Options:
        known = ", ".join(f"task.{name}" for name in self.options.__dataclass_fields__)
        name = next(name for name in given if name not in self.options.__dataclass_fields__)
        raise ConfigError(f"{self.name} has no option task.{name}; --set takes {known}")

    @classmethod
    def of_data(cls, source: Source, settings: Settings) -> Method:
        """Labels, where each image has one class, are used to report and for nothing else."""
        task = cls(Outputs(), 0, settings, source.flip_safe)
        if source.label_kind == "classes" and len(source.classes) > 1:
            task.classes = len(source.classes)
        else:
            task.score = RETRIEVAL
        return task

    def describe(self) -> str:
        return f"{self.name}, which learns from images alone"

    def trainee(self, model: Model, patch_dropout: float = 0.0) -> Learner:
        if patch_dropout:
            raise ConfigError("patch_dropout is for training with labels; mae hides patches by itself")
        learner = self.learner(model).to(next(model.parameters()).device)
        self.layout, self.patches = learner.eval().layout, math.prod(learner.vit.config.grid)
        learner.train()
        return learner

    def learner(self, model: Model) -> Learner:
        raise NotImplementedError

    def loss(self, trainee: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        losses: Tensor = trainee(images, targets)
        return losses.mean()

    # --- is it working? ------------------------------------------------------------------------------

    def record(self, outputs: Tensor, labels: Tensor) -> Recorded:
        parts = torch.split(outputs.float(), [*self.layout.values()], dim=1)
        return {**dict(zip(self.layout, parts, strict=True)), "labels": labels}

    def measure(self, records: Records) -> dict[str, float]:
        """Of features, and of raw pixels the same, to compare with."""
        columns = {name: torch.from_numpy(records[name]) for name in (*self.layout, "labels")}
        features = columns["features"]
        if not features.isfinite().all():
            return {self.score.key: 0.0, "rank": 0.0, "spread": 0.0}
        found = {"rank": health.effective_rank(features), "spread": health.spread(features)}
        found |= {"uniformity": health.uniformity(features), "attention_entropy": float(columns["entropy"].mean())}
        found |= self.about_method(columns)
        for name, x, view in (("", features, "views"), ("pixel_", columns["pixels"], "view_pixels")):
            if self.classes:
                found[f"{name}knn"] = health.neighbours_accuracy(x, columns["labels"], self.classes)
            found[f"{name}retrieval"] = health.retrieval_accuracy(x, columns[view])
        return {**found, "images": float(len(records))}

    def about_method(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        """Metrics of this method alone."""
        return {}

    def collapsed(self, now: Mapping[str, float]) -> str:
        """Why the features are good for nothing, in words; "" where they are not."""
        if now["spread"] < SAME:
            return f"all images have nearly the same features (spread {now['spread']:.3f}; about 1 is healthy)"
        if now["rank"] < FLAT:
            return f"the features vary in one direction only (effective rank {now['rank']:.1f})"
        return ""

    advice: ClassVar[str] = "a smaller --lr, larger batches, or another --method"

    def verdict(self, start: Mapping[str, float], now: Mapping[str, float]) -> str:
        key, words, pixels = self.score.key, self.score.words, now.get(f"pixel_{self.score.key}", 0.0)
        if why := self.collapsed(now):
            return f"collapsed: {why}. Try {self.advice}"
        before, after, count = start[key], now[key], max(1.0, now["images"])
        margin = 2 * math.sqrt((before * (1 - before) + after * (1 - after)) / count)  # two standard errors
        figures = f"{words} {after:.1%}, {before:.1%} before the first step, raw pixels {pixels:.1%}"
        rank = f"effective rank {now['rank']:.0f}"
        if after - before > margin or (after >= 1.0 and before >= 1.0):
            return f"learning: {figures}; {rank}"
        return f"not better than its start: {figures}; {rank}. Train longer, or try {self.advice}"
