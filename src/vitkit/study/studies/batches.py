"""What a batch is to the model: `gradient-accumulation-and-normalisation`."""

from __future__ import annotations

from vitkit.figures.panels import legend_above
from vitkit.figures.style import Figure, new_figure
from vitkit.study.numbers import compare, gained
from vitkit.study.table import ROW, Arm, Finding, Setting, Study, Table, dots, draw_apart, losses_apart

PARTS = 8  # of a batch of 64: 8 images each
KINDS = {"layer norm": "", "batch norm": "batch-norm"}
PAIRS = {norm: (norm, f"{norm}, in parts") for norm in KINDS}


class Accumulation(Study):
    name = "gradient-accumulation-and-normalisation"
    question = "Is a batch computed in parts the same training?"
    varies = "layer and batch normalisation; a batch in one piece and in eight parts whose gradients are added up"
    claim = "layer normalisation looks at a token alone, so parts change nothing; batch normalisation sees the part"
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
        early = {norm: float(losses_apart(table, *pair)[:, :10].max()) for norm, pair in PAIRS.items()}
        same = early["layer norm"] < 1e-4  # float32 keeps seven digits; ten steps enlarge an error, not a thousandfold
        gaps = {norm: table.gap(f"{norm}, in parts", norm) for norm in KINDS}
        first = f"with layer normalisation the losses of the two differ by at most {early['layer norm']:.0e} in the "
        first += f"first ten steps, which {'is rounding' if same else 'is more than rounding'}: "
        first += compare("in parts it", "in one piece", gaps["layer norm"])
        second = f"with batch normalisation they differ by {early['batch norm']:.0e}, for every part is normalised by "
        second += f"itself: {compare('in parts it', 'in one piece', gaps['batch norm'])}"
        words = [gained(gap) for gap in gaps.values()]
        return Finding(f"In parts, with layer norm: {words[0]}; with batch norm: {words[1]}", first, second)

    def draw(self, table: Table) -> Figure:
        figure = new_figure(5.0)
        upper, lower = figure.subplots(2, 1, height_ratios=[2.2, ROW * len(table.rows) + 0.2])
        draw_apart(upper, table, PAIRS, "|in parts - in one piece|, loss")
        dots(lower, table.rows, groups=[0, 0, 1, 1])
        legend_above(figure, upper, 2)
        return figure
