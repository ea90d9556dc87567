"""The shapes that the figures of studies are made of, in the look of `explain.figures.style`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
    axes.set_xlim(*_frame(accuracies(rows)))
    axes.set_xlabel("test accuracy, % (bar: 95% interval)")


def _frame(percents: np.ndarray, room: float = 0.35) -> tuple[float, float]:
    """A scale that shows all seeds; an interval that is far wider than they are runs off its edge."""
    low, high = float(percents.min()), float(percents.max())
    beyond = max(room * (high - low), 0.3)
    return max(0.0, low - beyond), min(100.4, high + beyond)


def dot_figure(rows: Sequence[Row], names: Sequence[str] | None = None, groups: Sequence[int] = ()) -> Figure:
    figure = new_figure(ROW * len(rows) + 0.6)
    dots(figure.subplots(), rows, names, groups)
    return figure


def lines(axes: Axes, x: Sequence[float], by_name: dict[str, np.ndarray], room: float = 0.1) -> None:
    """One line per name: its mean over seeds, with 95% intervals. Values are seeds x places, in percent."""
    for number, (label, by_seed) in enumerate(by_name.items()):
        _line(axes, x, by_seed, number, label)
    axes.set_ylim(*_frame(np.concatenate([v.ravel() for v in by_name.values()]), room))
    axes.set_ylabel("test accuracy, %")
    axes.grid(axis="y")


def _line(axes: Axes, x: Sequence[float], by_seed: np.ndarray, number: int, label: str) -> None:
    colour = COLOURS[number % len(COLOURS)]
    found = [interval(column.tolist()) for column in by_seed.T]
    means = np.array([f.mean for f in found])
    half = np.array([f.half if f.known else 0.0 for f in found])
    look: dict[str, Any] = {"marker": "os^Dv"[number % 5], "markersize": 4.5, "linewidth": 1.8, "elinewidth": 1.2}
    axes.errorbar(x, means, yerr=half, color=colour, label=label, **look)


def curves(axes: Axes, rows: Sequence[Row], names: Sequence[str] | None = None, window: float = 0.05) -> None:
    """Training loss, a running mean over seeds and steps."""
    from matplotlib.ticker import MaxNLocator

    for number, row in enumerate(rows):
        losses = np.mean([one[: min(map(len, row.losses))] for one in row.losses], axis=0)
        width = max(1, round(window * len(losses)))
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        label = (names or [r.name for r in rows])[number]
        style: Any = (0, (2.5, 2.5)) if number == 1 else "-"  # the second often lies on the first
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(np.arange(len(smooth)) + width, smooth, linestyle=style, color=colour, linewidth=1.6, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.grid(axis="y")


def legend_above(figure: Figure, axes: Axes, columns: int) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=columns)


def note(axes: Axes, x: float, y: float, text: str, left: bool = False) -> None:
    """Words above a point and beside it, where neither its interval nor its line is."""
    place, side = ((-5, 4), "right") if left else ((5, 4), "left")
    axes.annotate(text, (x, y), xytext=place, textcoords="offset points", ha=side, fontsize=8, color=INK)


def baseline(axes: Axes, y: float, text: str) -> None:
    axes.axhline(y, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(text, (1, y), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8, color=GREY)


def measured(row: Row, key: str) -> np.ndarray:
    """The measured list `key`, seeds x places, in percent."""
    return 100 * np.array([one[key] for one in row.extra])


def accuracies(rows: Sequence[Row]) -> np.ndarray:
    """seeds x rows, in percent."""
    return 100 * np.array([row.accuracy for row in rows]).T


def plain(table: Table) -> Figure:
    """All rows as dots."""
    return dot_figure(table.rows)
