"""Masked autoencoder (He et al. 2022): most patches are hidden, and a small decoder paints them.

    image -> patches -> visible ones -> encoder -> mask tokens in the gaps -> decoder -> pixels of each patch

The encoder never sees the hidden patches, so a step costs a fraction of one on whole images. The loss is the squared
error of the hidden patches' pixels, each patch normalised by its own mean and standard deviation. The decoder is
left out of the saved model. `tests/parity/test_mae.py` holds loss and masking equal to Hugging Face's.

Shapes: B images, P prefix tokens, N patches of Q = p q C values, V of them visible, D width, d that of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from vitkit.data.keys import Keys
from vitkit.errors import ConfigError
from vitkit.model.build import Model
from vitkit.model.config import Size, ViTConfig
from vitkit.model.encoder import Block, Encoder
from vitkit.model.norms import build_norm
from vitkit.model.positions import POSITIONS, Place
from vitkit.tasks.pretraining import health
from vitkit.tasks.pretraining.method import Learner, Method, Options, noise


@dataclass(frozen=True)
class MaeOptions(Options):
    masking: float = 0.75  # share of the patches that are hidden
    decoder_depth: int = 2  # the paper's 8 for large images and long training
    decoder_width: int = 0  # 0: half of the model's
    norm_pixels: bool = True  # each patch by its own mean and standard deviation

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.masking < 1:
            raise ConfigError(
                f"task.masking={self.masking:g} leaves nothing to predict, or nothing to see; 0.75 is usual"
            )
        if self.decoder_depth < 1 or self.decoder_width < 0:
            raise ConfigError("task.decoder_depth must be at least 1 and task.decoder_width at least 0")


class Masked(NamedTuple):
    visible: Tensor  # B V: the patches that the encoder sees
    restore: Tensor  # B N: where each patch is in (visible, hidden)
    hidden: Tensor  # B N: 1 for hidden patches, 0 for visible ones


def mask(noise: Tensor, masking: float) -> Masked:
    """The patches with the least noise are visible."""
    count = noise.shape[1]
    kept = max(1, int(count * (1 - masking)))
    order = noise.argsort(dim=1)  # B N
    restore = order.argsort(dim=1)
    return Masked(order[:, :kept], restore, (restore >= kept).to(noise.dtype))


def grid_of(images: Tensor, patch: Size) -> Size:
    return images.shape[-2] // patch[0], images.shape[-1] // patch[1]


def cut(images: Tensor, patch: Size) -> Tensor:
    """B C H W -> B N Q, the values of a patch in the order (row, column, channel)."""
    return rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=patch[0], q=patch[1])


def paste(patches: Tensor, grid: Size, patch: Size) -> Tensor:
    """B N Q -> B C H W, the other way round."""
    return rearrange(patches, "b (h w) (p q c) -> b c (h p) (w q)", h=grid[0], w=grid[1], p=patch[0], q=patch[1])


def hide(images: Tensor, hidden: Tensor, grid: Size, patch: Size) -> Tensor:
    """Hidden patches become zero: a stem of convolutions would tell their neighbours what they show."""
    whole = hidden.view(-1, 1, *grid).repeat_interleave(patch[0], 2).repeat_interleave(patch[1], 3)  # B 1 H W
    return images * (1 - whole)


class Decoder(nn.Module):
    """What the encoder made of the visible patches -> a prediction for every patch, B N outputs."""

    def __init__(self, model: ViTConfig, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        heads = max(n for n in range(1, max(1, width // 32) + 1) if width % n == 0)
        config = ViTConfig(
            image_size=model.image_size,
            patch_size=model.patch_size,
            width=width,
            depth=depth,
            heads=heads,
            mlp_width=4 * width,
            classes=0,
            positions="sincos-2d",
            class_token=False,
            pooling="mean",
            norm_eps=model.norm_eps,
            activation=model.activation,
        )
        self.prefix = model.prefix_tokens
        self.embed = nn.Linear(model.width, width)
        self.mask_token = nn.Parameter(torch.empty(width).normal_(std=0.02))
        self.vectors = POSITIONS[config.positions](config).vectors
        self.encoder = Encoder(config, Block)
        self.norm = build_norm(config)
        self.out = nn.Linear(width, outputs)
        for linear in (self.embed, self.out):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, tokens: Tensor, restore: Tensor, grid: Size) -> Tensor:
        x = self.embed(tokens)  # B (P + V) d
        gaps = self.mask_token.to(x.dtype).expand(len(x), restore.shape[1] + self.prefix - x.shape[1], -1)
        patches = torch.cat([x[:, self.prefix :], gaps], dim=1)  # B N d: visible, hidden
        patches = patches.gather(1, restore[:, :, None].expand(-1, -1, x.shape[2]))  # B N d: in their places
        vectors = self.vectors(grid)
        assert vectors is not None
        x = torch.cat([x[:, : self.prefix], patches + vectors.to(x)], dim=1)  # B (P + N) d
        x = self.norm(self.encoder(x, Place(grid)))
        predicted: Tensor = self.out(x[:, self.prefix :])
        return predicted


class MaskedAutoencoder(Learner):
    def __init__(self, model: Model, options: MaeOptions) -> None:
        super().__init__(model)
        vit = self.vit
        if not model.mergeable:
            raise ConfigError(
                f"mae drops patches, and with positions={vit.config.position_words!r} a dropped patch leaves its place "
                f"empty; choose --method masked-patch, dino or lejepa"
            )
        config, self.options = vit.config, options
        width = options.decoder_width or max(32, config.width // 2 // 32 * 32)
        values = config.channels * config.patch_size[0] * config.patch_size[1]
        self.decoder = Decoder(config, width, options.decoder_depth, values)

    def predict(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Masked]:
        """B C H W and noise B N -> predicted patches B N Q, and which were hidden."""
        vit = self.vit
        patch = vit.config.patch_size
        grid = grid_of(images, patch)
        masked = mask(noise[:, : grid[0] * grid[1]], self.options.masking)  # a growing image has fewer patches yet
        seen = images if vit.stem is None else hide(images, masked.hidden, grid, patch)
        x, place = vit.embedded(seen)  # B (P + N) D
        prefix = vit.config.prefix_tokens
        visible = x[:, prefix:].gather(1, masked.visible[:, :, None].expand(-1, -1, x.shape[2]))  # B V D
        tokens = vit.encode(torch.cat([x[:, :prefix], visible], dim=1), place)
        return self.decoder(tokens, masked.restore, grid), masked

    def target(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Patches B N Q as they are to be predicted, and the mean and scale (B N 1) that they were normalised by."""
        patches = cut(images, self.vit.config.patch_size)
        if not self.options.norm_pixels:
            return patches, torch.zeros_like(patches[..., :1]), torch.ones_like(patches[..., :1])
        mean, scale = patches.mean(dim=-1, keepdim=True), (patches.var(dim=-1, keepdim=True) + 1e-6).sqrt()
        return (patches - mean) / scale, mean, scale

    def losses(self, images: Tensor, targets: Tensor) -> Tensor:
        predicted, masked = self.predict(images, targets)
        return self.errors(predicted, images, masked.hidden)

    def errors(self, predicted: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        """The mean over an image's hidden patches, B."""
        errors = (predicted.float() - self.target(images)[0]).square().mean(dim=-1)  # B N
        return (errors * hidden).sum(dim=1) / hidden.sum(dim=1)

    def observe(self, images: Tensor) -> dict[str, Tensor]:
        """Also the loss, with every image masked alike, and that of what was predicted for another image."""
        predicted, masked = self.predict(images, self.fixed_noise(images))
        own, swapped = (self.errors(p, images, masked.hidden)[:, None] for p in (predicted, predicted.roll(1, 0)))
        return {**super().observe(images), "loss": own, "swapped": swapped}

    def fixed_noise(self, images: Tensor) -> Tensor:
        grid = grid_of(images, self.vit.config.patch_size)
        made = torch.rand(grid[0] * grid[1], generator=torch.Generator().manual_seed(0))
        return made.to(images.device).expand(len(images), -1)

    def reconstruct(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """B C H W -> the same with the hidden patches empty, and with those that the decoder paints."""
        predicted, masked = self.predict(images, self.fixed_noise(images))
        patch = self.vit.config.patch_size
        grid = grid_of(images, patch)
        _, mean, scale = self.target(images)
        hidden, patches = masked.hidden[:, :, None], cut(images, patch)
        painted = patches * (1 - hidden) + (predicted * scale + mean) * hidden
        return paste(patches * (1 - hidden), grid, patch), paste(painted, grid, patch)


class Mae(Method):
    name = "mae"
    why = "whose steps are the quickest; no measurement has compared the methods yet"
    options = MaeOptions
    augmentation = "light"
    why_augmentation = ", for a crop and a mirror image are all that MAE needs"

    def learner(self, model: Model) -> MaskedAutoencoder:
        assert isinstance(self.chosen, MaeOptions)
        return MaskedAutoencoder(model, self.chosen)

    def targets(self, images: Tensor, labels: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """The noise that decides which patches are hidden."""
        return images, noise(keys, "mask", self.patches, images)

    def about_method(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        return {"context": health.context(columns["loss"], columns["swapped"])}
