"""What a CNN knows before it has seen anything: `data-size` and `shift`."""

from __future__ import annotations

import numpy as np

from vitkit.figures.panels import legend_above
from vitkit.figures.style import Figure, new_figure
from vitkit.model.config import AnyConfig
from vitkit.study.numbers import compare, difference, direction, gained, interval, points, spread, verdict
from vitkit.study.table import Arm, Finding, Setting, Study, Table, accuracies, lines

SHARES = {"1/32": 1 / 32, "1/8": 1 / 8, "1/2": 1 / 2, "all": 1.0}
MODELS = ("ViT", "hybrid", "ResNet")


def _models(s: Setting) -> dict[str, AnyConfig]:
    return {"ViT": s.vit(), "hybrid": s.hybrid(), "ResNet": s.resnet()}


class DataSize(Study):
    name = "data-size"
    question = "Does a ViT need more data than a CNN?"
    varies = "ViT, hybrid and ResNet over 1/32 to all of the images"
    claim = "lacking a CNN's priors (locality, translation equivariance), a ViT loses on few images, but not on many"
    fair = "equal multiply-adds per image within a tenth, the same steps, the same images in the same order"
    reference = "ResNet, all"
    effect, contrast, slowest = 0.03, ("ViT, 1/32", "ResNet, 1/32"), "ViT, all"

    def arms(self, s: Setting) -> list[Arm]:
        return [
            Arm(f"{kind}, {label}", config, share=share, tags={"model": kind, "share": label})
            for kind, config in _models(s).items()
            for label, share in SHARES.items()
        ]

    def find(self, table: Table) -> Finding:
        few, all_ = table.gap("ViT, 1/32", "ResNet, 1/32"), table.gap("ViT, all", "ResNet, all")
        by_share = (np.array([table[f"{m}, {n}"].accuracy for n in ("all", "1/32")]) for m in ("ViT", "ResNet"))
        change = difference(*np.subtract(*by_share).tolist())  # of the gap, from the fewest images to all of them
        ends = [gained(gap, less="-", more="+") for gap in (few, all_)]
        headline = f"ViT against ResNet, 1/32 of the data: {ends[0]}; all: {ends[1]}"
        tail = f"no change of the gap is seen from the smallest to the largest set ({spread(change, unit=' points')})"
        if word := direction(change, "gains on", "falls behind"):
            tail = f"from the smallest to the largest set the ViT {word} the ResNet by {points(change.mean)} points "
            tail += f"({spread(change)})"
        first = f"with 1/32 of the images {compare('the ViT', 'the ResNet', few)}, {verdict(few, -1)}"
        second = f"with all of them {compare('the ViT', 'the ResNet', all_)}; {tail}, {verdict(change, 1)}"
        return Finding(headline, first, second)

    def draw(self, table: Table) -> Figure:
        figure = new_figure(3.4)
        axes = figure.subplots()
        x = [max(table.count("classes"), round(table.count("train") * share)) for share in SHARES.values()]
        lines(axes, x, {kind: accuracies([table[f"{kind}, {label}"] for label in SHARES]) for kind in MODELS})
        axes.set_xscale("log")
        axes.set_xticks(x, [f"{n:,}\n({label})" for n, label in zip(x, SHARES, strict=True)])
        axes.minorticks_off()
        axes.set_xlabel("training images (share of the set)")
        legend_above(figure, axes, 3)
        return figure


def _spoken_of(table: Table) -> int:
    """Which shift the sentences speak of: a seventh of the side."""
    return int(np.abs(table.rows[0].measured("shifts")[0] - table.count("side") / 7).argmin())


def _lost(table: Table, model: str) -> list[float]:
    """Accuracy that a shift costs, by seed."""
    by_shift = table[model].measured("by_shift")  # seeds x shifts
    found: list[float] = (by_shift[:, 0] - by_shift[:, _spoken_of(table)]).tolist()
    return found


class Shift(Study):
    name = "shift"
    question = "What does moving an image do to each kind of model?"
    varies = "ViT, hybrid and ResNet on test images moved by whole pixels"
    claim = "convolutions treat a moved image alike; a ViT must learn every place by itself"
    fair = "equal multiply-adds per image within a tenth, the same steps and images, nothing moved in training"
    reference = "ResNet"
    effect, contrast = 0.03, ("ViT", "ResNet")

    def arms(self, s: Setting) -> list[Arm]:
        return [Arm(kind, config, measure="shift") for kind, config in _models(s).items()]

    def effects(self, table: Table) -> list[float]:
        vit, resnet = (_lost(table, name) for name in self.contrast)
        return [a - b for a, b in zip(vit, resnet, strict=True)]

    def find(self, table: Table) -> Finding:
        shifts, at = table.rows[0].measured("shifts")[0], _spoken_of(table)  # pixels
        lost, gap = {m: _lost(table, m) for m in MODELS}, interval(self.effects(table))
        losses = ", ".join(f"the {m} {100 * interval(values).mean:.1f}" for m, values in lost.items())
        moved = f"{shifts[at]} pixel{'s' if shifts[at] != 1 else ''}"
        first = f"test images moved by {moved} cost {losses} points of accuracy"
        headline = f"Moved by {moved}: open whether ViT or ResNet loses more"
        second = f"it is open whether the ViT or the ResNet loses more ({100 * gap.mean:+.1f} points, {spread(gap)})"
        if more := direction(gap, "more", "less"):
            agrees = direction(gap, "as expected of", "unlike what is expected of")
            second = f"the ViT loses {points(gap.mean)} points {more} than the ResNet"
            headline = f"Moved by {moved}, {second}"
            second += f" ({spread(gap)}), {agrees} a model without translation equivariance"
        return Finding(headline, first, second)

    def draw(self, table: Table) -> Figure:
        figure = new_figure(3.2)
        axes = figure.subplots()
        x = table.rows[0].measured("shifts")[0].tolist()
        lines(axes, x, {kind: 100 * table[kind].measured("by_shift") for kind in MODELS})
        axes.set(xticks=x, xlabel=f"pixels that test images of {table.data['side']} pixels are moved by")
        legend_above(figure, axes, 3)
        return figure
