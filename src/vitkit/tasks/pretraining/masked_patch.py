"""Masked patch prediction, the self-supervision of the ViT paper (Dosovitskiy et al. 2021, appendix B.1.2).

Half of the patch embeddings are corrupted: 80% of these become a learned mask token, 10% the embedding of another
patch of the image, 10% stay as they are. Of every corrupted patch the model predicts, by the choice of `loss`:

    colour       its mean colour, 3 bits a channel: one of 512 (the paper's choice)
    downsampled  the colours of 4x4 parts of it, each one of 512
    pixels       all of its pixels, by squared error

Shapes: B images, P prefix tokens, N patches, D width, R colours predicted per patch, K kinds of colours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data.keys import Keys
from vitkit.errors import ConfigError
from vitkit.model.build import Model
from vitkit.model.config import Preprocessing, Size
from vitkit.tasks.pretraining import health
from vitkit.tasks.pretraining.mae import cut, grid_of, hide, paste
from vitkit.tasks.pretraining.method import Learner, Method, Options, noise

LEVELS = 8  # of a channel: 3 bits
PARTS = 4  # of a downsampled patch, down and across
MASKED, REPLACED = 0.8, 0.1  # of the corrupted patches; the rest is kept


@dataclass(frozen=True)
class MaskedPatchOptions(Options):
    masking: float = 0.5  # share of the patches that are corrupted

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.masking <= 1:
            raise ConfigError(f"task.masking={self.masking:g} leaves nothing to predict; 0.5 is the paper's")


def colours(images: Tensor, pre: Preprocessing, patch: Size, parts: Size = (1, 1)) -> Tensor:
    """Normalised images B C H W -> classes B N R: the mean colour of each part of each patch, 3 bits a channel."""
    mean, std = (images.new_tensor(v).view(-1, 1, 1) for v in (pre.mean, pre.std))
    grid = grid_of(images, patch)
    shades = F.adaptive_avg_pool2d(images.float() * std + mean, (grid[0] * parts[0], grid[1] * parts[1]))  # B C hR wR
    levels = (shades * (255 / 256) * LEVELS + 1e-5).floor().clamp(0, LEVELS - 1).long()  # 0..255 -> 0..7
    channels = levels.shape[1]
    weights = LEVELS ** torch.arange(channels - 1, -1, -1, device=images.device)  # the first channel counts most
    return cut((levels * weights.view(-1, 1, 1)).sum(dim=1, keepdim=True), parts)  # B N R


def corruption(draws: Tensor, count: int, masking: float) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers in [0, 1), B 3 N -> which patches are corrupted, which masked (bool, B N), and which patch each shows."""
    first, kind, other = draws[:, :, :count].unbind(1)
    chosen = max(1, round(count * masking))
    corrupted = first.argsort(dim=1).argsort(dim=1) < chosen
    masked = corrupted & (kind < MASKED)
    replaced = corrupted & ~masked & (kind < MASKED + REPLACED)
    own = torch.arange(count, device=draws.device).expand_as(first)
    away = 1 + (other * (count - 1)).long()  # of a patch to another one
    return corrupted, masked, torch.where(replaced, (own + away) % count, own)


