"""Attention from the output token, or a chosen patch, back to the image: raw, and rolled out over all layers.

Rollout (Abnar & Zuidema 2020; the maps of figure 6 of the paper): heads are averaged, the residual path is
added as 0.5 A + 0.5 I, rows are renormalised, and the layers are multiplied. What "output token" means for
each kind of pooling is in `vitkit.explanation.inside`.

Shapes: B images, L layers, H heads, T tokens, h x w grid of patches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.explanation.inside import as_vit, batches, by_layer, check_patch, grid_of, half_mass, readouts, to_grid
from vitkit.explanation.relevance import relevance_of
from vitkit.explanation.subject import LeftOut, Section, Subject
from vitkit.figures.overlay import TOP, levels, lit, overlay
from vitkit.figures.panels import image_rows, layers_and_heads
from vitkit.model.config import Size

OUTPUT = {
    "cls": "the class token",
    "mean": "all patches alike (the model pools by their mean)",
    "mean-all": "all tokens alike (the model pools by their mean)",
    "mean-prefix": "the class tokens alike (the model pools by their mean)",
    "cls+mean": "the class token and the mean of the patches",
    "map": "the probe of the MAP head",
}
ONE_SCALE = "One scale for all; it ends at the 99.5th percentile."
NEAR = 3  # patches along the side of what counts as the surroundings of one


@dataclass(frozen=True)
class OutputAttention:
    raw: np.ndarray  # B L H h w: attention of the output token, by layer and head
    rollout: np.ndarray  # B h w
    probe: np.ndarray | None  # B H h w: where a MAP head looks, None for other pooling

    @property
    def last(self) -> np.ndarray:
        """B h w: of the last layer, or of the MAP head after it; mean over heads."""
        return self.raw[:, -1].mean(axis=1) if self.probe is None else self.probe.mean(axis=1)


def with_residual(weights: Tensor) -> Tensor:
    """B H T T -> B T T: mean of the heads, half attention and half identity, rows sum to 1."""
    mean = weights.mean(dim=1)
    mixed = 0.5 * mean + 0.5 * torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    return mixed / mixed.sum(dim=-1, keepdim=True)


def rollout(steps: Iterable[Tensor]) -> Iterator[Tensor]:
    """`with_residual` of each layer -> B T T up to each: how much of each input token is in each token after it."""
    return accumulate(steps, lambda total, step: step @ total)


@torch.no_grad()
def rollouts(
    model: nn.Module, images: Tensor, layers: Collection[int], query: Size | Literal["output", "all"] = "output"
) -> np.ndarray:
    """B L h w: what has reached the output token, or the patch (row, column), from each patch up to each of the layers.

    With query "all", of every patch: B L h w h w.
    """
    vit = as_vit(model)
    prefix, grid = vit.config.prefix_tokens, grid_of(vit.config, images)
    if query == "output":
        read = readouts(vit, images).mean(dim=1, keepdim=True)  # B 1 T
    else:
        tokens = torch.eye(prefix + grid[0] * grid[1], device=images.device)[prefix:]  # N T
        read = tokens[None] if query == "all" else tokens[None, [check_patch(query, grid)]]
    totals = rollout(by_layer(vit, images, with_residual))  # each B T T
    kept = [read.to(total) @ total for depth, total in enumerate(totals) if depth in layers]  # each B N T
    values = to_grid(torch.stack(kept, dim=1), prefix, grid).float().cpu()  # B L N h w
    return (values.unflatten(2, grid) if query == "all" else values[:, :, 0]).numpy()


@torch.no_grad()
def output_attention(model: nn.Module, images: Tensor) -> OutputAttention:
    """Raw attention of the output token in every layer and head, and its rollout, batch by batch."""
    vit = as_vit(model)
    raw, rolled, reads = [], [], []
    for batch in batches(vit, images):
        reads.append(readouts(vit, batch))
        share = reads[-1].mean(dim=1)  # B T

        def look(weights: Tensor, share: Tensor = share) -> tuple[Tensor, Tensor]:
            return torch.einsum("bq,bhqk->bhk", share.to(weights), weights), with_residual(weights)

        seen, steps = zip(*by_layer(vit, batch, look), strict=True)
        raw.append(torch.stack(seen, dim=1))
        # from the last layer to the first only the row of the output is needed
        rolled.append(reduce(torch.matmul, reversed(steps), share[:, None])[:, 0])
    prefix, grid = vit.config.prefix_tokens, grid_of(vit.config, images)
    raws, rows, probes = (to_grid(torch.cat(parts).cpu(), prefix, grid).numpy() for parts in (raw, rolled, reads))
    return OutputAttention(raws, rows, probes if vit.head.pool.attends else None)


def attention_of(subject: Subject) -> OutputAttention:
    subject.need_images()
    return output_attention(subject.vit, subject.images.images)


def make(subject: Subject) -> Section:
    """Per image: itself, the last layer's attention, the rollout, and the image lit by it as in the paper."""
    found, names = subject.once(attention_of), subject.images.names
    share = np.mean([half_mass(m) for m in found.rollout])
    rows = [
        [image, overlay(image, last), overlay(image, rolled), lit(image, rolled)]
        for image, last, rolled in zip(subject.images.shown(), found.last, found.rollout, strict=True)
    ]
    return Section(
        heading="Attention from the output token",
        finding=f"Half of the rolled-out attention falls on {share:.0%} of the image",
        alt=f"{len(rows)} images, each with the last layer's attention, the rollout over all layers, and the "
        f"image lit where the rollout is high.",
        how=f"Seen from {OUTPUT[subject.vit.config.pooling]}. Last layer: its mean over heads. Rollout: heads "
        f"averaged, half attention and half residual path, rows renormalised, layers multiplied. Each map is scaled "
        f"from its smallest value to its {100 * TOP:.0f}th percentile: what is above has the brightest colour.",
        arrays={k: v for k, v in vars(found).items() if v is not None} | {"names": np.array(names)},
        draw=lambda: image_rows(rows, ["image", "last layer", "rollout", "lit by rollout"], [[n] for n in names]),
    )


