"""What a CNN knows before it has seen anything: `data-size`, `scaling` and `shift`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from vitkit.figures.panels import legend_above
from vitkit.figures.style import Figure, new_figure
from vitkit.model.config import AnyConfig, StemConfig
from vitkit.study.numbers import compare, difference, direction, gained, interval, points, spread, verdict
from vitkit.study.table import Arm, Finding, Setting, Study, Table, accuracies, line_figure, lines, log_ticks

SHARES = {"1/32": 1 / 32, "1/6": 1 / 6, "all": 1.0}
MODELS = ("ViT", "hybrid", "ResNet")
PRETRAINED = "pre-trained ViT"
TASK = "masked-patch:colour"  # the paper's own
WIDTHS = (24, 48, 96)  # of the ViTs of `scaling`


def _models(s: Setting) -> dict[str, AnyConfig]:
    return {"ViT": s.vit(), "hybrid": s.hybrid(), "ResNet": s.resnet()}


class DataSize(Study):
    name = "data-size"
    question = "Does a ViT need more data than a CNN?"
    varies = "ViT, hybrid, ResNet and a ViT pre-trained without labels, over 1/32 to all of the images"
    claim = "on few images a ViT loses to a CNN, whose priors (locality, translation equivariance) it lacks"
    source = "Dosovitskiy et al. 2021, figures 3 and 4: behind on 9 million images, ahead from 90 million on"
    fair = "equal multiply-adds per image within a tenth, the same steps, images and order; 1/6 has the rate of all"
    reference = "ResNet, all"
    effect, contrast, slowest, data = 0.03, ("ViT, 1/32", "ResNet, 1/32"), "ViT, all", "cifar10@16"
    expected = -1

    def arms(self, s: Setting) -> list[Arm]:
        before = Arm("before", s.vit(classes=0), task=TASK, tags={"kind": "before"})
        kinds = [(kind, config, None) for kind, config in _models(s).items()] + [(PRETRAINED, s.vit(), before)]
        of = partial(Arm, measure="fewshot")
        arms = [
            of(f"{k}, {n}", c, share=share, before=b, rate_of=f"{k}, all" * (n == "1/6"), tags={"model": k, "share": n})
            for k, c, b in kinds
            for n, share in SHARES.items()
        ]
        return [before, *arms]

    def find(self, table: Table) -> Finding:
        few, all_ = table.gap("ViT, 1/32", "ResNet, 1/32"), table.gap("ViT, all", "ResNet, all")
        by_share = (np.array([table[f"{m}, {n}"].accuracy for n in ("all", "1/32")]) for m in ("ViT", "ResNet"))
        change = difference(*np.subtract(*by_share).tolist())  # of the gap, from the fewest images to all of them
        before = table.gap(f"{PRETRAINED}, 1/32", "ViT, 1/32")
        shots = ", ".join(f"{m} {table[f'{m}, all'].measured('fewshot').mean():.1%}" for m in (*MODELS, PRETRAINED))
        ends = [gained(gap, less="-", more="+") for gap in (few, all_)]
        headline = f"ViT against ResNet, 1/32 of the data: {ends[0]}; all: {ends[1]}"
        tail = f"no change of the gap is seen from the smallest to the largest set ({spread(change, unit=' points')})"
        if word := direction(change, "gains on", "falls behind"):
            tail = f"from the smallest to the largest set the ViT {word} the ResNet by {points(change.mean)} points "
            tail += f"({spread(change)})"
        first = f"with 1/32 of the images {compare('the ViT', 'the ResNet', few)}, {verdict(few, -1)}"
        first += f"; pre-training without labels on all images: {compare('it', 'none', before)}; by five images of "
        first += f"each class and ridge regression on the features: {shots}"
        second = f"with all of them {compare('the ViT', 'the ResNet', all_)}; {tail}, {verdict(change, 1)}"
        return Finding(headline, first, second)

    def draw(self, table: Table) -> Figure:
        by_kind = {k: accuracies([table[f"{k}, {n}"] for n in SHARES]) for k in (*MODELS, PRETRAINED)}
        x, words = table.images(SHARES)
        return line_figure(x, by_kind, "labelled training images (share of the set)", words)


def _scaled(stem: StemConfig, share: float) -> StemConfig:
    """So much wider; where it cannot be narrower than it is, with one block in each stage."""
    width = round(share * stem.width)
    layers = (1,) * len(stem.layers) if width % 4 else stem.layers
    return replace(stem, width=max(4, width), layers=layers)


class Scaling(Study):
    name = "scaling"
    question = "What does more compute bring to a ViT, a hybrid and a ResNet?"
    varies = "three sizes of each, about 4 and 16 times the multiply-adds of the smallest"
    claim = "ViTs use compute better than ResNets, hybrids are ahead of ViTs when small; nothing saturates"
    source = "Dosovitskiy et al. 2021, figure 5: 2 to 4 times less compute than a ResNet for one accuracy"
    fair = "the same steps, images and order for all; multiply-adds of the three kinds alike at each size"
    reference = "ViT, M"
    effect, contrast, slowest = 0.02, ("hybrid, S", "ViT, S"), "ViT, L"
    expected = 1

    def arms(self, s: Setting) -> list[Arm]:
        resnet, arms = s.resnet(), list[Arm]()
        for label, width in zip("SML", WIDTHS, strict=True):
            share = width / WIDTHS[1]
            models: dict[str, AnyConfig] = {"ViT": s.vit(width), "hybrid": s.hybrid(share)}
            models["ResNet"] = resnet.replace(stem=_scaled(resnet.stem, share))
            arms += [Arm(f"{kind}, {label}", config, tags={"model": kind}) for kind, config in models.items()]
        return arms

    def find(self, table: Table) -> Finding:
        small, large = (table.gap(f"hybrid, {n}", f"ViT, {n}") for n in "SL")
        grown = {kind: table.gap(f"{kind}, L", f"{kind}, S") for kind in MODELS}
        first = f"small, {compare('the hybrid', 'the ViT', small)}, {verdict(small, 1)}; large, "
        first += compare("the hybrid", "the ViT", large)
        cost = table["ViT, L"].macs / max(1, table["ViT, S"].macs)
        words = (compare(f"the large {kind}", "the small one", gap) for kind, gap in grown.items())
        second = f"with {cost:.0f} times the multiply-adds {'; '.join(words)}"
        ends = [gained(gap, less="-", more="+") for gap in (small, large)]
        return Finding(f"Hybrid against ViT, small: {ends[0]}; large: {ends[1]}", first, second)

    def draw(self, table: Table) -> Figure:
        figure = new_figure(3.4)
        axes = figure.subplots()
        rows = {kind: table.where(model=kind) for kind in MODELS}
        x = {kind: [row.macs / 1e6 for row in found] for kind, found in rows.items()}
        lines(axes, x, {kind: accuracies(found) for kind, found in rows.items()})
        log_ticks(axes, x["ViT"], [f"{place:.2g}" for place in x["ViT"]])
        axes.set_xlabel("million multiply-adds per image")
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
    source = "Dosovitskiy et al. 2021, section 3.1, without a number"
    fair = "equal multiply-adds per image within a tenth, the same steps and images, nothing moved in training"
    reference = "ResNet"
    effect, contrast = 0.03, ("ViT", "ResNet")
    expected = 1

    def arms(self, s: Setting) -> list[Arm]:
        return [Arm(kind, config, measure="moved") for kind, config in _models(s).items()]

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
