"""What the weights alone show: the patterns that the first layer looks for, and what is known about places.

Filters (figure 7, left, of the paper) are the rows of one linear map; their first principal components are a basis of
the patterns it can tell apart. In a trained model they look like the basis of a Fourier or cosine transform.

Positions (figure 7, centre): added ones (learned, 2-D, sin-cos) and the phases of rotary ones are vectors, one per
patch: their cosine similarities show rows, columns and distance. Relative positions have no vector; there the learned
bias by offset is drawn.

Shapes: D width, C channels, P x Q pixels of a patch, K components, N patches on a grid (h, w), L layers, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from vitkit.errors import InputError
from vitkit.explanation.inside import as_vit
from vitkit.explanation.subject import LeftOut, Section, Subject
from vitkit.figures.panels import mosaic, mosaic_figure, show
from vitkit.figures.style import COLOURS, Figure, new_figure
from vitkit.model.patches import linear_to_conv
from vitkit.model.relative import ScoreBias

ACROSS = 7  # tiles of filters
MOST_MAPS = 14  # across in the grid of maps of positions


@dataclass(frozen=True)
class Filters:
    components: np.ndarray  # K P Q C, each of length 1
    explained: np.ndarray  # K: share of the filters' variance
    of_pixels: bool  # False for a hybrid: the patches are those of a feature map, not of the image


def patch_filters(model: nn.Module, count: int = 28) -> Filters:
    """The first principal components of the patch embedding and the share of the variance each explains."""
    vit = as_vit(model)
    weight = vit.patches.weight.detach().double().cpu()
    if vit.patches.form == "linear":
        weight = linear_to_conv(weight, vit.patches.patch)
    d, c, p, q = weight.shape
    vectors, explained = principal_components(weight.permute(0, 2, 3, 1).reshape(d, -1).numpy(), count)
    return Filters(vectors.reshape(-1, p, q, c), explained, of_pixels=vit.stem is None)


def principal_components(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors (K, features) and shares of variance (K,), largest first. Signs: the largest entry is positive."""
    centred, count = rows - rows.mean(axis=0), min(count, *rows.shape)
    variance, columns = np.linalg.eigh(centred.T @ centred)  # smallest first
    vectors, share = columns.T[::-1][:count], variance[::-1][:count] / max(variance.sum(), np.finfo(float).tiny)
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=1)[:, None], axis=1)
    return vectors * np.where(largest < 0, -1.0, 1.0), share


def as_tiles(filters: Filters) -> np.ndarray:
    """K P Q 3 (or 1) in 0..1: each component stretched around mid-grey, so that its sign can be seen."""
    tiles = filters.components
    if tiles.shape[-1] not in (1, 3):  # other numbers of channels cannot be shown as colours
        tiles = tiles.mean(axis=-1, keepdims=True)
    scale = np.abs(tiles).max(axis=(1, 2, 3), keepdims=True)
    return 0.5 + 0.5 * tiles / np.maximum(scale, np.finfo(float).tiny)


def make_filters(subject: Subject) -> Section:
    found = patch_filters(subject.vit)
    count, total = len(found.explained), found.explained.sum()
    half = int(np.searchsorted(np.cumsum(found.explained), 0.5)) + 1
    finding = f"The first {count} components hold {total:.0%} of the patch embedding's variance"
    where = "the image's patches" if found.of_pixels else "patches of the stem's feature map (channels averaged)"
    patch = "x".join(map(str, found.components.shape[1:3]))
    expect = "Long training makes them smooth waves and colour contrasts; after a short one they are still grainy."
    if not subject.vit.pretrained:
        expect = "These weights are fresh: what is seen is noise, where trained models show smooth waves."
    return Section(
        heading="Patch-embedding filters",
        finding=finding + (f"; half of it is in {half}" if total >= 0.5 else ""),
        alt=f"{count} tiles of {patch} values, the principal components of the patch embedding, largest first, "
        f"over bars of explained variance from {found.explained[0]:.1%} down to {found.explained[-1]:.1%}.",
        how=f"Each tile is a pattern that the first layer can tell apart in {where}; mid-grey is zero. {expect}",
        arrays={"components": found.components, "explained": found.explained},
        draw=lambda: draw_filters(found),
    )


