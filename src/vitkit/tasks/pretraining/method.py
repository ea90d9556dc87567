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

KNN, LINEAR = Metric("knn", "k-NN accuracy"), Metric("linear", "linear probe accuracy")
RETRIEVAL = Metric("retrieval", "accuracy of finding an image by a changed view of it")
SIDE = 32  # pixels of the images that the raw-pixel baseline compares
SAME, FLAT = 50, 4  # a spread or an effective rank of so many times less than before the first step is a collapse
SURE = 2.5  # standard errors; of two tests without a difference one in 80 or fewer passes by chance


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
        features, images = columns["features"], {"images": float(len(records))}
        if not features.isfinite().all():
            return {self.score.key: 0.0, "rank": 0.0, "spread": 0.0, **images}
        found = {"rank": health.effective_rank(features), "spread": health.spread(features)}
        found |= {"uniformity": health.uniformity(features), "attention_entropy": float(columns["entropy"].mean())}
        found |= self.about_method(columns)
        for name, x, view in (("", features, "views"), ("pixel_", columns["pixels"], "view_pixels")):
            if self.classes:
                found[f"{name}knn"] = health.neighbours_accuracy(x, columns["labels"], self.classes)
                found[f"{name}linear"] = health.linear_accuracy(x, columns["labels"], self.classes)
            found[f"{name}retrieval"] = health.retrieval_accuracy(x, columns[view])
        return {**found, **images}

    def about_method(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        """Metrics of this method alone."""
        return {}

    def collapsed(self, start: Mapping[str, float], now: Mapping[str, float]) -> str:
        """Why the features are good for nothing, in words; "" where they are not.

        What a set and a model allow differs, so spread and rank are compared with those before the first step. They
        fall in sound runs too (to a sixth, and to a half): features that find neighbours better have not collapsed.
        """
        if not now["rank"]:
            return "the features are not finite numbers"
        if self.better(self.score, start, now):
            return ""
        for name, factor, words in (
            ("spread", SAME, "all images have nearly the same features"),
            ("rank", FLAT, "the features vary in few directions"),
        ):
            if now[name] * factor < start[name]:
                return f"{words} ({name} {now[name]:.3g}, {start[name]:.3g} before the first step)"
        return ""

    advice: ClassVar[str] = "a smaller --lr, larger batches, or another --method"

    @property
    def tests(self) -> tuple[Metric, ...]:
        """Any of which may show that it learns."""
        return (KNN, LINEAR) if self.classes else (RETRIEVAL,)

    def better(self, metric: Metric, start: Mapping[str, float], now: Mapping[str, float], sign: int = 1) -> bool:
        """By more than chance; with sign -1: worse by more than chance."""
        before, after = start.get(metric.key, 0.0), now.get(metric.key, 0.0)
        return sign * (after - before) > SURE * health.standard_error(before, after, max(1, int(now["images"])))

    def verdict(self, start: Mapping[str, float], now: Mapping[str, float]) -> str:
        """Learning: some test is passed better than before the first step, by more than chance."""
        seen = [metric for metric in self.tests if metric.key in start and metric.key in now]
        figures = "; ".join([*(compared(metric, start, now) for metric in seen), f"effective rank {now['rank']:.0f}"])
        if why := self.collapsed(start, now):
            return f"collapsed: {why}. {figures}. Try {self.advice}"
        if any(self.better(metric, start, now) for metric in seen):
            below = all(now[metric.key] < now[f"pixel_{metric.key}"] for metric in seen)
            return f"learning: {figures}{'. Raw pixels still do better: train longer' if below else ''}"
        figures += self.remark(now)
        if not any(self.better(metric, start, {**now, metric.key: 1.0}) for metric in seen):
            return f"not better than its start: {figures}. It could not be: no test left room for more"
        worse = " It is worse." if any(self.better(metric, start, now, -1) for metric in seen) else ""
        return f"not better than its start: {figures}.{worse} Train longer, or try {self.advice}"

    def remark(self, now: Mapping[str, float]) -> str:
        """What a method whose features show little in these tests has learned all the same."""
        if "context" not in now:
            return ""
        return f"; seeing an image saves {max(0.0, now['context']):.0%} of the loss of its hidden patches"


def compared(metric: Metric, start: Mapping[str, float], now: Mapping[str, float]) -> str:
    before, after, pixels = start[metric.key], now[metric.key], now.get(f"pixel_{metric.key}", 0.0)
    return f"{metric.words} {after:.1%}, {before:.1%} before the first step, raw pixels {pixels:.1%}"
