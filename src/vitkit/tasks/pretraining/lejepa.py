"""LeJEPA (Balestriero and LeCun 2025): views of an image agree, and all projections together look Gaussian.

    views -> model -> projector -> z;   loss = (1 - weight) * |z - mean of the views|^2 + weight * SIGReg(z)

There is no teacher, no stop-gradient and one knob. SIGReg ("sketched isotropic Gaussian regularisation") projects z on
random directions and compares the characteristic function of each with that of the standard normal (the Epps-Pulley
test): N * integral of |phi_z(t) - exp(-t^2 / 2)|^2 exp(-t^2 / 2) dt from -3 to 3, by the trapezoid rule.

Shapes: B images, V views, D width, E width of the projection, S directions, T points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitkit.data.keys import Keys
from vitkit.errors import ConfigError
from vitkit.model.build import Model
from vitkit.tasks.pretraining import health
from vitkit.tasks.pretraining.method import Learner, Method, Options
from vitkit.tasks.pretraining.views import GLOBAL, views
from vitkit.world import mean_of_all, processes

POINTS, END = 17, 3.0  # of half of the integral, which is even
NARROW = 0.1  # a standard deviation of the projections: SIGReg wants 1


@dataclass(frozen=True)
class LejepaOptions(Options):
    weight: float = 0.05  # of SIGReg in the loss; the paper's lambda
    views: int = 2
    projection: int = 32
    hidden: int = 0  # width of the projector; 0: four times the model's
    directions: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.weight <= 1:
            raise ConfigError(f"task.weight={self.weight:g} must be from 0 to 1; 0.05 is usual, and 0 collapses")
        if self.views < 2 or self.projection < 2 or self.directions < 1 or self.hidden < 0:
            raise ConfigError("task.views and task.projection must be at least 2, task.directions at least 1")


def epps_pulley(samples: Tensor) -> Tensor:
    """N S -> S: how far each column is from the standard normal. The samples of all processes count as one set."""
    t = torch.linspace(0, END, POINTS, device=samples.device)
    normal = torch.exp(-t.square() / 2)  # its characteristic function, and the weight of the integral
    angles = samples.float()[..., None] * t  # N S T
    real, imaginary = mean_of_all(torch.stack([angles.cos().mean(dim=0), angles.sin().mean(dim=0)]))  # S T
    gap = ((real - normal).square() + imaginary.square()) * normal
    return 2 * torch.trapezoid(gap, t) * len(samples) * processes()


def sigreg(z: Tensor, directions: Tensor) -> Tensor:
    """N E and S directions E S -> the mean statistic over the directions."""
    return epps_pulley(z @ nn.functional.normalize(directions, dim=0)).mean()


def lejepa_loss(z: Tensor, directions: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """B V E -> the loss of agreement of each image, B, and SIGReg, the mean over the views; both weighted."""
    agreement = (z - z.mean(dim=1, keepdim=True)).square().mean(dim=(1, 2))
    gaussian = torch.stack([sigreg(view, directions) for view in z.unbind(1)]).mean()
    return (1 - weight) * agreement, weight * gaussian


class Lejepa(Learner):
    steps: Tensor

    def __init__(self, model: Model, options: LejepaOptions) -> None:
        super().__init__(model)
        self.options = options
        width = self.vit.config.head_inputs
        hidden = options.hidden or 4 * width
        self.projector = nn.Sequential(
            nn.Linear(width, hidden),
            nn.LayerNorm(hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden),
            nn.GELU(),
            nn.Linear(hidden, options.projection),
        )
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def losses(self, images: Tensor, targets: Tensor) -> Tensor:
        z = self.projector(self.model(images.flatten(0, 1))).float().view(*images.shape[:2], -1)  # B V E
        generator = torch.Generator().manual_seed(int(self.steps))  # the same directions in all processes
        directions = torch.randn(z.shape[2], self.options.directions, generator=generator).to(z.device)
        agreement, gaussian = lejepa_loss(z, directions, self.options.weight)
        return agreement + gaussian

    def after_step(self, progress: float) -> None:
        self.steps += 1

    def observe(self, images: Tensor) -> dict[str, Tensor]:
        seen = super().observe(images)
        return {**seen, "projections": self.projector(seen["features"])}


class LejepaMethod(Method):
    name = "lejepa"
    why = "made for k-NN and linear probes, with the fewest knobs"
    options = LejepaOptions
    augmentation = "none"
    why_augmentation = ": the method makes views of its own"
    least_batch = 2
    advice = "a larger task.weight (of SIGReg), a smaller --lr, or --method mae"

    def learner(self, model: Model) -> Lejepa:
        assert isinstance(self.chosen, LejepaOptions)
        self.pre = model.config.preprocessing
        return Lejepa(model, self.chosen)

    def targets(self, images: Tensor, labels: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        assert isinstance(self.chosen, LejepaOptions)
        made = views(images, keys, self.pre, [GLOBAL] * self.chosen.views, self.flip_safe)
        return made, images.new_zeros(len(images))

    def about_method(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        z = columns["projections"]
        return {"projection_rank": health.effective_rank(z), "projection_std": float(z.std(dim=0).mean())}

    def collapsed(self, start: Mapping[str, float], now: Mapping[str, float]) -> str:
        """Projections that begin narrow must widen: half as wide as before the first step is the wrong direction."""
        std, before = now.get("projection_std", 1.0), start.get("projection_std", 1.0)
        if std < min(NARROW, before / 2):
            return f"all images have nearly the same projection (standard deviation {std:.3f}; SIGReg wants 1)"
        return super().collapsed(start, now)
