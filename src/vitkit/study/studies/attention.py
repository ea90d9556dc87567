"""Attention: mistakes in published code (`attention-bug`, `scale-in-softmax`), and how far it looks (`heads`,
`attention-distance`)."""

from __future__ import annotations

import numpy as np

from vitkit.figures.panels import baseline, legend_above
from vitkit.figures.style import COLOURS, Figure, new_figure
from vitkit.study.numbers import Interval, compare, direction, gained, interval, sentence, spread, verdict
from vitkit.study.table import ROW, Arm, Finding, Row, Setting, Study, Table, bar, curves, dots, line

SAME_START = "the same start of the weights, steps, images and order; equal multiply-adds"
OURS, TRUE, FALSE = "ours", "batch_first=True", "batch_first=False"
KEPT = {"value": "False, graph of value", "key": "False, graph of key", "query": "False, graph of query"}
CURE = KEPT["value"]  # query and key detached
FALSE_CLS, OURS_CLS = "False, class token", "ours, class token"
RIGHT, AFTER, WIDTH, NONE = "softmax(qk/√k) v", "softmax(qk)/√d v", "softmax(qk/√d) v", "softmax(qk) v"
WIDE = 96  # a head of this width, in place of four of 12


def _share(table: Table, arm: str, what: str) -> float:
    """Mean over seeds of a share that `neighbours` measured."""
    return float(table[arm].measured(what).mean())


class AttentionBug(Study):
    name = "attention-bug"
    question = "Why does PyTorch's nn.MultiheadAttention seem to train badly?"
    varies = "batch_first False and True, the detach cure, ours; mean pooling and class token"
    claim = (
        "with its default batch_first=False the images of a batch see each other, so the model fails when they are "
        "asked one by one; an article blames the module instead, and thinks that keeping the graph of key or value "
        "alone cures it"
    )
    source = "code of an introductory article; PyTorch's documentation of batch_first"
    fair = f"{SAME_START}; one learning rate, that of ours"
    reference = OURS
    effect, contrast, data = 0.05, (FALSE, TRUE), "mnist@28/4"
    curves = True
    expected = -1

    def arms(self, s: Setting) -> list[Arm]:
        mean, cls = s.vit(pooling="mean", class_token=False), s.vit()
        arms = {TRUE: (mean, "torch"), FALSE: (mean, "torch-batch")}
        arms |= {name: (mean, f"torch-keep-{kept}") for kept, name in KEPT.items()}
        arms |= {OURS_CLS: (cls, ""), FALSE_CLS: (cls, "torch-batch")}
        others = [Arm(n, config, variant, measure="neighbours", rate_of=OURS) for n, (config, variant) in arms.items()]
        return [Arm(OURS, mean, measure="neighbours"), *others]

    def effects(self, table: Table) -> list[float]:
        """Accuracy image by image."""
        return table.measured_gap(*self.contrast, "alone")

    def find(self, table: Table) -> Finding:
        alone = interval(self.effects(table))
        equal = float(table[TRUE].measured("differs_from_ours").max())
        fault = "is not at fault" if equal < 1e-4 else "computes something else"
        ours, changed, batches, single = (
            f"{_share(table, *which):.1%}"
            for which in ((OURS, "changed"), (FALSE, "changed"), (FALSE, "among"), (FALSE, "alone"))
        )
        first = f"PyTorch's nn.MultiheadAttention {fault}: with batch_first=True its logits equal ours to {equal:.0e}; "
        first += f"with the default batch_first=False {changed} of the answers change with the other images of the "
        first += f"batch (ours: {ours}), and the model that reaches {batches} in batches reaches {single} when images "
        first += f"are asked one by one ({compare('it', 'the right one', alone)})"
        both = {kept: [f"{_share(table, name, m):.1%}" for m in ("among", "alone")] for kept, name in KEPT.items()}
        kept = ", ".join(f"{among} and {alone} with that of the {name}" for name, (among, alone) in both.items())
        blind, chance = table[FALSE_CLS].mean.mean, 1 / table.count("classes")
        second = f"with the graph of one of the three alone it reaches, in batches and one by one, {kept}; in batches "
        second += f"{compare('the cure', 'the plain default', table.gap(CURE, FALSE))}; a class token, which never "
        second += f"sees its patches, reaches {blind:.1%}, where guessing gives {chance:.1%}"
        return Finding(f"batch_first=False, asked about one image: {gained(alone)}", first, second)

    def draw(self, table: Table) -> Figure:
        figure = new_figure(2.9 + 1.4 * ROW * len(table.rows))
        upper, lower = figure.subplots(2, 1, height_ratios=[1.8, 1.4 * ROW * len(table.rows)])
        curves(upper, [table[name] for name in (OURS, TRUE, FALSE, CURE, FALSE_CLS)])
        upper.set_ylim(bottom=0)
        alone = [f"{row.name}\n{_share(table, row.name, 'alone'):.1%} one by one" for row in table.rows]
        groups = [0, 1, 2, 3, 3, 3, 0, 4]
        dots(lower, table.rows, alone, groups)
        for place, (row, group) in enumerate(zip(table.rows, groups, strict=True)):
            single, colour = row.measured("alone"), COLOURS[group]
            if (mean := interval(single.tolist())).known:
                bar(lower, mean, place, colour)
            lower.scatter(100 * single, [place] * len(single), s=40, marker="x", color=colour, zorder=5)
        lower.set(xlim=(0, 102), xlabel="test accuracy, % (dots: in batches; crosses: one by one)")
        legend_above(figure, upper, 2)
        return figure


