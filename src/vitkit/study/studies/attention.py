"""`heads`: how far the heads look by depth, before and after training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitkit.explain.figures.style import COLOURS, new_figure
from vitkit.study.draw import baseline, legend_above
from vitkit.study.numbers import Interval, difference, sentence, spread, verdict
from vitkit.study.table import Arm, Finding, Setting, Study, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _arms(s: Setting) -> list[Arm]:
    config = s.vit(patch_size={8: 1, 28: 4}.get(s.side, 4), depth=6)
    return [Arm("trained", config, measure="reach"), Arm("fresh", config, measure="reach", length=0)]


def distances(table: Table, arm: str) -> np.ndarray:
    """seeds x layers x heads, pixels."""
    return np.array([one["distance"] for one in table[arm].extra])


def _change(values: np.ndarray) -> Interval:
    return difference(values[:, -1].tolist(), values[:, 0].tolist())


def _find(table: Table) -> Finding:
    trained = distances(table, "trained")
    mean, span = trained.mean(axis=2), trained.max(axis=2) - trained.min(axis=2)  # seeds x layers
    deeper, narrower = _change(mean), _change(span)
    even = table["trained"].extra[0]["even"]
    if deeper.covers_zero:
        headline = "How far the first and the last layer look: no difference seen"
        tail = f"no difference seen ({deeper.mean:+.1f} pixels, {spread(deeper, 1)})"
    else:
        far = "farther" if deeper.mean > 0 else "less far"
        headline = f"The last layer looks {abs(deeper.mean):.1f} pixels {far} than the first"
        tail = f"the last looks {abs(deeper.mean):.1f} pixels {far} ({spread(deeper, 1)})"
    first = (
        f"the first layer looks {mean[:, 0].mean():.1f} pixels far on average and the last {mean[:, -1].mean():.1f} "
        f"(even attention: {even:.1f}); {tail}, {verdict(deeper, 1)}"
    )
    low, high = trained[:, 0].min(axis=1).mean(), trained[:, 0].max(axis=1).mean()
    second = f"heads of the first layer reach from {low:.1f} to {high:.1f} pixels; "
    if narrower.covers_zero:
        second += f"no difference seen between their spread and that of the last layer ({spread(narrower, 1)})"
    else:
        word = "less" if narrower.mean < 0 else "more"
        second += f"in the last layer they differ {word} ({narrower.mean:+.1f} pixels of spread, {spread(narrower, 1)})"
    second += f", {verdict(narrower, -1, 'the paper (only its lowest layers hold near and far heads)')}"
    return Finding(headline, (sentence(first), sentence(second)))


def _draw(table: Table) -> Figure:
    figure = new_figure(3.4)
    axes = figure.subplots()
    for number, arm in enumerate(("fresh", "trained")):
        values = distances(table, arm)  # seeds x layers x heads
        seeds, layers, heads = values.shape
        depth = np.arange(1, layers + 1)
        spot = depth[None, :, None] + np.linspace(-0.1, 0.1, seeds * heads).reshape(seeds, 1, heads)
        spot = spot + (-0.16 if arm == "fresh" else 0.16)
        colour = COLOURS[1 - number]
        axes.scatter(spot.ravel(), values.ravel(), s=11, color=colour, alpha=0.65, linewidths=0)
        axes.plot(depth, values.mean(axis=(0, 2)), color=colour, linewidth=1.8, label=f"{arm}: mean of the layer")
    baseline(axes, table["trained"].extra[0]["even"], "even attention")
    axes.set_xlabel("layer (dots: every head of every seed)")
    axes.set_ylabel("attention distance, pixels")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    legend_above(figure, axes, 2)
    return figure


HEADS = Study(
    name="heads",
    question="Which layers look near and which far?",
    varies="mean attention distance of every head by depth, fresh and trained",
    claim="in the lowest layers near and far heads stand side by side; deeper ones look far",
    fair="one model, several seeds; distance over 256 test pictures",
    arms=_arms,
    find=_find,
    draw=_draw,
    reference="trained",
)
