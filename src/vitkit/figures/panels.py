"""Parts of figures: tiles, rows of images, mosaics of maps, colour bars, curves. Lengths are in inches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from vitkit.figures.style import GREY, MARK, WIDTH, Axes, AxesImage, Figure, new_figure, short, wrapped

DASHED = (0, (4, 3))
GAP = 0.07  # between tiles
Side = Literal["left", "center"]


def bare(axes: Axes) -> None:
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def show(axes: Axes, image: np.ndarray, text: str = "", colour: str = GREY, side: Side = "center") -> None:
    """An image with a line below it."""
    bare(axes)
    axes.imshow(image)
    below(axes, text, colour, side)


def heatmap(axes: Axes, values: np.ndarray, low: float, high: float, colours: str = "viridis") -> AxesImage:
    """A map of values on a fixed scale, without ticks."""
    bare(axes)
    return axes.imshow(values, cmap=colours, vmin=low, vmax=high)


def below(axes: Axes, text: str, colour: str = GREY, side: Side = "center") -> None:
    axes.set_xlabel(text, fontsize=9, color=colour, labelpad=2, loc=side)


def mark(axes: Axes, patch: tuple[int, int], grid: tuple[int, int], size: tuple[int, ...]) -> None:
    """A frame around one patch of a shown image."""
    from matplotlib.patches import Rectangle

    h, w = size[0] / grid[0], size[1] / grid[1]
    corner = (patch[1] * w - 0.5, patch[0] * h - 0.5)
    axes.add_patch(Rectangle(corner, w, h, fill=False, edgecolor=MARK, linewidth=1.6))


def scale_bar(figure: Figure, painted: AxesImage, label: str, ticks: Sequence[float] | None = None) -> None:
    """A slim colour bar below tiles, in the room left at the foot (0.55 inches)."""
    height = figure.get_figheight()
    place = figure.add_axes((0.25, 0.4 / height, 0.5, 0.08 / height))
    bar = figure.colorbar(painted, cax=place, orientation="horizontal", ticks=ticks, label=label)
    bar.outline.set_visible(False)


def baseline(axes: Axes, y: float, text: str) -> None:
    """A dashed line to compare with, named at its right end."""
    axes.axhline(y, color=GREY, linewidth=1, linestyle=DASHED)
    axes.annotate(text, (1, y), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8, color=GREY)


def legend_above(figure: Figure, axes: Axes, columns: int, where: str = "upper") -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc=f"outside {where} center", ncols=columns)


def new_tiles(
    count: int, across: int, shape: tuple[int, ...], top: float = 0.04, below: float = 0.2, foot: float = 0.0
) -> tuple[Figure, np.ndarray]:
    """A figure of tiles for images of one shape, row by row, with room on top, below each of them, and at the foot."""
    down = -(-count // across)
    wide = (WIDTH - GAP * (across - 1)) / across
    tall = wide * shape[0] / shape[1]
    height = top + down * (tall + below) + (down - 1) * GAP + foot
    figure = new_figure(height)
    figure.set_layout_engine("none")
    edges = {"left": 0, "right": 1, "top": 1 - top / height, "bottom": (below + foot) / height}
    gaps = {"wspace": GAP / wide, "hspace": (below + GAP) / tall}
    axes = figure.subplots(down, across, squeeze=False, gridspec_kw=edges | gaps).ravel()
    for one in axes:
        bare(one)
    return figure, axes


def image_rows(rows: Sequence[Sequence[np.ndarray]], columns: Sequence[str], labels: Sequence[Sequence[str]]) -> Figure:
    """Rows of images (each H W 3) under named columns; `labels` has the lines below the first images of each row.

    The first of them is a name and never cut: it takes as many lines as it needs, each as wide as the row where
    nothing stands beside it.
    """
    across, alone = len(columns), all(len(texts) < 2 for texts in labels)
    names = [wrapped(texts[0], 84 if alone else round(66 / across)) if texts else "" for texts in labels]
    below = 0.06 + 0.135 * max((name.count("\n") + 1 for name in names), default=1)
    figure, axes = new_tiles(len(rows) * across, across, rows[0][0].shape, top=0.24, below=below)
    for places, row, name, texts in zip(axes.reshape(-1, across), rows, names, labels, strict=False):
        for c, (place, panel) in enumerate(zip(places, row, strict=True)):
            text = short(texts[c], round(78 / across)) if 0 < c < len(texts) else ""
            show(place, panel, text if c else name, side="left" if alone else "center")
    for place, name in zip(axes, columns, strict=False):
        place.set_title(short(name, round(80 / across)), pad=4)
    return figure


def mosaic(tiles: np.ndarray, gap: int) -> np.ndarray:
    """R C h w (or R C h w 3) -> one array, tiles side by side with gaps of nan (transparent)."""
    beside = [(0, gap) if axis in (2, 3) else (0, 0) for axis in range(tiles.ndim)]
    spaced = np.pad(tiles, beside, constant_values=np.nan)
    rows, columns, h, w = spaced.shape[:4]
    return spaced.swapaxes(1, 2).reshape(rows * h, columns * w, *tiles.shape[4:])[:-gap, :-gap]


def mosaic_figure(
    tiles: np.ndarray,
    names: tuple[str, str],
    scale: tuple[float, float],
    label: str,
    ticks: Sequence[Sequence[str]] | None = None,
    colours: str = "viridis",
    image: np.ndarray | None = None,
    patch: tuple[int, int] | None = None,
) -> Figure:
    """R C h w as maps on one scale, below their image; `names`: what is down and across, `ticks`: which or numbers."""
    rows, columns, h, w = tiles.shape
    gap = max(1, min(h, w) // 7)
    tall = min(8.0, (WIDTH - 0.5) * (rows * (h + gap)) / (columns * (w + gap)))
    figure = new_figure(tall + (0.75 if image is None else 2.4))
    if image is None:
        axes = figure.subplots()
    else:
        upper, axes = figure.subplots(2, 1, height_ratios=[1.3, tall + 0.2])
        show(upper, image)
        if patch is not None:
            mark(upper, patch, (h, w), image.shape)
    painted = heatmap(axes, mosaic(tiles, gap), *scale, colours)
    numbers = [[str(i) if n <= 16 or i % 2 == 0 else "" for i in range(n)] for n in (rows, columns)]
    for axis, side, shown in zip((axes.yaxis, axes.xaxis), (h, w), ticks or numbers, strict=True):
        axis.set_ticks(np.arange(len(shown)) * (side + gap) + (side - 1) / 2, shown)
    axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False, pad=2)
    axes.set(ylabel=names[0], xlabel=names[1])
    axes.xaxis.set_label_position("top")
    extend = "max" if scale[1] < 0.999 * tiles.max() else "neither"
    bar = figure.colorbar(painted, ax=axes, location="bottom", shrink=0.5, aspect=40, pad=0.02, extend=extend)
    bar.outline.set_visible(False)
    bar.set_label(label)
    return figure


def layers_and_heads(values: np.ndarray, image: np.ndarray, label: str, patch: tuple[int, int] | None = None) -> Figure:
    """L H h w on one scale, layers and heads down and across, below the image with the asking patch marked."""
    names = ("layer", "head") if values.shape[0] < 2 * values.shape[1] else ("head", "layer")
    tiles = values if names[0] == "layer" else values.swapaxes(0, 1)  # deep models with few heads lie down
    scale = 0.0, max(float(np.quantile(values, 0.995)), 1e-12)
    return mosaic_figure(tiles, names, scale, label, image=image, patch=patch)