class MaskedPatchPredictor(Learner):
    def __init__(self, model: Model, options: MaskedPatchOptions, target: str) -> None:
        super().__init__(model)
        config, self.options, self.target = self.vit.config, options, target
        self.parts: Size = (min(PARTS, config.patch_size[0]), min(PARTS, config.patch_size[1]))
        self.parts = self.parts if target == "downsampled" else (1, 1)
        if target != "pixels" and config.channels > 3:
            raise ConfigError(f"colours of {config.channels} channels are too many to predict; use --set loss=pixels")
        kinds = LEVELS**config.channels * self.parts[0] * self.parts[1]
        values = config.channels * config.patch_size[0] * config.patch_size[1]
        self.mask_token = nn.Parameter(torch.empty(config.width).normal_(std=0.02))
        self.out = nn.Linear(config.width, values if target == "pixels" else kinds)

    def predict(self, images: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Predictions for all patches, B N outputs, and which were corrupted, B N."""
        vit, patch = self.vit, self.vit.config.patch_size
        grid = grid_of(images, patch)
        corrupted, masked, shown = corruption(draws, grid[0] * grid[1], self.options.masking)

        def corrupt(patches: Tensor) -> Tensor:
            patches = patches.gather(1, shown[:, :, None].expand_as(patches))  # B N D
            return torch.where(masked[:, :, None], self.mask_token.to(patches.dtype), patches)

        seen = images if vit.stem is None else hide(images, masked.to(images.dtype), grid, patch)
        tokens = vit.encode(*vit.embedded(seen, on_patches=corrupt))
        return self.out(tokens[:, vit.config.prefix_tokens :]), corrupted

    def losses(self, images: Tensor, targets: Tensor) -> Tensor:
        return self.errors(*self.predict(images, targets), images)

    def errors(self, predicted: Tensor, corrupted: Tensor, images: Tensor) -> Tensor:
        """The mean over an image's corrupted patches, B."""
        config = self.vit.config
        if self.target == "pixels":
            errors = (predicted.float() - cut(images, config.patch_size)).square().mean(dim=-1)  # B N
        else:
            wanted = colours(images, config.preprocessing, config.patch_size, self.parts)  # B N R
            logits = predicted.float().view(*wanted.shape, -1)  # B N R K
            errors = (
                F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none").view_as(wanted).mean(dim=-1)
            )
        return (errors * corrupted).sum(dim=1) / corrupted.sum(dim=1)

    def observe(self, images: Tensor) -> dict[str, Tensor]:
        """Also the loss, with every image corrupted alike, and that of what was predicted for another image."""
        predicted, corrupted = self.predict(images, self.fixed_draws(images))
        own, swapped = (self.errors(p, corrupted, images)[:, None] for p in (predicted, predicted.roll(1, 0)))
        return {**super().observe(images), "loss": own, "swapped": swapped}

    def fixed_draws(self, images: Tensor) -> Tensor:
        grid = grid_of(images, self.vit.config.patch_size)
        made = torch.rand(3, grid[0] * grid[1], generator=torch.Generator().manual_seed(0))
        return made.to(images.device).expand(len(images), -1, -1)

    def reconstruct(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """B C H W -> the same with the corrupted patches empty, and with what is predicted for them."""
        config, patch = self.vit.config, self.vit.config.patch_size
        predicted, corrupted = self.predict(images, self.fixed_draws(images))
        grid, hidden, patches = grid_of(images, patch), corrupted[:, :, None], cut(images, patch)
        painted = predicted if self.target == "pixels" else cut(self.paint(predicted, images), patch)
        empty = patches.masked_fill(hidden, 0.0)
        return paste(empty, grid, patch), paste(torch.where(hidden, painted, patches), grid, config.patch_size)

    def paint(self, predicted: Tensor, images: Tensor) -> Tensor:
        """Logits B N (R K) -> normalised images of the likeliest colours, B C H W."""
        config, pre = self.vit.config, self.vit.config.preprocessing
        best = predicted.view(*predicted.shape[:2], self.parts[0] * self.parts[1], -1).argmax(dim=-1)  # B N R
        whole = paste(best, grid_of(images, config.patch_size), self.parts)  # B 1 hR wR
        weights = LEVELS ** torch.arange(config.channels - 1, -1, -1, device=images.device).view(-1, 1, 1)
        shades = (whole // weights % LEVELS + 0.5) / LEVELS  # B C hR wR
        mean, std = (images.new_tensor(v).view(-1, 1, 1) for v in (pre.mean, pre.std))
        return F.interpolate((shades - mean) / std, images.shape[-2:], mode="nearest")


class MaskedPatch(Method):
    name = "masked-patch"
    why = "the ViT paper's own"
    losses = ("colour", "downsampled", "pixels")
    options = MaskedPatchOptions
    augmentation = "light"

    def learner(self, model: Model) -> MaskedPatchPredictor:
        assert isinstance(self.chosen, MaskedPatchOptions)
        return MaskedPatchPredictor(model, self.chosen, self.loss_name)

    def targets(self, images: Tensor, labels: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """Numbers that decide which patches are corrupted, how, and by which other patch: B 3 N."""
        return images, noise(keys, "mask", 3 * self.patches, images).view(len(images), 3, -1)

    def about_method(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        return {"context": health.context(columns["loss"], columns["swapped"])}
