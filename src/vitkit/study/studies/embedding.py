"""`patch-embed`: linear and convolutional patches are one function; a convolutional stem is another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitkit.explain.figures.style import COLOURS, new_figure
from vitkit.study.draw import ROW, curves, dots, legend_above
from vitkit.study.numbers import compare, gained, sentence
from vitkit.study.table import Arm, Finding, Setting, Study, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONV, LINEAR, STEM = "convolution", "linear map", "convolutional stem"


def _arms(s: Setting) -> list[Arm]:
    return [
        Arm(CONV, s.vit(), "conv-patches"),
        Arm(LINEAR, s.vit(), "linear-patches", rate_of=CONV),
        Arm(STEM, s.hybrid()),
    ]


def apart(table: Table) -> np.ndarray:
    """seeds x steps: how far the losses of the two forms are apart."""
    pairs = zip(table[CONV].losses, table[LINEAR].losses, strict=True)
    return np.abs([np.subtract(a, b) for a, b in pairs])


def _find(table: Table) -> Finding:
    gaps = apart(table)
    early, late = float(gaps[:, :10].max()), float(gaps.max())
    stem = table.gap(STEM, CONV)
    same = early < 1e-4  # float32 keeps seven digits; ten steps enlarge an error, but not a thousandfold
    if same:
        first = (
            f"from equal weights the losses of the two forms differ by at most {early:.0e} in the first ten steps, "
            f"which is rounding, and by {late:.0e} in all, as training enlarges it "
            f"({compare(LINEAR, CONV, table.gap(LINEAR, CONV))})"
        )
    else:
        first = f"the losses of the two forms differ by {early:.0e} within ten steps: they are not one function"
    headline = f"Linear and convolutional patches {'learn alike, to rounding' if same else 'differ'}"
    second = f"{compare('a convolutional stem', 'plain patches', stem)}, at equal multiply-adds"
    return Finding(f"{headline}; a stem: {gained(stem)}", (sentence(first), sentence(second)))


def _draw(table: Table) -> Figure:
    figure = new_figure(5.6)
    upper, middle, lower = figure.subplots(3, 1, height_ratios=[2.2, 1.5, ROW * 3 + 0.2])
    curves(upper, table.rows)
    upper.set_xlabel("")
    upper.set_ylim(bottom=0)
    gaps = apart(table)
    for seed in gaps:
        middle.plot(np.arange(1, len(seed) + 1), np.maximum(seed, 1e-9), color=COLOURS[3], linewidth=0.8, alpha=0.8)
    middle.set_yscale("log")
    middle.set_ylabel("|linear - conv|")
    middle.set_xlabel("step (one line per seed)")
    middle.grid(axis="y")
    dots(lower, table.rows, groups=[0, 1, 2])
    legend_above(figure, upper, 3)
    return figure


PATCH_EMBED = Study(
    name="patch-embed",
    question="Linear or convolutional patch embedding?",
    varies="a linear map of flattened patches, a convolution of equal stride, a convolutional stem",
    claim="the linear map and the convolution are the same function",
    fair="the first two start from equal weights at one learning rate; the stem has equal multiply-adds within a tenth",
    arms=_arms,
    find=_find,
    draw=_draw,
    reference=CONV,
    curves=True,
)
