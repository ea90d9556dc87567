"""From pixels to tokens: `patch-size`, `patch-embed`, and `resolution`, fine-tuning on more pixels."""

from __future__ import annotations

from functools import partial

from vitkit.figures.panels import legend_above
from vitkit.figures.style import Figure, new_figure
from vitkit.study.numbers import compare, gained, sentence, verdict
from vitkit.study.table import (
    ROW,
    Arm,
    Finding,
    Setting,
    Study,
    Table,
    Tags,
    accuracies,
    curves,
    dots,
    draw_apart,
    line,
    line_figure,
    losses_apart,
)

CONV, LINEAR, STEM = "convolution", "linear map", "convolutional stem"
METHODS = ("official", "timm", "huggingface", "torchvision", "dinov2")  # of resizing positions
SHORT = 0.25  # fine-tuning takes a quarter of the steps


class PatchSize(Study):
    name = "patch-size"
    question = "How do tokens trade against accuracy and cost?"
    varies = "patches from coarse to fine at fixed width"
    claim = "smaller patches give more tokens, more cost and more accuracy"
    source = "Dosovitskiy et al. 2021, table 5: B/16 reaches 2.7 points more than B/32 after ImageNet-21k"
    fair = "the same steps, images and order; the cost differs and is the point"
    expected = 1

    def arms(self, s: Setting) -> list[Arm]:
        sizes = {8: (1, 2, 4, 8), 28: (2, 4, 7, 14)}.get(s.side, (2, 4, 8, 16))
        made = {size: s.vit(patch_size=size, width=32, depth=2) for size in sizes}
        return [Arm(f"patch {n}", config, tags={"patch": n, "tokens": config.tokens}) for n, config in made.items()]

    def find(self, table: Table) -> Finding:
        fine, coarse = table.rows[0], table.rows[-1]
        best = table[table.best([row.name for row in table.rows])]
        gap = table.gap(fine.name, coarse.name)
        cost, cost_of_best = (row.macs / max(1, coarse.macs) for row in (fine, best))
        headline = f"{sentence(fine.name)[:-1]} against {coarse.name}: {gained(gap)}, at {cost:.0f} times the cost"
        first = f"{compare(fine.name, coarse.name, gap)}, at {cost:.0f} times the multiply-adds, "
        first += verdict(gap, 1, "the usual experience")
        why = "in so short a training the cheapest learns fastest"
        if best is not coarse:
            picked = table.gap(best.name, coarse.name, pairs=len(table.rows) - 1)
            why = f"{compare(best.name, coarse.name, picked)}, at {cost_of_best:.1f} times the cost"
        second = f"{best.name} ({best.tags['tokens']} tokens) is best here: {why}"
        return Finding(headline, first, second)

    def draw(self, table: Table) -> Figure:
        x = [row.macs / 1e6 for row in table.rows]
        words = [f"{r.macs / 1e6:.2g}\n{r.name}\n{r.tags['tokens']} tokens" for r in table.rows]
        return line_figure(x, {"": accuracies(table.rows)}, "million multiply-adds per image", words, room=0.35)


class PatchEmbed(Study):
    name = "patch-embed"
    question = "Linear or convolutional patch embedding?"
    varies = "a linear map of flattened patches, a convolution of equal stride, a convolutional stem"
    claim = "the linear map and the convolution are the same function; a convolutional stem reaches more"
    source = "Dosovitskiy et al. 2021, section 3.1; of a stem Xiao et al. 2021 say that it gains 1 to 2 points"
    fair = "the first two start from equal weights at one rate; the stem has equal multiply-adds within a tenth"
    reference = CONV
    contrast = (STEM, CONV)
    curves = True
    expected = 1

    def arms(self, s: Setting) -> list[Arm]:
        linear = Arm(LINEAR, s.vit(), "linear-patches", rate_of=CONV)
        return [Arm(CONV, s.vit(), "conv-patches"), linear, Arm(STEM, s.hybrid())]

    def find(self, table: Table) -> Finding:
        gaps = losses_apart(table, CONV, LINEAR)
        early, late = float(gaps[:, :10].max()), float(gaps.max())
        stem = table.gap(STEM, CONV)
        alike = "differ"
        first = f"the losses of the two forms differ by {early:.0e} within ten steps: they are not one function"
        if early < 1e-4:  # float32 keeps seven digits; ten steps enlarge an error, but not a thousandfold
            alike = "learn alike, to rounding"
            first = (
                f"from equal weights the losses of the two forms differ by at most {early:.0e} in the first ten steps, "
                f"which is rounding, and by {late:.0e} in all, as training enlarges it "
                f"({compare(LINEAR, CONV, table.gap(LINEAR, CONV))})"
            )
        second = f"{compare('a convolutional stem', 'plain patches', stem)}, at equal multiply-adds"
        return Finding(f"Linear and convolutional patches {alike}; a stem: {gained(stem)}", first, second)

    def draw(self, table: Table) -> Figure:
        figure = new_figure(5.6)
        upper, middle, lower = figure.subplots(3, 1, height_ratios=[2.2, 1.5, ROW * 3 + 0.2])
        curves(upper, table.rows)
        upper.set(xlabel="", ylim=(0, None))
        draw_apart(middle, table, {"": (CONV, LINEAR)}, "|linear - conv|")
        dots(lower, table.rows, groups=[0, 1, 2])
        legend_above(figure, upper, 3)
        return figure


