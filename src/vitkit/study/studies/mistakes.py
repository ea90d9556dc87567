"""What goes wrong in code found in articles: `attention-bug` and `scale-in-softmax`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitkit.explain.figures.style import new_figure
from vitkit.study.draw import ROW, curves, dots, legend_above, plain
from vitkit.study.numbers import compare, gained, percent, sentence
from vitkit.study.table import Arm, Finding, Setting, Study, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# --- attention-bug -----------------------------------------------------------------------------------

OURS, TRUE, FALSE, CURE = "ours", "batch_first=True", "batch_first=False", "False, q and k detached"
FALSE_CLS, OURS_CLS = "False, class token", "ours, class token"


def _bugs(s: Setting) -> list[Arm]:
    mean, cls = s.vit(pooling="mean", class_token=False), s.vit()
    arms = {
        OURS: (mean, ""),
        TRUE: (mean, "torch"),
        FALSE: (mean, "torch-batch"),
        CURE: (mean, "torch-detach"),
        OURS_CLS: (cls, ""),
        FALSE_CLS: (cls, "torch-batch"),
    }
    return [Arm(name, config, variant, measure="neighbours") for name, (config, variant) in arms.items()]


def _mean(table: Table, arm: str, key: str) -> float:
    return float(np.mean([one[key] for one in table[arm].extra]))


def _find_bug(table: Table) -> Finding:
    false, cure = table.gap(FALSE, TRUE), table.gap(CURE, TRUE)
    equal = max(one["differs_from_ours"] for one in table[TRUE].extra)
    same = equal < 1e-4
    fault = "is not at fault" if same else "computes something else"
    first = (
        f"PyTorch's nn.MultiheadAttention {fault}: with batch_first=True its logits equal ours to {equal:.0e} "
        f"({compare('it', 'ours', table.gap(TRUE, OURS))}), with the default batch_first=False "
        f"{compare('the model', 'the right one', false)}"
    )
    changed, chance = _mean(table, FALSE, "changed"), 1 / table.data["classes"]
    cause = "the cause is attention across the batch" if changed else "attention stays in its picture"
    ours = percent(_mean(table, OURS, "changed"))
    blind = f"a class token, which then never sees its patches, reaches {percent(table[FALSE_CLS].mean.mean)}"
    second = (
        f"{cause}: {percent(changed)} of the answers change when the other pictures of the batch do (ours: {ours}), "
        f"and {blind}, where guessing gives {percent(chance)}; "
        f"detaching query and key: {compare('it', 'the plain default', table.gap(CURE, FALSE))}, "
        f"{compare('it', 'the right model', cure)}"
    )
    headline = f"batch_first=False attends across the batch: {gained(false)}"
    return Finding(headline, (sentence(first), sentence(second)))


def _draw_bug(table: Table) -> Figure:
    shown = (OURS, TRUE, FALSE, CURE, FALSE_CLS)
    figure = new_figure(2.6 + ROW * len(table.rows) + 0.9)
    upper, lower = figure.subplots(2, 1, height_ratios=[2.4, ROW * len(table.rows) + 0.3])
    curves(upper, [table[name] for name in shown])
    upper.set_ylim(bottom=0)
    changed = [f"{row.name}\n{percent(_mean(table, row.name, 'changed'))} change with the batch" for row in table.rows]
    dots(lower, table.rows, changed, [0, 1, 2, 3, 0, 4])
    lower.tick_params(axis="y", labelsize=8)
    legend_above(figure, upper, 2)
    return figure


ATTENTION_BUG = Study(
    name="attention-bug",
    question="Why does PyTorch's nn.MultiheadAttention seem to train badly?",
    varies="batch_first False and True, the detach cure, ours; mean pooling and class token",
    claim="an article blames the module and detaches query and key",
    fair="the same start of the weights, steps, pictures and order; equal multiply-adds",
    arms=_bugs,
    find=_find_bug,
    draw=_draw_bug,
    reference=OURS,
    curves=True,
)

# --- scale-in-softmax --------------------------------------------------------------------------------

RIGHT, AFTER, WIDTH = "softmax(qk/√k) v", "softmax(qk)/√d v", "softmax(qk/√d) v"


def _find_scale(table: Table) -> Finding:
    after, width = table.gap(AFTER, RIGHT), table.gap(WIDTH, RIGHT)
    first = f"{compare('the scale after the softmax by the root of the width', 'the right scale', after)}"
    if after.covers_zero or after.mean > 0:
        first += ", so in so short a training the mistake does not show in the accuracy"
    second = f"inside the softmax but of the whole width: {compare('it', 'the right scale', width)}"
    return Finding(f"The scale after the softmax: {gained(after)}", (sentence(first), sentence(second)))


def _scales(s: Setting) -> list[Arm]:
    return [Arm(RIGHT, s.vit()), Arm(AFTER, s.vit(), "scale-after"), Arm(WIDTH, s.vit(), "scale-width")]


SCALE = Study(
    name="scale-in-softmax",
    question="Does it matter where the attention scores are scaled, and by what?",
    varies="inside by the root of the head width (right), after the softmax by that of the model (wrong), inside by it",
    claim="the articles' code divides by the root of the model's width, after the softmax",
    fair="the same start of the weights, steps, pictures and order; equal multiply-adds",
    arms=_scales,
    find=_find_scale,
    draw=plain,
    reference=RIGHT,
)
