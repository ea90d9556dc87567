"""DINO (Caron et al. 2021): a student predicts, from one view, the code that a teacher gives another view.

    student: all views   -> model -> head -> softmax(s / 0.1)            = p_s
    teacher: large views -> model -> head -> softmax((s - centre) / 0.04..0.07) = p_t;   loss = -sum p_t log p_s

The teacher follows the student by an exponential average and is what is saved. Centring (or Sinkhorn's algorithm)
keeps all images from getting one code, the low temperature of the teacher from getting all codes alike.
Options: iBOT's loss on masked patches (Zhou et al. 2022) and KoLeo (Sablayrolles et al. 2019), as in DINOv2.

Shapes: B images, V views (the first two large), P prefix tokens, N patches, D width, K codes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data.keys import Keys
from vitkit.errors import ConfigError
from vitkit.model.build import Model
from vitkit.model.vit import ViT
from vitkit.tasks.pretraining import health
from vitkit.tasks.pretraining.method import Learner, Method, Options, noise
from vitkit.tasks.pretraining.views import GLOBAL, LOCAL, views
from vitkit.world import mean_of_all

STUDENT_TEMPERATURE, TEACHER_TEMPERATURES = 0.1, (0.04, 0.07)
WARMUP = 0.3  # the share of the run in which the teacher's rises
CENTRE_MOMENTUM = 0.9
FOLLOW, EPSILON = 0.1, 1e-5  # of standardised features, as in a batch norm
IBOT_MASKING = 0.3  # share of the patches
LITTLE = 0.01  # of what codes could tell about their image: less is one flat code for all, and nothing to learn from
FEW = 4  # so many times fewer codes in use than before the first step: one sharp code for nearly all images


@dataclass(frozen=True)
class DinoOptions(Options):
    codes: int = 256  # the paper's 65,536 for a million images
    hidden: int = 256  # widths of the head; the paper's 2048 and 256
    bottleneck: int = 64
    local_views: int = 4  # small views beside the two large ones
    momentum: float = 0.99  # of the teacher at the start, see below; the paper's .996 is for long training
    centring: Literal["centre", "sinkhorn", "none"] = "centre"
    ibot: float = 0.0  # weight of the loss on masked patches; 1 in iBOT
    koleo: float = 0.0  # weight of KoLeo; 0.1 in DINOv2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"task.momentum={self.momentum:g} must be at least 0 and below 1; 0.996 is the paper's")
        if self.codes < 2 or self.hidden < 1 or self.bottleneck < 1 or self.local_views < 0:
            raise ConfigError("task.codes must be at least 2, task.hidden and task.bottleneck at least 1")


class Standardise(nn.Module):
    """Every feature by its mean and deviation over the batch; over the batches of all processes as over one."""

    mean: Tensor
    variance: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))  # what is used when evaluating follows the batches
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return (x.float() - self.mean) * (self.variance + EPSILON).rsqrt()
        mean = mean_of_all(x.float().mean(dim=0))
        variance = mean_of_all((x.float() - mean).square().mean(dim=0))
        with torch.no_grad():
            self.mean.lerp_(mean, FOLLOW)
            self.variance.lerp_(variance, FOLLOW)
        return (x.float() - mean) * (variance + EPSILON).rsqrt()


class Head(nn.Module):
    """D -> K: three layers to unit length, then cosines with K unit vectors.

    Features are standardised first: those of fresh weights differ so little that codes would not tell images
    apart, and a short run collapsed on digits without it.
    """

    def __init__(self, width: int, options: DinoOptions) -> None:
        super().__init__()
        hidden = options.hidden
        layers = (Standardise(width), nn.Linear(width, hidden), nn.GELU())
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, options.bottleneck))
        self.codes = nn.Parameter(torch.randn(options.codes, options.bottleneck))

    def forward(self, x: Tensor) -> Tensor:
        y = F.normalize(self.mlp(x.flatten(0, -2)), dim=-1).view(*x.shape[:-1], -1)
        return F.linear(y, F.normalize(self.codes, dim=-1))


def sinkhorn(scores: Tensor, temperature: float, rounds: int = 3) -> Tensor:
    """N K -> codes whose rows sum to 1 and that use all K alike; N counts the images of all processes."""
    codes = (scores.float() / temperature - mean_of_all((scores / temperature).max())).exp()
    for _ in range(rounds):
        codes = codes / mean_of_all(codes.mean(dim=0)).clamp(min=1e-12) / codes.shape[1]  # columns
        codes = codes / codes.sum(dim=1, keepdim=True)  # rows
    return codes


def cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """B S K scores of the student's views and B T K codes of the teacher's -> B: the mean over unlike views."""
    log_p = (student.float() / STUDENT_TEMPERATURE).log_softmax(dim=-1)
    pairs = [
        -(teacher[:, t] * log_p[:, s]).sum(dim=-1)
        for t in range(teacher.shape[1])
        for s in range(student.shape[1])
        if s != t
    ]
    return torch.stack(pairs).mean(dim=0)


def koleo(features: Tensor) -> Tensor:
    """B D -> the mean of -log of the distance to the nearest other unit vector: spreads features evenly."""
    unit = F.normalize(features.float(), dim=1)
    with torch.no_grad():
        nearest = (unit @ unit.T).fill_diagonal_(-2).argmax(dim=1)
    return -(F.pairwise_distance(unit, unit[nearest], eps=1e-8) + 1e-8).log().mean()


def teacher_temperature(progress: float) -> float:
    low, high = TEACHER_TEMPERATURES
    return low + (high - low) * min(1.0, progress / WARMUP)


def teacher_momentum(start: float, progress: float) -> float:
    """Rises to 1 along a cosine; 0 stays 0: the teacher is a copy of the student.

    A copy learns little with centring, and may collapse: codes change faster than the centre follows.
    """
    return 1 - (1 - start) * (math.cos(math.pi * progress) + 1) / 2 if start else 0.0


class SelfDistillation(Learner):
    centre: Tensor
    patch_centre: Tensor
    progress: Tensor

    def __init__(self, model: Model, options: DinoOptions) -> None:
        super().__init__(model)
        config, self.options = self.vit.config, options
        self.head = Head(config.head_inputs, options)
        self.teacher = copy.deepcopy(self.vit).requires_grad_(False)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(options.codes))
        self.register_buffer("progress", torch.zeros((), dtype=torch.float64))
        if options.ibot:
            self.patch_head = Head(config.width, options)
            self.teacher_patch_head = copy.deepcopy(self.patch_head).requires_grad_(False)
            self.mask_token = nn.Parameter(torch.empty(config.width).normal_(std=0.02))
            self.register_buffer("patch_centre", torch.zeros(options.codes))
        self.seen: dict[str, list[Tensor]] = {"centre": [], "patch_centre": []}  # means of this step's teacher scores

    @property
    def kept(self) -> Model:
        return self.teacher

    def train(self, mode: bool = True) -> SelfDistillation:
        """Called at the beginning of every step, also after one that was left out."""
        super().train(mode)
        self.teacher.eval()  # no dropout
        for means in self.seen.values():
            means.clear()
        return self

    def codes(self, scores: Tensor, name: str) -> Tensor:
        """... K scores of the teacher -> codes; what the centre will follow is remembered until the step is taken."""
        temperature, flat = teacher_temperature(float(self.progress)), scores.float().flatten(0, -2)
        if self.training:
            self.seen[name].append(mean_of_all(flat.mean(dim=0)))
        if self.options.centring == "sinkhorn" and self.training:
            return sinkhorn(flat, temperature).view_as(scores)
        centre = getattr(self, name) if self.options.centring == "centre" else 0.0
        return ((scores.float() - centre) / temperature).softmax(dim=-1)

    def losses(self, images: Tensor, targets: Tensor) -> Tensor:
        large, small = images[:, :2], images[:, 2:]
        with torch.no_grad():
            tokens = tokens_of(self.teacher, large)  # B 2 T D
            codes = self.codes(self.teacher_head(pooled(self.teacher, tokens)), "centre")  # B 2 K
        masked = targets < IBOT_MASKING if self.options.ibot else None  # B 2 N
        ours = tokens_of(self.vit, large, self.hidden(masked) if masked is not None else None)
        features = pooled(self.vit, ours)  # B 2 D
        student = [self.head(features)]
        if small.shape[1]:
            student.append(self.head(pooled(self.vit, tokens_of(self.vit, self.smaller(small)))))
        loss = cross_entropy(torch.cat(student, dim=1), codes)
        if masked is not None:
            loss = loss + self.options.ibot * self.patch_loss(ours, tokens, masked)
        if self.options.koleo:
            loss = loss + self.options.koleo * torch.stack([koleo(x) for x in features.unbind(1)]).mean()
        return loss

    def smaller(self, small: Tensor) -> Tensor:
        """B v C H W -> views of about half the size, in whole patches."""
        size = [max(p, n // 2 // p * p) for n, p in zip(small.shape[-2:], self.vit.config.patch_size, strict=True)]
        return F.interpolate(small.flatten(0, 1), size, mode="bilinear", antialias=True).view(*small.shape[:3], *size)

    def hidden(self, masked: Tensor) -> Masking:
        return Masking(self.mask_token, masked.flatten(0, 1))

    def patch_loss(self, ours: Tensor, theirs: Tensor, masked: Tensor) -> Tensor:
        """iBOT: of masked patches the student predicts the teacher's codes; B."""
        prefix = self.vit.config.prefix_tokens
        with torch.no_grad():
            codes = self.codes(self.teacher_patch_head(theirs[:, :, prefix:]), "patch_centre")  # B 2 N K
        log_p = (self.patch_head(ours[:, :, prefix:]).float() / STUDENT_TEMPERATURE).log_softmax(dim=-1)
        errors = -(codes * log_p).sum(dim=-1) * masked  # B 2 N
        loss: Tensor = errors.sum(dim=(1, 2)) / masked.sum(dim=(1, 2)).clamp(min=1)
        return loss

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        """The centre follows the teacher's scores, and the teacher the student; both only after a sound step."""
        for name, means in self.seen.items():
            if means and self.options.centring == "centre":
                getattr(self, name).lerp_(torch.stack(means).mean(dim=0), 1 - CENTRE_MOMENTUM)
        momentum = teacher_momentum(self.options.momentum, progress)
        pairs = [(self.teacher, self.vit), (self.teacher_head, self.head)]
        pairs += [(self.teacher_patch_head, self.patch_head)] if self.options.ibot else []
        for theirs, ours in pairs:
            torch._foreach_lerp_([*theirs.parameters()], [*ours.parameters()], 1 - momentum)
        self.progress.fill_(progress)

    def observe(self, images: Tensor) -> dict[str, Tensor]:
        seen = super().observe(images)
        return {**seen, "codes": self.codes(self.teacher_head(seen["features"]), "centre")}