class Scale(Study):
    name = "scale-in-softmax"
    question = "Does it matter where the attention scores are scaled, and by what?"
    varies = "inside by the root of the head width (right), after the softmax, by that of the model, not at all"
    claim = (
        "scores are divided by the root of the head's width, inside the softmax; the articles' code divides by that of "
        "the model's width, after it, which must be worse"
    )
    source = "code of introductory articles; Vaswani et al. 2017, equation 1"
    fair = SAME_START
    reference = RIGHT
    contrast = (AFTER, RIGHT)
    expected = -1

    def arms(self, s: Setting) -> list[Arm]:
        kinds = {RIGHT: "", AFTER: "scale-after", WIDTH: "scale-width", NONE: "scale-none"}
        wide = s.vit(width=WIDE, heads=1)
        alone = [Arm(_wide(name), wide, kinds[name]) for name in (RIGHT, NONE)]
        return [*(Arm(name, s.vit(), variant) for name, variant in kinds.items()), *alone]

    def find(self, table: Table) -> Finding:
        after, width, none = (table.gap(name, RIGHT) for name in (AFTER, WIDTH, NONE))
        wide = table.gap(_wide(NONE), _wide(RIGHT))
        first = compare("the scale after the softmax, by the root of the width,", "the right scale", after)
        first += f"; inside the softmax but of the whole width: {compare('it', 'the right scale', width)}"
        second = f"no scale at all: with heads of 12 {compare('it', 'the right scale', none)}, with one head of {WIDE} "
        second += f"{compare('it', 'the right scale', wide)}"
        headline = f"The scale after the softmax: {gained(after)}; none with a wide head: {gained(wide)}"
        return Finding(headline, first, second)


def _wide(name: str) -> str:
    return f"{name}, one head"


def _grown(row: Row, share: float = 0) -> list[float]:
    """Mean distance of the last layers minus that of the first, in pixels, by seed; one of each at least."""
    by_layer = row.measured("distance").mean(axis=2)  # seeds x layers
    some = max(1, int(by_layer.shape[1] * share))
    found: list[float] = (by_layer[:, -some:].mean(axis=1) - by_layer[:, :some].mean(axis=1)).tolist()
    return found


def _looks(gap: Interval, what: str) -> tuple[str, str]:
    """A headline and a clause."""
    if more := direction(gap, "farther", "less far"):
        words = f"the last {what} looks {abs(gap.mean):.1f} pixels {more} than the first"
        return sentence(words)[:-1], f"{words} ({spread(gap, 1)})"
    words = f"open whether the first or the last {what} looks farther"
    return sentence(words)[:-1], f"it is {words} ({gap.mean:+.1f} pixels, {spread(gap, 1)})"


