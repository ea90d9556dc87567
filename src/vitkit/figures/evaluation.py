"""The figures of an evaluation, each with the sentence that says what it shows.

Shapes: C classes (rows of a confusion matrix are true classes), K bins of confidence, N samples, T values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vitkit.figures.panels import DASHED, bare
from vitkit.figures.style import COLOURS, GREY, INK, LINE, WIDTH, Axes, AxesImage, Figure, new_figure, short
from vitkit.tasks.metrics import Bins

PALE = "#dbe6f2"
LIGHT_BLUE = "#9cc6e8"
NUMBERED = 20  # up to so many classes every cell holds its number
SMALLEST = 6.5  # points; where names would be smaller, every second or third is left out
PAIRS = 8  # confusions listed by name below a large matrix
FEW = 10  # a bar of fewer predictions says little, and is drawn pale
SHOWN = 4  # values with panels of their own
MANY = 2_000  # points; more are drawn paler


def _percent(value: float, _: object) -> str:
    return f"{100 * value:.3g}%"


def draw_confusion(matrix: np.ndarray, names: Sequence[str]) -> Figure:
    """Only mistakes are coloured, as shares of their row, so that the many hits do not drown them."""
    count, large = len(matrix), len(matrix) > NUMBERED
    side = min(9.0, max(WIDTH, 4.5 + 0.05 * count)) if large else WIDTH
    heights = [0.86 * side, 2.3] if large else [0.86 * side]  # the colour bar is beside the square
    figure = new_figure(sum(heights), side)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    shown = _draw_cells(axes[0], matrix, names, 72 * (side - 1.6) / count)
    bar = figure.colorbar(shown, ax=axes[0], shrink=0.5, aspect=28, pad=0.02, label="share of the true class")
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(_percent)
    if large:  # the most confused classes by name, for they cannot be read off
        pairs = confused(matrix, names)
        bare(axes[1])
        axes[1].set_title("most confused classes", loc="left", color=GREY)
        axes[1].set(xlim=(0, pairs[0][0] if pairs else 1), ylim=(PAIRS - 0.4, -0.6))
        for row, (n, true, predicted) in enumerate(pairs):
            words = f" {n}: {short(true, 30)} predicted as {short(predicted, 30)}"
            axes[1].barh(row, n, height=0.7, color=shown.cmap(0.45), alpha=0.5)  # of the palette of the cells
            axes[1].text(0, row, words, va="center", fontsize=9)
    return figure


def _draw_cells(axes: Axes, matrix: np.ndarray, names: Sequence[str], cell: float) -> AxesImage:
    """`cell` is the height of a row in points."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    diagonal = np.eye(len(matrix), dtype=bool)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    mistakes = np.where(diagonal, 0, shares)
    most = max(0.05, float(mistakes.max()))  # a rare mistake shall not look grave
    light_to_dark = LinearSegmentedColormap.from_list("mistakes", colormaps["magma_r"](np.linspace(0.06, 0.7, 256)))
    axes.imshow(np.where(diagonal, 1.0, np.nan), cmap=ListedColormap([PALE]), vmin=0, vmax=1)
    shown = axes.imshow(np.where(mistakes, mistakes, np.nan), cmap=light_to_dark, vmin=0, vmax=most)
    size = 9 if len(matrix) <= 12 else 7
    for r, c in np.argwhere(matrix) if len(matrix) <= NUMBERED else ():
        # black or white, for cells keep their colour on a dark page
        colour = "white" if r != c and shares[r, c] >= 0.55 * most else "black"
        axes.text(c, r, f"{matrix[r, c]}", ha="center", va="center", fontsize=size, color=colour)
    axes.spines[:].set(visible=True, color=LINE)
    step = max(1, int(np.ceil(SMALLEST / (0.8 * cell))))
    labels = [short(name, 14 if len(names) > 4 else 24, middle=True) for name in names]
    flat = len(names) <= NUMBERED and max(map(len, labels)) <= 4
    for axis, turn in ((axes.yaxis, 0), (axes.xaxis, 0 if flat else 90)):
        axis.set_ticks(range(0, len(names), step), labels[::step], fontsize=min(9.0, 0.8 * cell * step), rotation=turn)
    axes.tick_params(length=0, pad=3)
    axes.set(xlabel="predicted class", ylabel="true class")
    return shown


def confused(matrix: np.ndarray, names: Sequence[str]) -> list[tuple[int, str, str]]:
    """Count, true class and predicted class of the most frequent mistakes."""
    mistakes = np.where(np.eye(len(matrix), dtype=bool), 0, matrix)
    order = np.argsort(-mistakes, axis=None, kind="stable")[:PAIRS]
    rows, columns = np.unravel_index(order, mistakes.shape)
    return [(int(mistakes[r, c]), names[r], names[c]) for r, c in zip(rows, columns, strict=True) if mistakes[r, c]]


