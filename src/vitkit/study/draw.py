"""The shapes that the figures of studies are made of, in the look of `explain.figures.style`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitkit.explain.figures.style import COLOURS, GREY, INK, new_figure
from vitkit.study.numbers import interval
from vitkit.study.table import Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.32  # inches of figure for each line of dots


def dots(axes: Axes, rows: Sequence[Row], names: Sequence[str] | None = None, groups: Sequence[int] = ()) -> None:
    """One line per row: small dots are seeds, the large one their mean, the bar the 95% interval."""
    colours = [COLOURS[(groups[i] if groups else 0) % len(COLOURS)] for i in range(len(rows))]
    for place, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        mean = row.mean
        values = 100 * np.array(row.accuracy)
        if mean.known:
            axes.plot([100 * mean.low, 100 * mean.high], [place, place], color=colour, linewidth=2, alpha=0.55)
        axes.scatter(values, [place] * len(values), s=12, color=colour, alpha=0.8, linewidths=0, zorder=3)
        axes.scatter([100 * mean.mean], [place], s=46, color=colour, edgecolors="white", linewidths=0.9, zorder=4)
    axes.set_yticks(range(len(rows)), names or [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    _frame(axes, rows)
    axes.set_xlabel("test accuracy, % (dots: seeds; bar: 95% interval of their mean)")


def _frame(axes: Axes, rows: Sequence[Row]) -> None:
    """The scale shows all seeds; an interval that is far wider than they are runs off its edge."""
    values = 100 * np.concatenate([row.accuracy for row in rows])
    low, high = float(values.min()), float(values.max())
    room = max(0.35 * (high - low), 0.3)
    axes.set_xlim(max(0.0, low - room), min(100.4, high + room))


def dot_figure(rows: Sequence[Row], names: Sequence[str] | None = None, groups: Sequence[int] = ()) -> Figure:
    figure = new_figure(ROW * len(rows) + 0.6)
    dots(figure.subplots(), rows, names, groups)
    return figure


def line(
    axes: Axes,
    x: Sequence[float],
    by_seed: np.ndarray,
    number: int,
    label: str,
    marker: str = "o",
) -> None:
    """by_seed: seeds x places, in percent. The line is the mean, bars are 95% intervals."""
    colour = COLOURS[number % len(COLOURS)]
    found = [interval(column.tolist()) for column in by_seed.T]
    means = np.array([f.mean for f in found])
    half = np.array([f.half if f.known else 0.0 for f in found])
    axes.errorbar(
        x, means, yerr=half, color=colour, marker=marker, markersize=4.5, linewidth=1.8, elinewidth=1.2, label=label
    )


def curves(axes: Axes, rows: Sequence[Row], names: Sequence[str] | None = None, window: float = 0.05) -> None:
    """Training loss, a running mean over seeds and steps."""
    for number, row in enumerate(rows):
        losses = np.mean([one[: min(map(len, row.losses))] for one in row.losses], axis=0)
        width = max(1, round(window * len(losses)))
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        label = (names or [r.name for r in rows])[number]
        style = "-" if number < len(COLOURS) else ":"
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(np.arange(len(smooth)) + width, smooth, style, color=colour, linewidth=1.5, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.grid(axis="y")


def legend_above(figure: Figure, axes: Axes, columns: int) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=columns)


def note(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=8, color=INK)


def baseline(axes: Axes, y: float, text: str) -> None:
    axes.axhline(y, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(text, (1, y), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8, color=GREY)


def seeds_by(rows: Sequence[Row], key: str) -> np.ndarray:
    """The measured list `key` of one row, seeds x places, in percent."""
    (row,) = rows
    return 100 * np.array([one[key] for one in row.extra])


def accuracies(rows: Sequence[Row]) -> np.ndarray:
    """seeds x rows, in percent."""
    return 100 * np.array([row.accuracy for row in rows]).T


def plain(table: Table) -> Figure:
    """All rows as dots."""
    return dot_figure(table.rows)
