"""Figures of checks: deletion and insertion curves, training curves, confusion, calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitkit.evaluate.metrics import Bins
from vitkit.explain.faithfulness import RANDOM, Faithfulness
from vitkit.explain.figures.style import COLOURS, GREY, bare, new_figure, scale_bar, short
from vitkit.explain.training import Curves, Judgement, in_words, smooth

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_faithfulness(result: Faithfulness) -> Figure:
    """Mean deletion and insertion curves of every method; random order dashed."""
    figure = new_figure(4.1)
    panels = figure.subplots(1, 2, sharey=True)
    percent = 100 * result.fractions
    highest = max(float(result.deletion.mean(axis=0).max()), float(result.insertion.mean(axis=0).max()))
    for axes, kind, better in zip(
        panels, ("deletion", "insertion"), ("lower is better", "higher is better"), strict=True
    ):
        curves = getattr(result, kind).mean(axis=0)
        axes.grid()
        for i, name in enumerate(result.methods):
            random = name == RANDOM
            axes.plot(
                percent,
                curves[i],
                color=GREY if random else COLOURS[i % len(COLOURS)],
                linestyle=(0, (4, 2)) if random else "-",
                linewidth=1.6,
                label=name,
            )
        axes.set_title(f"{kind}: {better}", loc="left")
        axes.set_xlabel(f"patches {'hidden' if kind == 'deletion' else 'shown'}, %")
        axes.set_xlim(0, 100)
        axes.set_ylim(0, min(1.0, 1.15 * highest + 1e-6))
    panels[0].set_ylabel("probability of the class")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def draw_curves(curves: Curves) -> Figure:
    """One panel per quantity of the log, over steps; noisy ones with a running mean."""
    names = sorted(curves, key=_interest)[:8]
    odd = len(names) % 2  # then the first one is as wide as the figure
    down = (len(names) + odd) // 2
    first, last = min(s.min() for s, _ in curves.values()), max(s.max() for s, _ in curves.values())
    figure = new_figure(1.8 * down + 0.3)
    grid = figure.add_gridspec(down, 2)
    for i, name in enumerate(names):
        row, column = divmod(i + odd, 2) if i or not odd else (0, slice(None))
        axes = figure.add_subplot(grid[row, column])
        steps, values = curves[name]
        noisy = is_noisy(values)
        axes.grid()
        axes.plot(steps, values, color=COLOURS[0], linewidth=0.8 if noisy else 1.7, alpha=0.35 if noisy else 1)
        if noisy:
            axes.plot(steps, smooth(values, len(values) // 25), color=COLOURS[0], linewidth=1.7)
        axes.set_title(in_words(name), loc="left")
        if first < last:
            axes.set_xlim(first, last)
        if row == down - 1:
            axes.set_xlabel("step")
    return figure


def is_noisy(values: np.ndarray) -> bool:
    """Whether a curve goes up and down so much that its running mean says more."""
    return len(values) > 60 and float(np.abs(np.diff(values)).sum()) > 4 * float(np.ptp(values))


def _interest(name: str) -> tuple[int, str]:
    order = ("loss", "val_top1", "val_loss", "train_top1", "lr")
    return (order.index(name) if name in order else len(order), name)


def draw_confusion(result: Judgement, names: Sequence[str]) -> Figure:
    """True classes down, predicted across, as shares of each true class; with numbers when there are few classes."""
    confusion = result.confusion
    share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    count = len(confusion)
    figure = new_figure(5.6)
    axes = figure.subplots()
    bare(axes)
    painted = axes.imshow(share, cmap="viridis", vmin=0, vmax=1)
    step = max(1, -(-count // 25))
    ticks = range(0, count, step)
    labels = [short(names[i], 12) for i in ticks]
    axes.set_yticks(ticks, labels)
    axes.set_xticks(ticks, labels, rotation=90 if max(map(len, labels)) > 3 else 0)
    axes.tick_params(length=0)
    axes.set_ylabel("true class")
    axes.set_xlabel("predicted class")
    if count <= 16:
        for i, j in np.argwhere(confusion > 0):
            dark = share[i, j] < 0.6
            axes.text(
                j, i, str(confusion[i, j]), ha="center", va="center", fontsize=8, color="white" if dark else "black"
            )
    scale_bar(figure, painted, axes, "share of the true class", shrink=0.6)
    return figure


def draw_calibration(bins: Bins) -> Figure:
    """How often the model is right when it says it is so sure; below, how often it says so."""
    figure = new_figure(4.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    centres = (bins.edges[:-1] + bins.edges[1:]) / 2
    seen = bins.count > 0
    right, counts = bins.accuracy[seen], bins.count[seen]
    upper.grid()
    upper.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    upper.text(0.12, 0.06, "perfectly calibrated", color=GREY, fontsize=8)
    spread = np.sqrt((right * (1 - right) + 0.25 / counts) / counts)  # what chance alone would do
    bars = np.stack([np.minimum(spread, right), np.minimum(spread, 1 - right)])
    upper.errorbar(bins.confidence[seen], right, bars, fmt="o", color=COLOURS[0], markersize=6, linewidth=1.6)
    upper.set_ylabel("share that is right")
    upper.set_ylim(0, 1.04)
    lower.grid(axis="y")
    lower.bar(centres, bins.count, width=0.9 / len(centres), color=GREY)
    lower.set_ylabel("pictures")
    lower.set_xlabel("confidence of the prediction")
    lower.set_xlim(0, 1)
    return figure
