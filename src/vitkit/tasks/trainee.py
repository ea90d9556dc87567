"""Who learns and who teaches: the model as it is run in training, and a frozen teacher to distil from.

The `Trainee` is compiled and wrapped for many processes; the model inside never hears of any of that.
Shapes: B images, P prefix tokens, N patches, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.model.base import Outputs
from vitkit.model.build import Model
from vitkit.model.config import Preprocessing
from vitkit.model.stem import ResNet
from vitkit.model.vit import ViT


class Trainee(nn.Module):
    """Images -> logits; with a distillation token, the logits of both tokens as B 2 classes.

    A task may subclass it. Modules and buffers it adds beside `model` (a decoder, a teacher that follows,
    a centre) learn, move to the device and are part of the run's checkpoints; the model that is kept has
    none of them.
    """

    plain: ClassVar[bool] = True  # `forward` takes images alone and uses every weight: it can be compiled
    start: int = 0  # in place of images come the states that this block sees: those below are frozen and do not run

    def __init__(self, model: Model, patch_dropout: float = 0.0) -> None:
        super().__init__()
        self.model, self.patch_dropout = model, patch_dropout
        if patch_dropout and not model.mergeable:
            raise ConfigError("patch_dropout needs a ViT whose positions are added to the tokens; set it to 0")

    def forward(self, images: Tensor) -> Tensor:
        model = self.model
        both = isinstance(model, ViT) and model.head.distilled is not None and self.training
        dropped = self.patch_dropout if self.training else 0.0
        if not isinstance(model, ViT) or not (both or dropped or self.start):
            return model(images)
        x, place = (images, model.place(model.config.grid, images)) if self.start else model.embedded(images)
        if dropped:
            x = drop_patches(x, model.config.prefix_tokens, dropped)
        x = model.encode(x, place, only=model.head.tokens_read, start=self.start)
        return torch.stack(model.head.both(x), dim=1) if both else model.head(x)

    @property
    def kept(self) -> Model:
        """The weights that are saved and evaluated: those that learn, or those of a teacher that follows them."""
        return self.model

    def added(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What a task adds to the model and learns too."""
        return ((name, p) for name, p in self.named_parameters() if not name.startswith("model."))

    def after_step(self, progress: float) -> None:
        """Called after every update, with how much of the run is done: a teacher may follow its student here."""


class FeatureTrainee(Trainee):
    """In training images -> (logits, features in the teacher's space), by a linear map that the kept model has not."""

    def __init__(self, model: Model, width: int, patch_dropout: float = 0.0) -> None:
        super().__init__(model, patch_dropout)
        self.projection = nn.Linear(feature_width(model), width)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        if not self.training:
            return self.model(images)
        x = represent(self.model, images, self.patch_dropout)
        return classify(self.model, x), self.projection(x.mean(dim=1) if x.ndim == 3 else x)


def feature_width(model: Model) -> int:
    return model.config.head_inputs if isinstance(model, ViT) else model.config.stem.out_channels


def represent(model: Model, images: Tensor, patch_dropout: float = 0.0) -> Tensor:
    """What the classifier sees, B D; with a distillation token, what both see, B 2 D."""
    if not isinstance(model, ViT):
        return model.pooled(images)
    x, place = model.embedded(images)
    x = drop_patches(x, model.config.prefix_tokens, patch_dropout) if patch_dropout else x
    return model.head.represent(model.encode(x, place, only=model.head.tokens_read))


def classify(model: Model, x: Tensor) -> Tensor:
    """`represent`'s -> logits, B classes; with a distillation token, of both, B 2 classes."""
    if x.ndim == 2:
        logits: Tensor = model.classifiers[0](x)
        return logits
    return torch.stack([part(x[:, i]) for i, part in enumerate(model.classifiers)], dim=1)


def apart(features: Tensor, teacher: Tensor) -> Tensor:
    """1 - cosine, the mean over the images: AM-RADIO's loss of summary features (Ranzinger et al. 2024, 2312.06709)."""
    return 1 - F.cosine_similarity(features.float(), teacher.float(), dim=-1).mean()


def drop_patches(x: Tensor, prefix: int, rate: float) -> Tensor:
    """B (P + N) D -> B (P + kept) D: a random part of the patches of each image; the prefix stays."""
    batch, count = x.shape[0], x.shape[1] - prefix
    kept = max(1, round(count * (1 - rate)))
    order = torch.rand(batch, count, device=x.device).argsort(dim=1)[:, :kept].sort(dim=1).values
    patches = x[:, prefix:].gather(1, order[:, :, None].expand(-1, -1, x.shape[2]))
    return torch.cat([x[:, :prefix], patches], dim=1)


