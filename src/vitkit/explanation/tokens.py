"""The states of the patches: principal components as colours (as popular with DINOv2), and which become similar.

Shapes: B images, S states (before the first block and after each chosen one), N patches, h x w grid, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.explanation.attention import patch_of
from vitkit.explanation.inside import as_vit, batches, check_patch, grid_of, states
from vitkit.explanation.subject import Section, Subject
from vitkit.explanation.weights import principal_components
from vitkit.figures.overlay import blocks
from vitkit.figures.panels import below, heatmap, image_rows, mark, new_tiles, scale_bar, show
from vitkit.figures.style import Figure
from vitkit.model.config import Size

MOST_ROWS = ACROSS = 4


@torch.no_grad()
def token_states(model: nn.Module, images: Tensor, layers: Sequence[int] | None = None) -> np.ndarray:
    """B S h w D: the patches' states after the layers asked for; 0 is before the first block, -1 after the last."""
    vit = as_vit(model)
    depth, grid = len(vit.encoder.blocks), grid_of(vit.config, images)
    for layer in layers or ():
        if not -depth - 1 <= layer <= depth:
            raise InputError(f"there is no state {layer}; 0 is before the first block and {depth} after the last")
    wanted = range(depth + 1) if layers is None else sorted({layer % (depth + 1) for layer in layers})
    found = []
    for batch in batches(vit, images):
        kept = [x[:, vit.config.prefix_tokens :].cpu() for x in states(vit, batch, wanted)]
        found.append(torch.stack(kept, dim=1).unflatten(2, grid))
    return torch.cat(found).float().numpy()


def token_colours(patches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """B h w D of one layer -> colours B h w 3 in 0..1, and the share of variance of the three components."""
    flat = patches.reshape(-1, patches.shape[-1]).astype(np.float64)
    vectors, share = principal_components(flat, 3)
    values = (flat - flat.mean(axis=0)) @ vectors.T  # B*N 3, or fewer
    low, high = np.quantile(values, (0.01, 0.99), axis=0)
    missing = 3 - len(share)
    colours = np.pad(((values - low) / np.maximum(high - low, 1e-12)).clip(0, 1), ((0, 0), (0, missing)))
    return colours.reshape(*patches.shape[:-1], 3), np.pad(share, (0, missing))


def state_name(depth: int) -> str:
    return "input" if depth == 0 else f"layer {depth - 1}"


def make(subject: Subject) -> Section:
    subject.need_images()
    depth = subject.vit.config.depth
    chosen = sorted({round(d) for d in np.linspace(0, depth, 5)})
    found = token_states(subject.vit, subject.images.images, chosen)  # B S h w D
    parts = [token_colours(found[:, s]) for s in range(len(chosen))]
    colours, shares = (np.stack(part) for part in zip(*parts, strict=True))  # S B h w 3, S 3
    images = subject.images.shown()[:MOST_ROWS]
    rows = [[image, *(blocks(c[i], image.shape[:2]) for c in colours)] for i, image in enumerate(images)]
    columns = ["image", *map(state_name, chosen)]
    return Section(
        heading="Patch states as colours",
        finding=f"Three components hold {shares[-1].sum():.0%} of the variance of the last layer's patch states",
        alt=f"{len(rows)} images, each with maps of its patch states at {len(chosen)} depths; similar states have "
        "similar colours.",
        how="The first three principal components of the patch states as red, green and blue, computed over all "
        "images of a layer together: within a column the same colour means the same kind of content.",
        arrays={"colours": colours, "variance": shares, "states": np.array(chosen)},
        draw=lambda: image_rows(rows, columns, [[name] for name in subject.images.names]),
    )


def token_similarity(states: np.ndarray, patch: Size) -> np.ndarray:
    """... h w D -> ... h w: cosine similarity of every patch to the one at (row, column)."""
    check_patch(patch, states.shape[-3:-1])
    unit = F.normalize(torch.from_numpy(states), dim=-1)
    return (unit * unit[..., patch[0], patch[1], :][..., None, None, :]).sum(dim=-1).numpy()


def make_similarity(subject: Subject) -> Section:
    subject.need_images()
    patch = patch_of(subject)
    values = token_similarity(token_states(subject.vit, subject.images.images[:1])[0], patch)  # S h w
    mean = (values.sum(axis=(1, 2)) - 1) / max(1, values[0].size - 1)  # without the patch itself, whose similarity is 1
    few = sorted({round(d) for d in np.linspace(0, len(values) - 1, 2 * ACROSS - 1)})  # with the image, two rows

    def draw() -> Figure:
        image, grid, low = subject.images.shown([0])[0], values.shape[1:], float(values[few].min())
        figure, (first, *others) = new_tiles(len(few) + 1, ACROSS, image.shape, foot=0.7)
        show(first, image, "image")
        mark(first, patch, grid, image.shape)
        for axes, depth in zip(others, few, strict=False):
            painted = heatmap(axes, values[depth], low, 1.0)
            axes.set_aspect("auto")
            mark(axes, patch, grid, grid)
            below(axes, state_name(depth))
        scale_bar(figure, painted, "cosine similarity to the marked patch")
        return figure

    return Section(
        heading="Which patches become similar",
        finding=f"The other patches' mean similarity to the marked one goes from {mean[0]:.2f} at the input "
        f"to {mean[-1]:.2f} after the last layer",
        alt=f"The first image with one patch marked and {len(few)} maps of how similar all patches are to it.",
        how="Cosine similarity of the patch states to that of the marked patch, after each layer. One scale for all.",
        arrays={"similarity": values, "patch": np.array(patch)},
        draw=draw,
    )
