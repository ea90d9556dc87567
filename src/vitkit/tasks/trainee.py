"""Who learns and who teaches: the model as it is run in training, and a frozen teacher to distil from.

The `Trainee` is compiled and wrapped for many processes; the model inside never hears of any of that.
Shapes: B images, P prefix tokens, N patches on a grid (h, w), D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

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


class Taught(NamedTuple):
    """Outputs, features B D and patch tokens B h w D: of a teacher, as far as they are learned from, and our own."""

    outputs: Tensor | None = None
    features: Tensor | None = None
    patches: Tensor | None = None


class FeatureTrainee(Trainee):
    """In training images -> logits, features in the teacher's space, by linear maps that the kept model has not."""

    def __init__(self, model: Model, width: int, patch_dropout: float = 0.0, patch_width: int = 0) -> None:
        super().__init__(model, patch_dropout)
        self.projection = nn.Linear(feature_width(model), width)
        self.patches = nn.Linear(model.config.width, patch_width) if patch_width else None
        if patch_width and patch_dropout:
            raise ConfigError("teacher_patches compares all patches; leave out patch_dropout")

    def forward(self, images: Tensor) -> Tensor | Taught:  # type: ignore[override]
        if not self.training:
            return self.model(images)
        patches = None
        if self.patches is None:
            x = represent(self.model, images, self.patch_dropout)
        else:
            x, patches = with_patches(self.model, images)
            patches = self.patches(patches)
        return Taught(classify(self.model, x), self.projection(x.mean(dim=1) if x.ndim == 3 else x), patches)


def feature_width(model: Model) -> int:
    return model.config.head_inputs if isinstance(model, ViT) else model.config.stem.out_channels


def represent(model: Model, images: Tensor, patch_dropout: float = 0.0) -> Tensor:
    """What the classifier sees, B D; with a distillation token, what both see, B 2 D."""
    if not isinstance(model, ViT):
        return model.pooled(images)
    x, place = model.embedded(images)
    x = drop_patches(x, model.config.prefix_tokens, patch_dropout) if patch_dropout else x
    return model.head.represent(model.encode(x, place, only=model.head.tokens_read))


def with_patches(model: Model, images: Tensor) -> tuple[Tensor, Tensor]:
    """`represent`'s, and the patch tokens in their places, B h w D."""
    assert isinstance(model, ViT)
    x, place = model.embedded(images)
    x = model.encode(x, place)
    return model.head.represent(x), torch.unflatten(x[:, model.config.prefix_tokens :], 1, place.grid)


def classify(model: Model, x: Tensor) -> Tensor:
    """`represent`'s -> logits, B classes; with a distillation token, of both, B 2 classes."""
    if x.ndim == 2:
        logits: Tensor = model.classifiers[0](x)
        return logits
    return torch.stack([part(x[:, i]) for i, part in enumerate(model.classifiers)], dim=1)


def apart(features: Tensor, teacher: Tensor) -> Tensor:
    """1 - cosine, the mean over images, or patches B h w D: as AM-RADIO's loss (Ranzinger et al. 2024, 2312.06709).

    A teacher's grid that differs from ours is resized to it.
    """
    if features.ndim == 4 and features.shape[1:3] != teacher.shape[1:3]:
        grid = (features.shape[1], features.shape[2])
        teacher = F.interpolate(teacher.float().permute(0, 3, 1, 2), grid, mode="bilinear", antialias=True)
        teacher = teacher.permute(0, 2, 3, 1)
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
    patches      weight of the loss that also compares patch tokens, where both are on a grid
    """

    mean: Tensor
    deviation: Tensor
    patch_mean: Tensor
    patch_deviation: Tensor

    def __init__(
        self,
        model: nn.Module,
        student: Model,
        share: float,
        temperature: float,
        features: float = 0.0,
        patches: float = 0.0,
    ) -> None:
        super().__init__()
        self.model, self.share, self.temperature = model.eval().requires_grad_(False), share, temperature
        self.features, self.patches, self.width, self.patch_width = features, patches, 0, 0
        if features:
            if not isinstance(model, ViT | ResNet):
                raise ConfigError("only a model of vitkit has features to learn from; load it with vitkit.load")
            self.width = feature_width(model)
        if patches:
            if not features:
                raise ConfigError("teacher_patches are compared beside features; add --set teacher_features=1")
            if not isinstance(model, ViT) or not isinstance(student, ViT):
                raise ConfigError("teacher_patches compares patch tokens, and a ResNet has none; leave it out")
            self.patch_width = model.config.width
        for name, width in (("", self.width), ("patch_", self.patch_width)):
            self.register_buffer(f"{name}mean", torch.zeros(width))
            self.register_buffer(f"{name}deviation", torch.ones(width))
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
    def taught(self, images: Tensor) -> Taught:
        """By one pass."""
        if not self.features:
            return Taught(self(images) if self.share else None)
        assert isinstance(self.model, ViT | ResNet)
        x, patches = self.represented(images)
        output = self.ordered(classify(self.model, x)) if self.share else None
        mean = output.mean(dim=1) if output is not None and output.ndim == 3 else output
        patches = None if patches is None else (patches - self.patch_mean) / self.patch_deviation
        return Taught(mean, ((x.mean(dim=1) if x.ndim == 3 else x) - self.mean) / self.deviation, patches)

    def represented(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        assert isinstance(self.model, ViT | ResNet)
        images = self.as_trained(images)
        return with_patches(self.model, images) if self.patches else (represent(self.model, images), None)

    @torch.no_grad()
    def standardise(self, images: Tensor) -> None:
        """Features by their mean and deviation on these images: what all images share says nothing about one of them.

        PHI-S (Ranzinger et al. 2024, 2410.01680) compares such normalisations.
        """
        found = [self.represented(images[start : start + 32]) for start in range(0, len(images), 32)]
        x = torch.cat([part for part, _ in found])
        self.mean, self.deviation = _standard(x.mean(dim=1) if x.ndim == 3 else x)
        if self.patches:
            self.patch_mean, self.patch_deviation = _standard(
                torch.cat([p.flatten(0, 2) for _, p in found if p is not None])
            )

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


def _standard(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(dim=0), x.std(dim=0, correction=0).clamp_min(1e-6)


def _order(theirs: Sequence[str], ours: Sequence[str]) -> list[int] | None:
    """The outputs of a teacher in our order, by name; None: as they are, also where a side has no names or numbers."""
    if not theirs or tuple(theirs) == tuple(ours) or all(name.isdecimal() for name in ours):
        return None
    if set(theirs) != set(ours):
        only, missing = (", ".join(sorted(a)[:5]) for a in (set(theirs) - set(ours), set(ours) - set(theirs)))
        other = f"the teacher has classes that are not in the data: {only}; the data has {missing} instead"
        raise ConfigError(f"{other}. Give a teacher of these classes, or fine-tune the teacher on this data first")
    return [theirs.index(name) for name in ours]