def unwrapped(model: nn.Module) -> Any:
    """The model itself, inside what DistributedDataParallel wraps around it."""
    return getattr(model, "module", model)


class Teacher(nn.Module):
    """A frozen model that answers for images prepared for the student; a foreign module wants what the student wants.

    share        of the loss that compares outputs with the teacher's
    temperature  of soft labels; 0: the teacher's hard decision, as in DeiT
    features     weight of the loss that compares features with the teacher's, which then needs no classifier
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self, model: nn.Module, student: Model, share: float, temperature: float, features: float = 0.0
    ) -> None:
        super().__init__()
        self.model, self.share, self.temperature = model.eval().requires_grad_(False), share, temperature
        self.features, self.width = features, 0
        if features:
            if not isinstance(model, ViT | ResNet):
                raise ConfigError("only a model of vitkit has features to learn from; load it with vitkit.load")
            self.width = feature_width(model)
        self.register_buffer("mean", torch.zeros(self.width))
        self.register_buffer("deviation", torch.ones(self.width))
        about, ours = getattr(model, "config", student.config), student.config
        self.ours: Preprocessing = ours.preprocessing
        self.theirs: Preprocessing = getattr(about, "preprocessing", self.ours)
        self.order: list[int] | None = None
        if not share:
            if not features:
                raise ConfigError(
                    "teacher_share=0 leaves nothing to learn from the teacher; add --set teacher_features=1"
                )
            return
        if getattr(about, "classes", ours.classes) != ours.classes:
            asked = f"the teacher has {about.classes} outputs and the data asks for {ours.classes}"
            instead = "learn from its features: --set teacher_features=1 --set teacher_share=0"
            raise ConfigError(f"{asked}; fine-tune the teacher on this data first, or {instead}")
        self.order = _order(*(getattr(one, "outputs", Outputs()).names for one in (model, student)))

    @torch.no_grad()
    def taught(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Outputs and features, as far as they are learned from, by one pass."""
        if not self.features:
            return (self(images) if self.share else None), None
        assert isinstance(self.model, ViT | ResNet)
        x = represent(self.model, self.as_trained(images))
        output = self.ordered(classify(self.model, x)) if self.share else None
        mean = output.mean(dim=1) if output is not None and output.ndim == 3 else output
        return mean, ((x.mean(dim=1) if x.ndim == 3 else x) - self.mean) / self.deviation

    def standardise(self, images: Tensor) -> None:
        """Features by their mean and deviation on these images: what all images share says nothing about one of them.

        PHI-S (Ranzinger et al. 2024, 2410.01680) compares such normalisations.
        """
        mean, deviation = self.mean, self.deviation
        pooled = [self.taught(images[start : start + 32])[1] for start in range(0, len(images), 32)]
        x = torch.cat([part for part in pooled if part is not None]) * deviation + mean
        self.mean, self.deviation = x.mean(dim=0), x.std(dim=0, correction=0).clamp_min(1e-6)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Its outputs, in our order."""
        return self.ordered(self.model(self.as_trained(images)))

    def as_trained(self, images: Tensor) -> Tensor:
        """Images as the teacher wants them."""

        def column(values: tuple[float, ...]) -> Tensor:
            return torch.tensor(values, device=images.device, dtype=images.dtype).view(-1, 1, 1)

        if (self.theirs.mean, self.theirs.std) != (self.ours.mean, self.ours.std):
            pixels = images * column(self.ours.std) + column(self.ours.mean)
            images = (pixels - column(self.theirs.mean)) / column(self.theirs.std)
        if tuple(images.shape[-2:]) != self.theirs.size:
            images = F.interpolate(images, self.theirs.size, mode="bicubic", antialias=True)
        return images

    def ordered(self, output: Tensor) -> Tensor:
        return output if self.order is None else output[..., self.order]


def _order(theirs: Sequence[str], ours: Sequence[str]) -> list[int] | None:
    """The outputs of a teacher in our order, by name; None: as they are, also where a side has no names or numbers."""
    if not theirs or tuple(theirs) == tuple(ours) or all(name.isdecimal() for name in ours):
        return None
    if set(theirs) != set(ours):
        only, missing = (", ".join(sorted(a)[:5]) for a in (set(theirs) - set(ours), set(ours) - set(theirs)))
        other = f"the teacher has classes that are not in the data: {only}; the data has {missing} instead"
        raise ConfigError(f"{other}. Give a teacher of these classes, or fine-tune the teacher on this data first")
    return [theirs.index(name) for name in ours]