class Resolution(Study):
    name = "resolution"
    question = "What does fine-tuning at a higher resolution bring, and how are positions best resized?"
    varies = "five resize methods, fresh positions, staying small, starting large"
    claim = "fine-tuning on more pixels than in pre-training helps; positions are resized in 2-D"
    source = "Dosovitskiy et al. 2021, section 3.2, after Touvron et al. 2019: from 224 to 384 pixels and more"
    fair = "the same steps of fine-tuning, a quarter of the training; from scratch gets both; more pixels cost more"
    reference = "small images again"
    effect, contrast, data = 0.01, (METHODS[0], "small images again"), "cifar10@32/4"
    expected = 1

    def arms(self, s: Setting) -> list[Arm]:
        low, high, patch = {8: (6, 8, 2), 28: (20, 28, 4)}.get(s.side, (20, 32, 4))
        small, large = (s.vit(image_size=n, patch_size=patch) for n in (low, high))
        before = Arm("before", small, tags={"kind": "before", "side": low})
        tags: Tags = {"kind": "fine", "side": high}
        fine = partial(Arm, before=before, length=SHORT, tags=tags)
        untrained = partial(Arm, before=before, length=0, measure="sizes")
        small_by, large_by = ({m: config.replace(position_resize=m) for m in METHODS} for config in (small, large))
        return [
            before,
            *(untrained(f"{method}, untrained", config, tags={"way": method}) for method, config in small_by.items()),
            fine(METHODS[0], large_by[METHODS[0]]),
            *(fine(method, large_by[method], rate_of=METHODS[0]) for method in METHODS[1:]),
            fine("fresh positions", large, fresh_positions=True),
            fine("small images again", small),
            Arm("large from scratch", large, length=1 + SHORT, tags=tags),
        ]

    def find(self, table: Table) -> Finding:
        stay, fresh = (table.gap("official", other) for other in ("small images again", "fresh positions"))
        best, worst = table.best(METHODS), table.worst(METHODS)
        low, high = table["before"].tags["side"], table["official"].tags["side"]
        first = f"after fine-tuning at {high} instead of {low} pixels "
        first += f"{compare('the model', 'one that stays small', stay)}, {verdict(stay, 1)}"
        second = f"resized positions against fresh ones: {compare('resized', 'fresh', fresh)}; of the five resize "
        second += f"methods {best} is best and {worst} worst: "
        second += compare(best, worst, table.gap(best, worst, pairs=10))
        return Finding(f"Fine-tuning on more pixels: {gained(stay)}", first, second)

    def draw(self, table: Table) -> Figure:
        fine = table.where(kind="fine")
        figure = new_figure(2.7 + ROW * len(fine) + 0.6)
        upper, lower = figure.subplots(2, 1, height_ratios=[2.2, ROW * len(fine) + 0.2])
        sizes = table[f"{METHODS[0]}, untrained"].measured("sizes")[0].tolist()
        for number, method in enumerate(METHODS):
            reached = 100 * table[f"{method}, untrained"].measured("by_size")  # seeds x sizes
            line(upper, sizes, reached - reached[:, :1], method, number)
        words = {"xlabel": "pixels a side, before any fine-tuning", "ylabel": f"points against {sizes[0]:g} pixels"}
        upper.set(xticks=sizes, **words)
        dots(lower, fine, groups=[*range(len(METHODS)), 0, 0, 0])
        lower.set_xlabel("test accuracy after fine-tuning, %")
        legend_above(figure, upper, 3)
        return figure
