"""One short training, the same recipe for every model of every study, and its judgement.

AdamW, a linear warm-up and a cosine, clipped gradients, no augmentation: what is varied is the model
and the data, nothing else. The start of the weights and the order of the pictures follow from the seed
alone, so two models of one seed see the same batches. On a CPU with the same number of threads the
result repeats to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data import Augment, Loader, normalise
from vitkit.data.source import PixelSource
from vitkit.model.build import Model
from vitkit.train import TrainConfig, optim, schedule

BATCH = 64
JUDGED = 256  # pictures at once when judging


@dataclass(frozen=True)
class Recipe:
    steps: int
    lr: float
    seed: int
    weight_decay: float = 0.05
    warmup: float = 0.1
    clip: float = 1.0


def fit(model: Model, source: PixelSource, recipe: Recipe) -> list[float]:
    """Train in place; returns the loss of every step. A loss that is not finite ends the training."""
    pre = model.config.preprocessing
    config = TrainConfig(optimizer="adamw", lr=recipe.lr, weight_decay=recipe.weight_decay)
    optimizers = optim.build(model, config)
    peaks = [[group["lr"] for group in o.param_groups] for o in optimizers]
    loader = Loader(source, pre, BATCH, augment=Augment(), seed=recipe.seed)
    torch.manual_seed(recipe.seed)  # of dropout
    model.train()
    losses: list[float] = []
    while len(losses) < recipe.steps:
        for batch in loader:
            share = schedule.rate(len(losses) / recipe.steps, recipe.warmup, "cosine")
            for optimizer, lrs in zip(optimizers, peaks, strict=True):
                for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                    group["lr"] = share * lr
            loss = F.cross_entropy(model(normalise(batch.images, pre)), batch.labels)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                return losses
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip, foreach=True)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if len(losses) == recipe.steps:
                break
    return losses


@torch.no_grad()
def answers(model: Model, images: Tensor, batch: int = JUDGED) -> Tensor:
    """uint8 N C H W -> the class that each picture is taken for."""
    model.eval()
    pre = model.config.preprocessing
    return torch.cat([model(normalise(part, pre)).argmax(dim=1) for part in images.split(batch)])


def accuracy(model: Model, images: Tensor, labels: Tensor, batch: int = JUDGED) -> float:
    return float((answers(model, images, batch) == labels).float().mean())
