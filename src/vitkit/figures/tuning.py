"""What `vitkit tune` measured: every configuration by its speed and its accuracy, beside PyTorch as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vitkit.figures.panels import DASHED, baseline
from vitkit.figures.style import COLOURS, GREY, INK, LINE, MARK, Figure, new_figure

SHAPES = {"fp32": "o", "bf16": "h", "int8": "s"}
REDUCED = {"fp32": "^", "bf16": "v", "int8": "D"}


class Candidate(NamedTuple):
    name: str  # of the configuration
    runtime: str
    speedup: float  # over PyTorch as it is
    score: float | None  # 0..1; None: it was not measured
    precision: str = "fp32"
    reduced: bool = False  # fewer tokens, or smaller images
    chosen: bool = False

    @property
    def shape(self) -> tuple[str, str]:
        """A mark, and what it means."""
        shapes = REDUCED if self.reduced else SHAPES
        return shapes[self.precision], f"{self.precision}, reduced" if self.reduced else self.precision


def draw_tuning(found: Sequence[Candidate], words: str, before: float, max_drop: float) -> Figure:
    """Speedup across, `words` (in %) up; dashed: the model itself, and how much may be lost of it."""
    from matplotlib.lines import Line2D

    figure = new_figure(4.6)
    axes = figure.subplots()
    runtimes = dict.fromkeys(one.runtime for one in found)
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(runtimes)}
    scores = [100 * one.score for one in found if one.score is not None]
    low, high = min([*scores, 100 * (before - max_drop)]), max([*scores, 100 * before])
    room = max(0.08 * (high - low), 0.2)
    floor = low - 1.5 * room  # where those without a score stand
    for one in found:
        y = floor if one.score is None else 100 * one.score
        edge = colours[one.runtime]
        fill = "none" if one.score is None else edge
        axes.scatter(
            one.speedup,
            y,
            46,
            marker=one.shape[0],
            linewidths=1.4,
            zorder=3,
            facecolor=fill,
            edgecolor=edge,
            alpha=0.85,
        )
        if one.chosen:
            axes.scatter(one.speedup, y, s=190, facecolor="none", edgecolor=MARK, linewidths=1.8, zorder=4)
            side = "right" if one.speedup > 0.6 * max(other.speedup for other in found) else "left"
            place = (-11 if side == "right" else 11, -13)
            axes.annotate(
                f"chosen: {one.name}", (one.speedup, y), place, textcoords="offset points", ha=side, color=INK
            )
    axes.axvline(1, color=GREY, linewidth=1, linestyle=DASHED)
    axes.annotate(
        " PyTorch as it is", (1, 0.02), xycoords=("data", "axes fraction"), rotation=90, ha="left", color=GREY
    )
    baseline(axes, 100 * before, "the model itself")
    axes.axhspan(100 * (before - max_drop), 100 * before, color=LINE, alpha=0.6, linewidth=0, zorder=0)
    if any(one.score is None for one in found):
        axes.annotate("accuracy not measured", (1, floor), xycoords=("axes fraction", "data"), ha="right", color=GREY)
    axes.set(xlabel="speed: times PyTorch as it is", ylabel=f"{words}, %", ylim=(floor - room, high + room))
    axes.set_xlim(0, 1.12 * max(1.0, *(one.speedup for one in found)))
    axes.grid()
    axes.set_axisbelow(True)
    shapes = sorted({one.shape[::-1] for one in found})
    dots = [Line2D([], [], marker="o", linestyle="", color=colour, label=name) for name, colour in colours.items()]
    marks = [Line2D([], [], marker=shape, linestyle="", color=GREY, label=words) for words, shape in shapes]
    figure.legend(handles=[*dots, *marks], loc="outside upper center", ncols=4)
    return figure
