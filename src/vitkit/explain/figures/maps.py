"""Figures about single pictures: attention, relevance, one patch's view, token states, occlusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitkit.explain.figures.overlay import blocks, coloured, enlarged, lit
from vitkit.explain.figures.style import (
    GREY,
    MARK,
    WIDTH,
    heat,
    mosaic,
    new_figure,
    new_tiles,
    scale_bar,
    scale_bar_at_foot,
    short,
    show,
    tile_ticks,
)
from vitkit.explain.figures.weights import numbered
from vitkit.model.config import Size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = np.ndarray  # H W 3: a picture ready to be shown

LEAST_DROP = 0.01  # of a probability


def panels(rows: Sequence[Sequence[Panel]], columns: Sequence[str], labels: Sequence[Sequence[str]]) -> Figure:
    """Rows of pictures under named columns; `labels` holds a line to put below each picture ("" for none)."""
    across, (h, w) = len(rows[0]), rows[0][0].shape[:2]
    labelled = any(any(row) for row in labels)
    figure, grid = new_tiles(len(rows), across, h / w, below=0.19 if labelled else 0.0)
    for r, row in enumerate(rows):
        for c, panel in enumerate(row):
            show(grid[r, c], panel)
            below(grid[r, c], short(labels[r][c], round(78 / across)))
    for c, name in enumerate(columns):
        grid[0, c].set_title(name, pad=4)
    return figure


def below(axes: Axes, text: str) -> None:
    axes.set_xlabel(text, fontsize=9, color=GREY, labelpad=2)


def draw_attention(pictures: np.ndarray, last: np.ndarray, rollout: np.ndarray, names: Sequence[str]) -> Figure:
    """Per picture: itself, the last layer's attention, the rollout, and the picture lit by it as in the paper."""
    rows, labels = [], []
    for picture, raw, rolled, name in zip(pictures, last, rollout, names, strict=True):
        shown = enlarged(picture)
        rows.append(
            [shown, coloured(picture, raw, raw.max()), coloured(picture, rolled, rolled.max()), lit(picture, rolled)]
        )
        labels.append([name, "", "", ""])
    return panels(rows, ["picture", "last layer", "rollout", "lit by rollout"], labels)