def draw_filters(filters: Filters) -> Figure:
    """Tiles of the components, and below them how much each explains."""
    tiles = as_tiles(filters)
    count, rows = len(tiles), -(-len(tiles) // ACROSS)
    tiles = tiles.repeat(max(1, 32 // tiles.shape[1]), axis=1).repeat(max(1, 32 // tiles.shape[2]), axis=2)
    padded = np.pad(tiles, ((0, rows * ACROSS - count), (0, 0), (0, 0), (0, 0)), constant_values=np.nan)
    image = mosaic(padded.reshape(rows, ACROSS, *tiles.shape[1:]), gap=max(1, tiles.shape[1] // 12))
    opaque = ~np.isnan(image[..., :1])  # gaps are transparent
    figure = new_figure(0.74 * rows + 1.75)
    upper, lower = figure.subplots(2, 1, height_ratios=[0.74 * rows, 1.4])
    show(upper, np.concatenate([np.broadcast_to(np.nan_to_num(image), (*image.shape[:2], 3)), opaque], axis=-1))
    lower.bar(np.arange(1, count + 1), 100 * filters.explained, color=COLOURS[0], width=0.75)
    lower.set(xlabel="principal component (tiles row by row)", ylabel="variance, %", xlim=(0.3, count + 0.7))
    return figure


@torch.no_grad()
def position_similarity(model: nn.Module) -> np.ndarray:
    """h w h w: [i, j] is the map of cosine similarities of position (i, j) with all others."""
    vit = as_vit(model)
    vectors = vit.positions.vectors(vit.config.grid)  # N D
    if vectors is None and vit.rotary is not None:
        vectors = vit.rotary.vectors(vit.config.grid)
    if vectors is None:
        offsets = "; use position_offsets" if score_biases(vit) else ""
        raise InputError(f"a model with positions={vit.config.positions!r} has no vector per position{offsets}")
    unit = F.normalize(vectors.double().cpu(), dim=-1)
    return (unit @ unit.mT).numpy().reshape(*vit.config.grid, *vit.config.grid)


@torch.no_grad()
def position_offsets(model: nn.Module) -> np.ndarray:
    """L H 2h-1 2w-1: the bias for every (row, column) offset, of a model with relative positions; shared: L = 1."""
    vit = as_vit(model)
    biases = score_biases(vit)
    if not biases:
        raise InputError(f"a model with positions={vit.config.positions!r} has no bias by offset; see the similarity")
    tables = [bias.offsets(vit.config.grid).permute(2, 0, 1) for bias in biases]
    return torch.stack(tables).double().cpu().numpy()


def score_biases(model: nn.Module) -> list[ScoreBias]:
    """What adds to the attention scores by offset, in order of depth; none where positions are not relative."""
    return [part for part in model.modules() if isinstance(part, ScoreBias)]


def row_column_score(similarity: np.ndarray) -> dict[str, float]:
    """How much more alike (mean cosine) positions of one row, or of one column, are than those that share neither."""
    h, w = similarity.shape[:2]
    i, j, k, m = np.ogrid[:h, :w, :h, :w]
    same_row, same_column = np.broadcast_arrays(i == k, j == m)
    elsewhere = similarity[~same_row & ~same_column]
    if not elsewhere.size:  # a grid of a single row or column
        return {"row": 0.0, "column": 0.0}
    base = float(elsewhere.mean())
    pairs = {"row": same_row & ~same_column, "column": same_column & ~same_row}
    return {name: float(similarity[pair].mean()) - base for name, pair in pairs.items()}


def make_positions(subject: Subject) -> Section:
    vit, grid = as_vit(subject.vit), subject.vit.config.grid
    kind = vit.config.position_words
    if score_biases(vit):
        return _offsets(subject)
    if kind == "none":
        raise LeftOut("the model has no positions (positions='none')")
    rotary = vit.rotary is not None and vit.positions.vectors(grid) is None  # then only phases tell patches apart
    similarity = position_similarity(subject.vit)
    score = row_column_score(similarity)
    finding = "Positions of one row or column are no more similar than others"
    if max(score.values()) > 0.05:
        finding = "Positions of one row are {row:+.2f} and of one column {column:+.2f} more similar than others"
    few = [np.unique(np.linspace(0, n - 1, min(n, MOST_MAPS)).round().astype(int)) for n in grid]
    ticks = [[str(place) for place in places] for places in few]
    maps = similarity[np.ix_(*few)]  # a grid of grids: at the place of each patch, its similarity to all others
    names, label = ("row of the patch", "column of the patch"), "cosine similarity of position embeddings"
    phases = " (for rotary positions: of the phases)" if rotary else ""
    return Section(
        heading="Position similarity",
        finding=finding.format(**score),
        alt=f"A grid of {grid[0]} by {grid[1]} small maps; each shows the cosine similarity of one patch's position "
        f"to all positions, from {similarity.min():.2f} to 1.",
        how=f"Positions are '{kind}'. The small map at row i, column j shows the cosine similarity{phases} of that "
        f"position with all others. The score compares mean similarities: same row (or column) minus elsewhere.",
        arrays={"similarity": similarity, **{f"{name}_score": np.array(value) for name, value in score.items()}},
        draw=lambda: mosaic_figure(maps, names, (float(similarity.min()), 1.0), label, ticks),
    )


def _offsets(subject: Subject) -> Section:
    offsets = position_offsets(subject.vit)
    high = float(np.abs(offsets).max())
    layer, head, _, _ = np.unravel_index(int(np.abs(offsets).argmax()), offsets.shape)
    label = "bias added to the attention score, by offset (centre: the patch itself)"
    return Section(
        heading="Relative positions",
        finding=f"The learned bias by offset reaches {high:.2f}, in head {head} of layer {layer}",
        alt=f"{offsets.shape[0]} rows (layers) by {offsets.shape[1]} columns (heads) of maps of the bias by offset.",
        how="What each head adds to its attention scores for a patch so many rows and columns away. The centre of "
        "each map is the patch itself. One scale for all.",
        arrays={"offsets": offsets},
        draw=lambda: mosaic_figure(offsets, ("layer", "head"), (-high, high), label, colours="coolwarm"),
    )