class Heads(Study):
    name = "heads"
    question = "Which layers look near and which far?"
    varies = "mean attention distance of every head by depth, fresh and trained"
    claim = "in the lowest layers near and far heads stand side by side; deeper ones look far"
    source = "Dosovitskiy et al. 2021, figure 7 right"
    fair = "one model, several seeds; distance over 256 test images"
    reference = "trained"
    effect, contrast, sought, data = 1.0, ("trained",), "a pixel between the first and the last layer", "mnist@28/4"
    expected = 1

    def arms(self, s: Setting) -> list[Arm]:
        config = s.vit(patch_size={8: 1, 28: 4}.get(s.side, 4), depth=6)
        return [Arm("trained", config, measure="reach"), Arm("fresh", config, measure="reach", length=0)]

    def effects(self, table: Table) -> list[float]:
        """Mean distance of the last layer minus that of the first, in pixels."""
        return _grown(table["trained"])

    def find(self, table: Table) -> Finding:
        trained = table["trained"].measured("distance")  # seeds x layers x heads, pixels
        mean, span = trained.mean(axis=2), trained.max(axis=2) - trained.min(axis=2)  # seeds x layers
        deeper, narrower = interval(self.effects(table)), interval((span[:, -1] - span[:, 0]).tolist())
        even = table["trained"].measured("even")[0]
        headline, tail = _looks(deeper, "layer")
        near, far = mean[:, 0].mean(), mean[:, -1].mean()
        first = f"the first layer looks {near:.1f} pixels far on average and the last {far:.1f} "
        first += f"(even attention: {even:.1f}); {tail}, {verdict(deeper, 1)}"
        low, high = trained[:, 0].min(axis=1).mean(), trained[:, 0].max(axis=1).mean()
        tail = f"it is open whether they differ more than those of the last layer ({spread(narrower, 1)})"
        if more := direction(narrower, "more", "less"):
            tail = f"in the last layer they differ {more} ({narrower.mean:+.1f} pixels, {spread(narrower, 1)})"
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
        axes.set(xlabel="layer (dots: every head of every seed)", ylabel="attention distance, pixels")
        axes.grid(axis="y")
        legend_above(figure, axes, 2)
        return figure


class AttentionDistance(Study):
    name = "attention-distance"
    question = "Does attention reach farther with depth, and how does a CNN compare?"
    varies = "attention distance over the layers of a deep ViT, and how far the stages of a ResNet depend on pixels"
    claim = "attention distance grows with depth; a CNN's receptive field does so by construction"
    source = "Dosovitskiy et al. 2021, figures 7 right and 11"
    fair = "the same steps, images and order; distance over 256 test images, the ResNet's by gradients over 64"
    effect, sought, data = 0.5, "half a pixel between the first and the last third of the layers", "cifar10@32/4"
    contrast = ("ViT",)
    expected = 1

    def arms(self, s: Setting) -> list[Arm]:
        vit = s.vit(patch_size={8: 1, 16: 2}.get(s.side, 4), depth=9)
        return [Arm("ViT", vit, measure="reach"), Arm("ResNet", s.resnet(), measure="reach")]

    def effects(self, table: Table) -> list[float]:
        """Mean distance of the last third of the layers minus that of the first, in pixels."""
        return _grown(table["ViT"], 1 / 3)

    def find(self, table: Table) -> Finding:
        grown, by_layer = interval(self.effects(table)), table["ViT"].measured("distance").mean(axis=(0, 2))
        stages = table["ResNet"].measured("distance").mean(axis=(0, 2))
        headline, tail = _looks(grown, "third of the layers")
        first = f"from the first layer to the last, attention reaches {by_layer[0]:.1f} to {by_layer[-1]:.1f} pixels; "
        first += f"{tail}, {verdict(grown, 1)}"
        second = f"the stages of a ResNet depend on pixels {', '.join(f'{far:.1f}' for far in stages)} away"
        return Finding(headline, first, second)

    def draw(self, table: Table) -> Figure:
        figure = new_figure(3.4)
        axes = figure.subplots()
        for number, arm in enumerate(("ViT", "ResNet")):
            values = table[arm].measured("distance").mean(axis=2)  # seeds x layers or stages
            line(axes, np.linspace(0, 1, values.shape[1]), values, arm, number)
        axes.set(xlabel="depth (band: 95% interval)", ylabel="distance, pixels", ylim=(0, None))
        axes.set_xticks([0, 0.5, 1], ["first", "middle", "last"])
        legend_above(figure, axes, 2)
        return figure