def draw_layers(
    values: np.ndarray, picture: np.ndarray, label: str, patch: Size | None = None, high: float | None = None
) -> Figure:
    """L H h w on one scale, layers and heads down and across, below the picture with the asking patch marked."""
    h, w = values.shape[2:]
    down, across = ("layer", "head") if values.shape[0] < 2 * values.shape[1] else ("head", "layer")
    tiles = values if down == "layer" else values.transpose(1, 0, 2, 3)  # deep models with few heads lie down
    gap = max(1, min(h, w) // 7)
    image = mosaic(tiles, gap)
    ratio = image.shape[0] / image.shape[1]
    wide = min(WIDTH - 0.5, 7.0 / ratio)
    figure = new_figure(wide * ratio + 0.9 + 1.5)
    upper, lower = figure.subplots(2, 1, height_ratios=[1.3, wide * ratio + 0.2])
    show(upper, enlarged(picture))
    if patch is not None:
        mark(upper, patch, (h, w), enlarged(picture).shape[:2])
    high = float(np.quantile(values, 0.995)) if high is None else high
    painted = heat(lower, image, 0.0, max(high, 1e-12), "viridis")
    tile_ticks(lower, numbered(tiles.shape[0]), numbered(tiles.shape[1]), (h, w), gap)
    lower.set_ylabel(down)
    lower.set_xlabel(across)
    lower.xaxis.set_label_position("top")
    scale_bar(figure, painted, lower, label, extend="max")
    return figure


def mark(axes: Axes, patch: Size, grid: Size, size: tuple[int, ...]) -> None:
    """A frame around one patch of a shown picture."""
    from matplotlib.patches import Rectangle

    h, w = size[0] / grid[0], size[1] / grid[1]
    corner = (patch[1] * w - 0.5, patch[0] * h - 0.5)
    axes.add_patch(Rectangle(corner, w, h, fill=False, edgecolor=MARK, linewidth=1.6))


def above_least(values: np.ndarray) -> np.ndarray:
    """What is above the smallest value; values that hardly differ stay as they are."""
    low, high = float(values.min()), float(values.max())
    return values - low if high - low > 1e-3 * high else values


def draw_relevance(
    pictures: np.ndarray,
    relevance: np.ndarray,
    gradcam: np.ndarray,
    columns: Sequence[str],
    labels: Sequence[Sequence[str]],
) -> Figure:
    """Per picture: itself, relevance for each class, and Grad-CAM for the first class, each on a scale of its own.

    Scales begin at the smallest value: where patches are averaged, each has its share before anything is learned.
    """
    rows = []
    for picture, maps, cam in zip(pictures, relevance, gradcam, strict=True):
        drawn = [coloured(picture, values, float(values.max())) for values in map(above_least, [*maps, cam])]
        rows.append([enlarged(picture), *drawn])
    names = [short(name, round(80 / len(rows[0]))) for name in columns[: relevance.shape[1]]]
    return panels(rows, ["picture", *names, "Grad-CAM"], labels)


def draw_tokens(pictures: np.ndarray, colours: np.ndarray, layers: Sequence[str], names: Sequence[str]) -> Figure:
    """Per picture: itself, and the patch states of some layers as colours (S B h w 3)."""
    rows = []
    for i, picture in enumerate(pictures):
        shown = enlarged(picture)
        rows.append([shown, *(blocks(c[i], shown.shape[:2]) for c in colours)])
    return panels(rows, ["picture", *layers], [[name, *[""] * len(layers)] for name in names])


def draw_similar(picture: np.ndarray, values: np.ndarray, layers: Sequence[str], patch: Size) -> Figure:
    """S h w: similarity of the states of all patches to one, by layer, on one scale."""
    across = 4
    h, w = values.shape[1:]
    shown = enlarged(picture)
    down = -(-(len(values) + 1) // across)
    figure, grid = new_tiles(down, across, shown.shape[0] / shown.shape[1], top=0.04, below=0.2, foot=0.7)
    places = list(grid.ravel())
    show(places[0], shown)
    mark(places[0], patch, (h, w), shown.shape[:2])
    below(places[0], "picture")
    for axes, name, value in zip(places[1:], layers, values, strict=False):
        painted = heat(axes, value, float(values.min()), 1.0)
        axes.set_aspect("auto")
        mark(axes, patch, (h, w), (h, w))
        below(axes, name)
    scale_bar_at_foot(figure, painted, "cosine similarity to the marked patch")
    return figure


def draw_occlusion(pictures: np.ndarray, drop: np.ndarray, labels: Sequence[tuple[str, str]]) -> Figure:
    """Pairs of a picture and the drop in probability per hidden patch, each on the scale of its own largest change.

    Changes that are all smaller than a percent stay pale.
    """
    pairs = 2 if len(pictures) > 1 else 1
    shown = [enlarged(p) for p in pictures]
    h, w = shown[0].shape[:2]
    figure, grid = new_tiles(-(-len(shown) // pairs), 2 * pairs, h / w, top=0.04, below=0.2, foot=0.75)
    for i, axes in enumerate(grid.reshape(-1, 2)):
        if i < len(shown):
            show(axes[0], shown[i])
            below(axes[0], short(labels[i][0], 19 * 2 // pairs))
            painted = heat(axes[1], drop[i] / max(float(np.abs(drop[i]).max()), LEAST_DROP), -1, 1, "coolwarm")
            axes[1].set_aspect("auto")
            below(axes[1], labels[i][1])
    scale_bar_at_foot(
        figure, painted, "probability falls (red) or rises (blue), to the largest change of a map", ticks=[-1, 0, 1]
    )
    return figure


def draw_worst(pictures: np.ndarray, labels: Sequence[str]) -> Figure:
    """Pictures, four across, each with two lines below."""
    across = 4
    shown = [enlarged(p) for p in pictures]
    h, w = shown[0].shape[:2]
    figure, grid = new_tiles(-(-len(shown) // across), across, h / w, top=0.04, below=0.4)
    for axes, picture, label in zip(grid.ravel(), shown, labels, strict=False):
        show(axes, picture)
        axes.set_xlabel(label, fontsize=9, labelpad=2)
    return figure
