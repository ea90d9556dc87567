"""What is minimised: model, patch dropout, loss, teacher.

`Trainee` is the module that is compiled and wrapped for many processes; the model inside never hears
of any of that. Shapes: B images, N patches, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.model.build import Model
from vitkit.model.config import Preprocessing
from vitkit.model.vit import ViT
from vitkit.train.config import TrainConfig


class Trainee(nn.Module):
    """Images -> logits; in training with a distillation token, the logits of both tokens as B 2 classes."""

    def __init__(self, model: Model, patch_dropout: float = 0.0) -> None:
        super().__init__()
        self.model, self.patch_dropout = model, patch_dropout
        if patch_dropout and (not isinstance(model, ViT) or model.config.positions in ("relative", "rope-2d")):
            raise ConfigError("patch_dropout needs a ViT whose positions are added to the tokens; set it to 0")

    def forward(self, images: Tensor) -> Tensor:
        model = self.model
        if not isinstance(model, ViT) or not self.training:
            return model(images)
        both = model.head.distilled is not None
        if not both and not self.patch_dropout:
            return model(images)
        x, grid = model.embed(images)
        if self.patch_dropout:
            x = drop_patches(x, model.config.prefix_tokens, self.patch_dropout)
        x = model.encoder(x, grid, only=model.head.tokens_read)
        x = x if model.norm is None else model.norm(x)
        return torch.stack(model.head.both(x), dim=1) if both else model.head(x)


def drop_patches(x: Tensor, prefix: int, rate: float) -> Tensor:
    """B (P + N) D -> B (P + kept) D: a random part of the patches of each image; the prefix stays."""
    batch, count = x.shape[0], x.shape[1] - prefix
    kept = max(1, round(count * (1 - rate)))
    order = torch.rand(batch, count, device=x.device).argsort(dim=1)[:, :kept].sort(dim=1).values
    patches = x[:, prefix:].gather(1, order[:, :, None].expand(-1, -1, x.shape[2]))
    return torch.cat([x[:, :prefix], patches], dim=1)


def loss_of(logits: Tensor, targets: Tensor, kind: str, weights: Tensor | None = None) -> Tensor:
    """Mean loss. `targets`: class numbers (B,) or shares (B, classes); `weights`: per class."""
    logits = logits.float()  # losses are always computed in single precision
    if kind == "bce":
        if targets.ndim == 1:
            targets = F.one_hot(targets, logits.shape[-1])
        return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), pos_weight=weights)
    return F.cross_entropy(logits, targets, weight=weights)


class Teacher(nn.Module):
    """A frozen model that answers for pictures prepared for the student."""

    def __init__(self, model: nn.Module, theirs: Preprocessing, ours: Preprocessing) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.theirs, self.ours = theirs, ours

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        def column(values: tuple[float, ...]) -> Tensor:
            return torch.tensor(values, device=images.device, dtype=images.dtype).view(-1, 1, 1)

        if (self.theirs.mean, self.theirs.std) != (self.ours.mean, self.ours.std):
            pixels = images * column(self.ours.std) + column(self.ours.mean)
            images = (pixels - column(self.theirs.mean)) / column(self.theirs.std)
        if tuple(images.shape[-2:]) != self.theirs.size:
            images = F.interpolate(images, self.theirs.size, mode="bicubic", antialias=True)
        return self.model(images)


class Objective:
    def __init__(self, config: TrainConfig, weights: Tensor | None = None, teacher: Teacher | None = None) -> None:
        self.config, self.weights, self.teacher = config, weights, teacher

    def __call__(self, trainee: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        output = trainee(images)
        ours, theirs = output.unbind(1) if output.ndim == 3 else (output, output)
        loss = loss_of(ours, targets, self.config.loss, self.weights)
        if self.teacher is None:
            return loss if output.ndim == 2 else (loss + loss_of(theirs, targets, self.config.loss, self.weights)) / 2
        share, heat = self.config.teacher_share, self.config.temperature
        said = self.teacher(images).float()
        if not heat:
            return (1 - share) * loss + share * F.cross_entropy(theirs.float(), said.argmax(-1))
        log_p, log_q = (F.log_softmax(x.float() / heat, dim=-1) for x in (theirs, said))
        return (1 - share) * loss + share * heat**2 * F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
