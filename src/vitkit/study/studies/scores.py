"""Why attention is written as it is: `why-sqrt`, `how-many-heads`."""

from __future__ import annotations

from vitkit.figures.style import Figure
from vitkit.study.numbers import compare, gained, verdict
from vitkit.study.studies.attention import SAME_START
from vitkit.study.table import Arm, Finding, Setting, Study, Table, accuracies, line_figure

WIDTHS = (8, 32, 128)  # of a head
SCALED, UNSCALED = "divided by √k", "not divided"
HEADS = (1, 2, 4, 8, 16)


class WhySqrt(Study):
    name = "why-sqrt"
    question = "Why are the scores divided by the root of the head's width?"
    varies = "one head of 8, 32 and 128 channels, with and without the division; scores before and after training"
    claim = "a product of k channels has a deviation that grows like √k; undivided, the softmax is driven to its ends"
    source = "Vaswani et al. 2017, section 3.2.1, without a number"
    fair = f"{SAME_START} at each width"
    effect, slowest = 0.02, f"{UNSCALED}, {WIDTHS[-1]}"
    contrast = (f"{UNSCALED}, {WIDTHS[-1]}", f"{SCALED}, {WIDTHS[-1]}")
    expected = -1

    def arms(self, s: Setting) -> list[Arm]:
        models = {k: s.vit(heads=1, head_width=k) for k in WIDTHS}
        fresh = [Arm(f"fresh, {k}", c, "scale-none", length=0, measure="scores") for k, c in models.items()]
        trained = [
            Arm(f"{word}, {k}", config, variant, measure="scores", tags={"how": word, "k": k})
            for word, variant in ((SCALED, ""), (UNSCALED, "scale-none"))
            for k, config in models.items()
        ]
        return [*trained, *fresh]

    def find(self, table: Table) -> Finding:
        narrow, wide = WIDTHS[0], WIDTHS[-1]
        start, unit = (
            [float(table[f"fresh, {k}"].measured(what).mean()) for k in (narrow, wide)]
            for what in ("deviation", "unit")
        )
        evenness = [float(table[f"{how}, {wide}"].measured("evenness").mean()) for how in (SCALED, UNSCALED)]
        gaps = {k: table.gap(f"{UNSCALED}, {k}", f"{SCALED}, {k}") for k in (narrow, wide)}
        grown, root = unit[1] / max(1e-9, unit[0]), (wide / narrow) ** 0.5
        first = f"queries and keys of deviation 1 give undivided scores that deviate by {unit[0]:.2g} with a head of "
        first += f"{narrow} and by {unit[1]:.2g} with one of {wide}, {grown:.1f} times as much (√k: {root:.1f} times); "
        first += f"as they are before training it is {start[0]:.2g} and {start[1]:.2g}"
        first += ", since wider layers start with smaller weights" * (start[1] < grown * start[0])
        first += f"; after it attention with the wide head is {evenness[1]:.0%} as even as it can be, divided "
        first += f"{evenness[0]:.0%}"
        words = [f"with a head of {k} {compare('no division', 'the division', gap)}" for k, gap in gaps.items()]
        second = f"{'; '.join(words)}, {verdict(gaps[wide], -1, 'the expectation')}"
        return Finding(f"Not dividing, head of {wide}: {gained(gaps[wide])}", first, second)

    def draw(self, table: Table) -> Figure:
        scales = {how: accuracies([table[f"{how}, {k}"] for k in WIDTHS]) for how in (SCALED, UNSCALED)}
        return line_figure(WIDTHS, scales, "channels of the head", room=0.35)


class HowManyHeads(Study):
    name = "how-many-heads"
    question = "How many heads?"
    varies = "1 to 16 heads at one width of the model"
    claim = "several heads can look at several places at once; beyond that more of them change little"
    source = "Vaswani et al. 2017, table 3: one head is 0.9 BLEU worse than the best number of them"
    fair = "equal parameters and nearly equal multiply-adds, the same steps, images and order"
    reference = "4 heads"
    effect, contrast, slowest = 0.02, ("1 head", "4 heads"), "4 heads"
    expected = -1

    def arms(self, s: Setting) -> list[Arm]:
        return [Arm(f"{n} head{'s' if n > 1 else ''}", s.vit(heads=n), tags={"heads": n}) for n in HEADS]

    def find(self, table: Table) -> Finding:
        one, many = (table.gap(name, "4 heads") for name in ("1 head", "16 heads"))
        names = [row.name for row in table.rows]
        best = table.best(names)
        first = f"{compare('one head', 'four', one)}, {verdict(one, -1, 'the claim')}"
        second = f"{compare('sixteen heads of three channels', 'four of twelve', many)}; {best} is best"
        if best != "4 heads":
            second += f": {compare(best, '4 heads', table.gap(best, '4 heads', pairs=len(HEADS) - 1))}"
        return Finding(f"One head instead of four: {gained(one)}", first, second)

    def draw(self, table: Table) -> Figure:
        return line_figure(HEADS, {"": accuracies(table.rows)}, "heads", room=0.35)
