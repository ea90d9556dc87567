"""Who learns and who teaches: the model as it is run in training, and a frozen teacher to distil from.

The `Trainee` is compiled and wrapped for many processes; the model inside never hears of any of that.
Shapes: B images, P prefix tokens, N patches, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.model.base import Outputs
from vitkit.model.build import Model
from vitkit.model.config import Preprocessing
from vitkit.model.vit import ViT


class Trainee(nn.Module):
    """Images -> logits; with a distillation token, the logits of both tokens as B 2 classes.

    A task may subclass it. Modules and buffers it adds beside `model` (a decoder, a teacher that follows,
    a centre) learn, move to the device and are part of the run's checkpoints; the model that is kept has
    none of them.
    """

    plain: ClassVar[bool] = True  # `forward` takes images alone and uses every weight: it can be compiled

    def __init__(self, model: Model, patch_dropout: float = 0.0) -> None:
        super().__init__()
        self.model, self.patch_dropout = model, patch_dropout
        if patch_dropout and not model.mergeable:
            raise ConfigError("patch_dropout needs a ViT whose positions are added to the tokens; set it to 0")

    def forward(self, images: Tensor) -> Tensor:
        model = self.model
        both = isinstance(model, ViT) and model.head.distilled is not None
        if not isinstance(model, ViT) or not self.training or not (both or self.patch_dropout):
            return model(images)
        x, place = model.embedded(images)
        if self.patch_dropout:
            x = drop_patches(x, model.config.prefix_tokens, self.patch_dropout)
        x = model.encode(x, place, only=model.head.tokens_read)
        return torch.stack(model.head.both(x), dim=1) if both else model.head(x)

    @property
    def kept(self) -> Model:
        """The weights that are saved and evaluated: those that learn, or those of a teacher that follows them."""
        return self.model

    def after_step(self, progress: float) -> None:
        """Called after every update, with how much of the run is done: a teacher may follow its student here."""


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

    share        of the loss that compares with the teacher
    temperature  of soft labels; 0: the teacher's hard decision, as in DeiT
    """

    def __init__(self, model: nn.Module, student: Model, share: float, temperature: float) -> None:
        super().__init__()
        self.model, self.share, self.temperature = model.eval().requires_grad_(False), share, temperature
        about, ours = getattr(model, "config", student.config), student.config
        self.ours: Preprocessing = ours.preprocessing
        self.theirs: Preprocessing = getattr(about, "preprocessing", self.ours)
        if getattr(about, "classes", ours.classes) != ours.classes:
            asked = f"the teacher has {about.classes} outputs and the data asks for {ours.classes}"
            raise ConfigError(f"{asked}; fine-tune the teacher on this data first")
        self.order = _order(*(getattr(one, "outputs", Outputs()).names for one in (model, student)))

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        def column(values: tuple[float, ...]) -> Tensor:
            return torch.tensor(values, device=images.device, dtype=images.dtype).view(-1, 1, 1)

        if (self.theirs.mean, self.theirs.std) != (self.ours.mean, self.ours.std):
            pixels = images * column(self.ours.std) + column(self.ours.mean)
            images = (pixels - column(self.theirs.mean)) / column(self.theirs.std)
        if tuple(images.shape[-2:]) != self.theirs.size:
            images = F.interpolate(images, self.theirs.size, mode="bicubic", antialias=True)
        output: Tensor = self.model(images)
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
