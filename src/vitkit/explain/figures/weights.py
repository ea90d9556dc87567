"""Figures of the weights and of attention statistics: filters, positions, attention distance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitkit.explain.distance import AttentionReach
from vitkit.explain.figures.style import COLOURS, GREY, INK, bare, heat, mosaic, new_figure, scale_bar, tile_ticks
from vitkit.explain.filters import Filters, as_tiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_MAPS = 14  # maps across in the grid of position maps
COLUMNS = 7


def draw_filters(filters: Filters) -> Figure:
    """Tiles of the components, and below them how much each explains."""
    tiles = as_tiles(filters)
    count, rows = len(tiles), -(-len(tiles) // COLUMNS)
    tiles = tiles.repeat(max(1, 32 // tiles.shape[1]), axis=1).repeat(max(1, 32 // tiles.shape[2]), axis=2)
    figure = new_figure(0.74 * rows + 1.75)
    upper, lower = figure.subplots(2, 1, height_ratios=[0.74 * rows, 1.4])
    padded = np.full((rows * COLUMNS, *tiles.shape[1:]), np.nan)
    padded[:count] = tiles
    image = mosaic(padded.reshape(rows, COLUMNS, *tiles.shape[1:]), gap=max(1, tiles.shape[1] // 12))
    empty = np.isnan(image[..., :1])
    colours = np.nan_to_num(np.broadcast_to(image, (*image.shape[:2], 3)), nan=0.0)
    bare(upper)
    upper.imshow(np.concatenate([colours, np.where(empty, 0.0, 1.0)], axis=-1))  # gaps are transparent
    number = np.arange(1, count + 1)
    lower.bar(number, 100 * filters.explained, color=COLOURS[0], width=0.75)
    lower.set_xlabel("principal component (tiles row by row)")
    lower.set_ylabel("variance, %")
    lower.set_xlim(0.3, count + 0.7)
    return figure


def draw_similarity(similarity: np.ndarray) -> Figure:
    """A grid of grids: at the place of each patch, how similar its position is to all others."""
    h, w = similarity.shape[:2]
    rows, columns = (np.unique(np.linspace(0, n - 1, min(n, MOST_MAPS)).round().astype(int)) for n in (h, w))
    gap = max(1, min(h, w) // 8)
    image = mosaic(similarity[np.ix_(rows, columns)], gap)
    figure = new_figure(min(8.0, 5.1 * image.shape[0] / image.shape[1]) + 0.75)
    axes = figure.subplots()
    painted = heat(axes, image, float(similarity.min()), 1.0)
    tile_ticks(axes, _thin(rows), _thin(columns), (h, w), gap)
    axes.set_xlabel("column of the patch")
    axes.xaxis.set_label_position("top")
    axes.set_ylabel("row of the patch")
    scale_bar(figure, painted, axes, "cosine similarity of position embeddings")
    return figure


def _thin(numbers: np.ndarray) -> list[str]:
    return [str(n + 1) for n in numbers]


def draw_offsets(offsets: np.ndarray) -> Figure:
    """L H 2h-1 2w-1: the learned bias by offset, layers down and heads across, on one scale."""
    layers, heads, h, w = offsets.shape
    gap = max(1, h // 8)
    image = mosaic(offsets, gap)
    figure = new_figure(min(9.0, 5.1 * image.shape[0] / image.shape[1]) + 0.75)
    axes = figure.subplots()
    high = float(np.abs(offsets).max())
    painted = heat(axes, image, -high, high, "coolwarm")
    tile_ticks(axes, numbered(layers), numbered(heads), (h, w), gap)
    axes.set_ylabel("layer")
    axes.set_xlabel("head")
    axes.xaxis.set_label_position("top")
    scale_bar(figure, painted, axes, "bias added to the attention score, by offset (centre: the patch itself)")
    return figure


def numbered(count: int) -> list[str]:
    step = 1 if count <= 16 else 2
    return [str(i + 1) if i % step == 0 else "" for i in range(count)]


def draw_reach(reach: AttentionReach, notes: str) -> Figure:
    """Distance and entropy of every head by depth: dots are heads, the line their mean."""
    figure = new_figure(5.4)
    upper, lower = figure.subplots(2, 1, sharex=True)
    _by_depth(upper, reach.distance.mean(axis=0), reach.uniform_distance, "distance, pixels")
    _by_depth(lower, reach.entropy.mean(axis=0), reach.uniform_entropy, "entropy, nats")
    lower.set_xlabel("layer (depth)")
    figure.supxlabel(notes, fontsize=8, color=GREY)
    figure.legend(*upper.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _by_depth(axes: Axes, by_head: np.ndarray, uniform: float, label: str) -> None:
    """by_head: L H."""
    layers, heads = by_head.shape
    depth = np.arange(1, layers + 1)
    spread = np.linspace(-0.18, 0.18, heads) if heads > 1 else np.zeros(1)
    places = (depth[:, None] + spread).ravel()
    axes.grid(axis="y")
    axes.axhline(uniform, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(0.55, uniform, "even attention", color=GREY, fontsize=8, va="bottom")
    axes.scatter(places, by_head.ravel(), s=16, color=COLOURS[0], alpha=0.75, linewidths=0, label="one head", zorder=3)
    axes.plot(depth, by_head.mean(axis=1), color=COLOURS[1], linewidth=1.8, label="mean of the layer", zorder=4)
    axes.axhline(by_head.mean(), color=INK, linewidth=0.9, linestyle=":", label="mean of the network")
    axes.set_ylabel(label)
    axes.set_xlim(0.5, layers + 0.5)
    axes.set_ylim(0, max(uniform, float(by_head.max())) * 1.12 + 1e-9)
    axes.set_xticks(depth if layers <= 16 else depth[1::2])
