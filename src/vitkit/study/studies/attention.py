"""Attention: mistakes in published code (`attention-bug`, `scale-in-softmax`), and how far `heads` look."""

from __future__ import annotations

import numpy as np

from vitkit.figures.panels import baseline, legend_above
from vitkit.figures.style import COLOURS, Figure, new_figure
from vitkit.study.numbers import compare, difference, direction, gained, spread, verdict
from vitkit.study.table import ROW, Arm, Finding, Setting, Study, Table, curves, dots

SAME_START = "the same start of the weights, steps, images and order; equal multiply-adds"
OURS, TRUE, FALSE, CURE = "ours", "batch_first=True", "batch_first=False", "False, q and k detached"
FALSE_CLS, OURS_CLS = "False, class token", "ours, class token"
RIGHT, AFTER, WIDTH = "softmax(qk/√k) v", "softmax(qk)/√d v", "softmax(qk/√d) v"


def _changed(table: Table, arm: str) -> float:
    """The share of the answers that change with the other images of the batch."""
    return float(table[arm].measured("changed").mean())


class AttentionBug(Study):
    name = "attention-bug"
    question = "Why does PyTorch's nn.MultiheadAttention seem to train badly?"
    varies = "batch_first False and True, the detach cure, ours; mean pooling and class token"
    claim = "an article blames the module and detaches query and key"
    fair = SAME_START
    reference = OURS
    curves = True

    def arms(self, s: Setting) -> list[Arm]:
        mean, cls = s.vit(pooling="mean", class_token=False), s.vit()
        arms = {OURS: (mean, ""), TRUE: (mean, "torch"), FALSE: (mean, "torch-batch"), CURE: (mean, "torch-detach")}
        arms |= {OURS_CLS: (cls, ""), FALSE_CLS: (cls, "torch-batch")}
        return [Arm(name, config, variant, measure="neighbours") for name, (config, variant) in arms.items()]

    def find(self, table: Table) -> Finding:
        false, cure = table.gap(FALSE, TRUE), table.gap(CURE, TRUE)
        equal = float(table[TRUE].measured("differs_from_ours").max())
        fault = "is not at fault" if equal < 1e-4 else "computes something else"
        first = f"PyTorch's nn.MultiheadAttention {fault}: with batch_first=True its logits equal ours to {equal:.0e} "
        first += f"({compare('it', 'ours', table.gap(TRUE, OURS))}), "
        first += f"with the default batch_first=False {compare('the model', 'the right one', false)}"
        changed, ours, chance = _changed(table, FALSE), _changed(table, OURS), 1 / table.count("classes")
        cause = "the cause is attention across the batch" if changed else "attention stays in its image"
        blind = f"a class token, which then never sees its patches, reaches {table[FALSE_CLS].mean.mean:.1%}"
        second = f"{cause}: {changed:.1%} of the answers change when the other images of the batch do "
        second += f"(ours: {ours:.1%}), and {blind}, where guessing gives {chance:.1%}; detaching query and key: "
        second += (
            f"{compare('it', 'the plain default', table.gap(CURE, FALSE))}, {compare('it', 'the right model', cure)}"
        )
        return Finding(f"batch_first=False attends across the batch: {gained(false)}", first, second)

    def draw(self, table: Table) -> Figure:
        figure = new_figure(2.6 + ROW * len(table.rows) + 0.9)
        upper, lower = figure.subplots(2, 1, height_ratios=[2.4, ROW * len(table.rows) + 0.3])
        curves(upper, [table[name] for name in (OURS, TRUE, FALSE, CURE, FALSE_CLS)])
        upper.set_ylim(bottom=0)
        changed = [f"{row.name}\n{_changed(table, row.name):.1%} change with the batch" for row in table.rows]
        dots(lower, table.rows, changed, [0, 1, 2, 3, 0, 4])
        lower.tick_params(axis="y", labelsize=8)
        legend_above(figure, upper, 2)
        return figure