def confusion_finding(matrix: np.ndarray, names: Sequence[str]) -> str:
    total, pairs = int(matrix.sum()), confused(matrix, names)
    accuracy = f"Accuracy {100 * np.trace(matrix) / max(1, total):.1f}% on {total:,} images"
    if not pairs:
        return f"{accuracy}: no class is confused with another"
    n, true, predicted = pairs[0]
    times = f"{n}\u00a0{'times' if n > 1 else 'time'}"
    return f"{accuracy}; most confused: {short(true, 24)} predicted as {short(predicted, 24)} ({times})"


def draw_reliability(bins: Bins) -> Figure:
    """Above: bars as high as the accuracy, the gap to the confidence set apart. Below: how many predictions have it."""
    figure = new_figure(5.4)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
    parts = {"accuracy": COLOURS[0], "overconfident": COLOURS[1], "underconfident": LIGHT_BLUE}
    for few in (False, True):
        chosen = (bins.count > 0) & ((bins.count < FEW) == few)
        x, confidence, accuracy = bins.edges[:-1][chosen], bins.confidence[chosen], bins.accuracy[chosen]
        least = np.minimum(confidence, accuracy)
        gaps = np.maximum(confidence - accuracy, 0), np.maximum(accuracy - confidence, 0)
        for colour, height, bottom in zip(parts.values(), (least, *gaps), (None, least, least), strict=True):
            style = {"color": colour, "alpha": 0.3 if few else 1.0}
            upper.bar(x, height, 0.92 * bins.edges[1], bottom, align="edge", **style)
    for label, colour in parts.items():
        upper.bar(0, 0, color=colour, label=label)  # for the legend, which needs no bar of full colour to exist
    upper.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=DASHED, label="perfect calibration")
    upper.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
    hint = f"pale: fewer than {FEW} predictions" if ((bins.count > 0) & (bins.count < FEW)).any() else None
    upper.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, title=hint, alignment="left")
    shares = bins.count / max(1, bins.count.sum())
    lower.bar(bins.edges[:-1], shares, 0.92 * bins.edges[1], align="edge", color=GREY)
    lower.set(ylabel="share of\npredictions", xlabel="confidence of the prediction")
    for axes in (upper, lower):
        axes.xaxis.set_major_formatter(_percent)
        axes.yaxis.set_major_formatter(_percent)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
    return figure


def reliability_finding(bins: Bins) -> str:
    total = max(1, bins.count.sum())
    confidence, accuracy = (float((bins.count * v).sum() / total) for v in (bins.confidence, bins.accuracy))
    error = f"expected calibration error {100 * bins.ece:.1f}%"
    if bins.ece < 0.01:
        return f"Well calibrated: {error}"
    if abs(confidence - accuracy) < 0.5 * bins.ece:
        return f"Overconfident in some ranges, underconfident in others: {error}"
    word = "Overconfident" if confidence > accuracy else "Underconfident"
    return f"{word}: mean confidence {100 * confidence:.1f}%, accuracy {100 * accuracy:.1f}%; {error}"


def draw_values(labels: np.ndarray, values: np.ndarray, names: Sequence[str]) -> Figure:
    """(N, T), (N, T): for each value, predicted over true with the diagonal, and a histogram of the residuals."""
    shown = min(len(names), SHOWN)
    figure = new_figure(2.9 * shown)
    grid = figure.subplots(shown, 2, squeeze=False, width_ratios=[1.2, 1])
    for (left, right), y, v, name in zip(grid, labels.T, values.T, names, strict=False):
        ends = float(np.nanmin([y, v])), float(np.nanmax([y, v]))
        left.plot(ends, ends, color=GREY, linewidth=1, linestyle=DASHED)
        left.scatter(y, v, s=9, color=COLOURS[0], alpha=0.6 if len(y) < MANY else 0.15, linewidths=0)
        left.set(xlabel=f"true {short(name, 24)}", ylabel="predicted")
        right.hist((v - y)[np.isfinite(v - y)], bins=30, color=COLOURS[0])
        right.axvline(0, color=GREY, linewidth=1, linestyle=DASHED)
        right.set(xlabel="predicted - true", ylabel="images")
        right.yaxis.get_major_locator().set_params(integer=True)
        for axes in (left, right):
            axes.grid()
            axes.set_axisbelow(True)
    return figure


def values_finding(found: Mapping[str, Mapping[str, float]]) -> str:
    """`found`: name -> its metrics. The least well predicted is named when there are several."""
    name, worst = min(found.items(), key=lambda item: item[1]["r2"])
    errors = f"mean absolute error {worst['mae']:.3g}, rank correlation {worst['spearman']:.3f}"
    if len(found) == 1:
        return f"{short(name)}: R2 {worst['r2']:.3f}, {errors}"
    mean = np.mean([m["r2"] for m in found.values()])
    return f"Mean R2 {mean:.3f} of {len(found)} values; the lowest is {short(name)} with {worst['r2']:.3f}: {errors}"
