"""What a batch is to the model: `gradient-accumulation-and-normalisation`."""

from __future__ import annotations

import numpy as np

from vitkit.figures.panels import legend_above
from vitkit.figures.style import COLOURS, Figure, new_figure
from vitkit.study.numbers import compare, gained
from vitkit.study.table import ROW, Arm, Finding, Setting, Study, Table, dots

PARTS = 8  # of a batch of 64: 8 images each
KINDS = {"layer norm": "", "batch norm": "batch-norm"}


def _apart(table: Table, norm: str) -> np.ndarray:
    """seeds x steps: how far the losses are apart, in one piece and in parts."""
    pairs = zip(table[norm].losses, table[f"{norm}, in parts"].losses, strict=True)
    return np.abs([np.subtract(a, b) for a, b in pairs])


class Accumulation(Study):
    name = "gradient-accumulation-and-normalisation"
    question = "Is a batch computed in parts the same training?"
    varies = "layer and batch normalisation; a batch in one piece and in eight parts whose gradients are added up"
    claim = (
        "layer normalisation looks at one token alone, so parts change nothing; batch normalisation looks at the part"
    )
    source = "Ba et al. 2016 and Ioffe and Szegedy 2015, without a number"
    fair = "the same start of the weights, learning rate, steps, images and order; equal multiply-adds"
    reference = "layer norm"
    effect, contrast = 0.01, ("batch norm, in parts", "batch norm")
    curves = True
    expected = -1

    def arms(self, s: Setting) -> list[Arm]:
        config, arms = s.vit(pooling="mean", class_token=False), list[Arm]()
        for name, variant in KINDS.items():
            arms += [Arm(name, config, variant)]
            arms += [Arm(f"{name}, in parts", config, variant, parts=PARTS, rate_of=name)]
        return arms

    def find(self, table: Table) -> Finding:
        early = {norm: float(_apart(table, norm)[:, :10].max()) for norm in KINDS}
        same = early["layer norm"] < 1e-4  # float32 keeps seven digits; ten steps enlarge an error, not a thousandfold
        gaps = {norm: table.gap(f"{norm}, in parts", norm) for norm in KINDS}
        first = (
            f"with layer normalisation the losses of the two differ by at most {early['layer norm']:.0e} in the first "
        )
        first += f"ten steps, which {'is rounding' if same else 'is more than rounding'}: "
        first += compare("in parts it", "in one piece", gaps["layer norm"])
        second = f"with batch normalisation they differ by {early['batch norm']:.0e}, for every part is normalised by "
        second += f"itself: {compare('in parts it', 'in one piece', gaps['batch norm'])}"
        words = [gained(gap) for gap in gaps.values()]
        return Finding(f"In parts, with layer norm: {words[0]}; with batch norm: {words[1]}", first, second)

    def draw(self, table: Table) -> Figure:
        figure = new_figure(5.0)
        upper, lower = figure.subplots(2, 1, height_ratios=[2.2, ROW * len(table.rows) + 0.2])
        for number, norm in enumerate(KINDS):
            for seed, apart in enumerate(_apart(table, norm)):
                label = norm if not seed else None
                steps, shown = table[norm].loss_steps, np.maximum(apart, 1e-9)
                upper.plot(steps, shown, color=COLOURS[number], linewidth=0.8, label=label)
        upper.set(yscale="log", ylabel="|in parts - in one piece|, loss", xlabel="step (one line per seed)")
        upper.yaxis.set_major_formatter("{x:g}")
        upper.minorticks_off()
        upper.grid(axis="y")
        dots(lower, table.rows, groups=[0, 0, 1, 1])
        legend_above(figure, upper, 2)
        return figure