class Scale(Study):
    name = "scale-in-softmax"
    question = "Does it matter where the attention scores are scaled, and by what?"
    varies = (
        "inside by the root of the head width (right), after the softmax by that of the model (wrong), inside by it"
    )
    claim = "the articles' code divides by the root of the model's width, after the softmax"
    fair = SAME_START
    reference = RIGHT

    def arms(self, s: Setting) -> list[Arm]:
        return [Arm(RIGHT, s.vit()), Arm(AFTER, s.vit(), "scale-after"), Arm(WIDTH, s.vit(), "scale-width")]

    def find(self, table: Table) -> Finding:
        after, width = table.gap(AFTER, RIGHT), table.gap(WIDTH, RIGHT)
        first = f"{compare('the scale after the softmax by the root of the width', 'the right scale', after)}"
        if after.covers_zero or after.mean > 0:
            first += ", so in so short a training the mistake does not show in the accuracy"
        second = f"inside the softmax but of the whole width: {compare('it', 'the right scale', width)}"
        return Finding(f"The scale after the softmax: {gained(after)}", first, second)


class Heads(Study):
    name = "heads"
    question = "Which layers look near and which far?"
    varies = "mean attention distance of every head by depth, fresh and trained"
    claim = "in the lowest layers near and far heads stand side by side; deeper ones look far"
    fair = "one model, several seeds; distance over 256 test images"
    reference = "trained"

    def arms(self, s: Setting) -> list[Arm]:
        config = s.vit(patch_size={8: 1, 28: 4}.get(s.side, 4), depth=6)
        return [Arm("trained", config, measure="reach"), Arm("fresh", config, measure="reach", length=0)]

    def find(self, table: Table) -> Finding:
        trained = table["trained"].measured("distance")  # seeds x layers x heads, pixels
        mean, span = trained.mean(axis=2), trained.max(axis=2) - trained.min(axis=2)  # seeds x layers
        deeper, narrower = (difference(v[:, -1].tolist(), v[:, 0].tolist()) for v in (mean, span))  # last - first
        even = table["trained"].measured("even")[0]
        headline = "How far the first and the last layer look: no difference seen"
        tail = f"no difference seen ({deeper.mean:+.1f} pixels, {spread(deeper, 1)})"
        if more := direction(deeper, "farther", "less far"):
            headline = f"The last layer looks {abs(deeper.mean):.1f} pixels {more} than the first"
            tail = f"the last looks {abs(deeper.mean):.1f} pixels {more} ({spread(deeper, 1)})"
        near, far = mean[:, 0].mean(), mean[:, -1].mean()
        first = f"the first layer looks {near:.1f} pixels far on average and the last {far:.1f} "
        first += f"(even attention: {even:.1f}); {tail}, {verdict(deeper, 1)}"
        low, high = trained[:, 0].min(axis=1).mean(), trained[:, 0].max(axis=1).mean()
        tail = f"no difference seen between their spread and that of the last layer ({spread(narrower, 1)})"
        if more := direction(narrower, "more", "less"):
            tail = (
                f"in the last layer they differ {more} ({narrower.mean:+.1f} pixels of spread, {spread(narrower, 1)})"
            )
        paper = "the paper (only its lowest layers hold near and far heads)"
        second = f"heads of the first layer reach from {low:.1f} to {high:.1f} pixels; {tail}, "
        second += verdict(narrower, -1, paper)
        return Finding(headline, first, second)

    def draw(self, table: Table) -> Figure:
        figure = new_figure(3.4)
        axes = figure.subplots()
        for arm, colour, beside in (("fresh", COLOURS[1], -0.16), ("trained", COLOURS[0], 0.16)):
            values = table[arm].measured("distance")  # seeds x layers x heads
            seeds, layers, heads = values.shape
            depth = np.arange(layers)
            spot = depth[None, :, None] + np.linspace(-0.1, 0.1, seeds * heads).reshape(seeds, 1, heads) + beside
            axes.scatter(spot.ravel(), values.ravel(), s=11, color=colour, alpha=0.65, linewidths=0)
            axes.plot(depth, values.mean(axis=(0, 2)), color=colour, linewidth=1.8, label=f"{arm}: mean of the layer")
        baseline(axes, table["trained"].measured("even")[0], "even attention")
        words = {"xlabel": "layer (dots: every head of every seed)", "ylabel": "attention distance, pixels"}
        axes.set(**words, ylim=(0, None))
        axes.grid(axis="y")
        legend_above(figure, axes, 2)
        return figure