class Masking:
    """Puts the mask token in the place of some patches: `on_patches` of `ViT.embed`."""

    def __init__(self, token: Tensor, masked: Tensor) -> None:
        self.token, self.masked = token, masked[:, :, None]

    def __call__(self, patches: Tensor) -> Tensor:
        return torch.where(self.masked, self.token.to(patches.dtype), patches)


def tokens_of(model: ViT, images: Tensor, masking: Masking | None = None) -> Tensor:
    """B v C H W -> B v T D after the final norm."""
    x = model.encode(*model.embedded(images.flatten(0, 1), on_patches=masking))
    return x.view(*images.shape[:2], *x.shape[1:])


def pooled(model: ViT, tokens: Tensor) -> Tensor:
    """B v T D -> B v D."""
    return model.head.pooled(tokens.flatten(0, 1)).view(*tokens.shape[:2], -1)


class Dino(Method):
    name = "dino"
    why = "made for k-NN and linear probes; a set whose small crops show little makes it collapse"
    options = DinoOptions
    augmentation = "none"
    why_augmentation = ": the method makes views of its own"
    least_batch = 2
    advice = "task.centring=sinkhorn, a smaller --lr, larger batches, or --method mae"

    def learner(self, model: Model) -> SelfDistillation:
        assert isinstance(self.chosen, DinoOptions)
        self.pre = model.config.preprocessing
        return SelfDistillation(model, self.chosen)

    def targets(self, images: Tensor, labels: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """Two large views and some small ones; numbers that decide which patches of the large ones iBOT masks."""
        assert isinstance(self.chosen, DinoOptions)
        scales = [GLOBAL] * 2 + [LOCAL] * self.chosen.local_views
        draws = noise(keys, "mask", 2 * self.patches, images).view(len(images), 2, -1)
        return views(images, keys, self.pre, scales, self.flip_safe), draws

    def about_method(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        codes = columns["codes"]
        return {"code_information": health.information(codes), "codes_in_use": health.codes_in_use(codes)}

    def collapsed(self, start: Mapping[str, float], now: Mapping[str, float]) -> str:
        """Either of the two ways in which codes stop telling images apart, and the student has nothing to learn."""
        used, before = now.get("codes_in_use", 0.0), start.get("codes_in_use", 0.0)
        if used * FEW < before:
            return f"the teacher gives most images the same few codes ({used:.1f} in use, {before:.0f} before)"
        if (information := now.get("code_information", 1.0)) < LITTLE:
            return f"the teacher gives all images nearly the same code ({information:.1%} of what codes could tell)"
        return super().collapsed(start, now)