def make_heads(subject: Subject) -> Section:
    """The same in every layer and head, of the first image."""
    raw = subject.once(attention_of).raw[0]  # L H h w
    layer, head = np.unravel_index(int(raw.max(axis=(2, 3)).argmax()), raw.shape[:2])
    return Section(
        heading="Every layer and head",
        finding=f"The most focused is head {head} of layer {layer}: "
        f"{raw[layer, head].max():.0%} of its attention is on one patch",
        alt=f"Maps of the first image's attention from the output token, {len(raw)} layers and {len(raw[0])} heads.",
        how=f"The attention of {OUTPUT[subject.vit.config.pooling]} to the patches of the first image "
        f"({subject.images.names[0]}), as it is in each layer and head, both counted from 0. {ONE_SCALE}",
        arrays={"raw": raw},
        draw=lambda: layers_and_heads(raw, subject.images.shown([0])[0], "attention"),
    )


def query_attention(model: nn.Module, images: Tensor, patch: Size, layers: Sequence[int] | None = None) -> np.ndarray:
    """B L H h w: the attention of the patch at (row, column) to all patches, for the layers asked for."""
    vit = as_vit(model)
    grid, prefix = grid_of(vit.config, images), vit.config.prefix_tokens
    row = prefix + check_patch(patch, grid)
    found = [by_layer(vit, batch, lambda weights: weights[:, :, row].clone(), layers) for batch in batches(vit, images)]
    return to_grid(torch.cat([torch.stack(rows, dim=1) for rows in found]), prefix, grid).cpu().numpy()


def patch_of(subject: Subject) -> Size:
    """The patch that is asked: the one given, else the most salient one of the first image."""
    if subject.query is not None:
        return subject.query
    try:
        weights = subject.once(relevance_of).relevance[0, 0]
    except LeftOut:  # no classifier: where the output looks
        weights = subject.once(attention_of).rollout[0]
    return salient(weights, subject.images.pixels[0])


def salient(weights: np.ndarray, pixels: Tensor) -> Size:
    """h w, C H W -> (row, column) of the patch where the model looks and where there is something to see.

    By the weights alone it is often an outlier on plain background, where large models keep what is not about the
    patch. So the weights are averaged over 3 x 3 patches, and multiplied by the contrast of the patch's own pixels and
    by how near it is to the centre, where photographers put what a photograph is of.
    """
    h, w = weights.shape
    level = torch.from_numpy(levels(weights)).double()[None]
    around = F.avg_pool2d(level, NEAR, 1, NEAR // 2, count_include_pad=False)[0].numpy()
    grey = pixels.double().mean(dim=0)  # H W
    parts = grey[: grey.shape[0] // h * h, : grey.shape[1] // w * w].unflatten(0, (h, -1)).unflatten(2, (w, -1))
    contrast = levels(parts.std(dim=(1, 3), correction=0).numpy())
    y, x = (np.linspace(-1, 1, 2 * n + 1)[1::2] for n in (h, w))  # centres of the patches, the edges being -1 and 1
    central = np.exp(-2 * (y[:, None] ** 2 + x**2))
    score = (0.05 + around) * (0.05 + contrast) * central  # what is zero everywhere leaves the choice to the others
    row, column = np.unravel_index(int(score.argmax()), score.shape)
    return int(row), int(column)


def make_query(subject: Subject) -> Section:
    subject.need_images()
    patch = patch_of(subject)
    values = query_attention(subject.vit, subject.images.images[:1], patch)[0]  # L H h w
    itself = values[:, :, patch[0], patch[1]]
    layer, head = np.unravel_index(int(itself.argmax()), itself.shape)
    chosen = (
        ""
        if subject.query
        else ", taken because it counts with its neighbours, has contrast and is not far from the centre"
    )
    return Section(
        heading="What one patch attends to",
        finding=f"The marked patch gives itself {itself.mean():.1%} of its attention on average, "
        f"most in head {head} of layer {layer} ({itself.max():.0%})",
        alt=f"The first image with the patch {patch[0]},{patch[1]} (row, column from 0) marked, and its attention to "
        f"all patches, {values.shape[0]} layers and {values.shape[1]} heads.",
        how=f"The query is the patch {patch[0]},{patch[1]} (row, column from 0) of {subject.images.names[0]}{chosen}; "
        f"choose another with --query ROW,COLUMN. {ONE_SCALE}",
        arrays={"attention": values, "patch": np.array(patch)},
        draw=lambda: layers_and_heads(values, subject.images.shown([0])[0], "attention of the marked patch", patch),
    )
