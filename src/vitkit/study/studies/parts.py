"""Parts of the model that can be chosen: `positions`, `pooling`, `patch-size`, `depth-width`, `dropout`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitkit.explain.figures.style import new_figure
from vitkit.model.config import ViTConfig
from vitkit.study.draw import ROW, accuracies, dot_figure, dots, lines, note, plain
from vitkit.study.numbers import compare, gained, sentence, verdict
from vitkit.study.table import Arm, Finding, Row, Setting, Study, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAME = "the same steps, pictures and order; multiply-adds as stated in the table"

# --- positions ---------------------------------------------------------------------------------------

KINDS = {
    "none": "none",
    "1-D learned": "learned",
    "2-D learned": "learned-2d",
    "relative": "relative",
    "sin-cos": "sincos-2d",
    "RoPE": "rope-2d",
}


def _find_positions(table: Table) -> Finding:
    none = table.gap("none", "1-D learned")
    kinds = [k for k in KINDS if k != "none"]
    best, worst = table.best(kinds), table.worst(kinds)
    among = table.gap(best, worst, pairs=10)
    paper = "the paper (5-shot ImageNet: 61.4 against 64.2)"
    first = f"{compare('no position encoding', 'learned 1-D positions', none)}, {verdict(none, -1, paper)}"
    second = f"of the five kinds {best} is best and {worst} worst: {compare(best, worst, among)}, "
    second += verdict(among, 0, "the paper, where they are alike")
    return Finding(f"Leaving positions out: {gained(none)}", (sentence(first), sentence(second)))


POSITIONS = Study(
    name="positions",
    question="Do position encodings matter, and which?",
    varies="none, 1-D, 2-D, relative, sin-cos, RoPE",
    claim="none is worse, the kinds are alike",
    fair=SAME,
    arms=lambda s: [Arm(name, s.vit(positions=kind)) for name, kind in KINDS.items()],
    find=_find_positions,
    draw=plain,
    reference="1-D learned",
)

# --- pooling -----------------------------------------------------------------------------------------


def _pooled(s: Setting) -> list[Arm]:
    return [
        Arm("class token", s.vit()),
        Arm("mean", s.vit(pooling="mean", class_token=False)),
        Arm("MAP", s.vit(pooling="map", class_token=False)),
    ]


def _find_pooling(table: Table) -> Finding:
    mean = table.gap("mean", "class token")
    probe = table.gap("MAP", "class token")
    rates = f"at learning rates of their own ({_rate(table['mean'])} and {_rate(table['class token'])})"
    paper = "the paper, where both work alike once each has its own rate"
    first = f"{rates} {compare('mean pooling', 'a class token', mean)}, {verdict(mean, 0, paper)}"
    second = f"attention pooling: {compare('MAP', 'a class token', probe)}"
    return Finding(f"Mean instead of a class token: {gained(mean)}", (sentence(first), sentence(second)))


def _rate(row: Row) -> str:
    return "?" if row.lr is None else f"{row.lr:g}"


POOLING = Study(
    name="pooling",
    question="Class token or mean over the patches?",
    varies="cls, mean, map; each at its own best learning rate",
    claim="a class token and the mean work alike, but want different learning rates",
    fair=SAME,
    arms=_pooled,
    find=_find_pooling,
    draw=plain,
    reference="class token",
)

# --- patch-size --------------------------------------------------------------------------------------


def _patches(s: Setting) -> list[Arm]:
    sizes = {8: (1, 2, 4, 8), 28: (2, 4, 7, 14)}.get(s.side, (2, 4, 8, 16))
    arms = []
    for size in sizes:
        config = s.vit(patch_size=size, width=32, depth=2)
        arms.append(Arm(f"patch {size}", config, about={"patch": size, "tokens": config.tokens}))
    return arms


def _find_patch(table: Table) -> Finding:
    fine, coarse = table.rows[0], table.rows[-1]
    best = table[table.best([row.name for row in table.rows])]
    found = table.gap(fine.name, coarse.name)
    cost, cost_of_best = (row.macs / max(1, coarse.macs) for row in (fine, best))
    headline = f"{sentence(fine.name)[:-1]} against {coarse.name}: {gained(found)}, at {cost:.0f} times the cost"
    first = f"{compare(fine.name, coarse.name, found)}, at {cost:.0f} times the multiply-adds, "
    first += verdict(found, 1, "the usual experience")
    second = f"{best.name} ({best.about['tokens']} tokens) is best here"
    if best.name != coarse.name:
        picked = table.gap(best.name, coarse.name, pairs=len(table.rows) - 1)
        second += f": {compare(best.name, coarse.name, picked)}, at {cost_of_best:.1f} times the cost"
    else:
        second += ": in so short a training the cheapest learns fastest"
    return Finding(headline, (sentence(first), sentence(second)))


def _draw_patch(table: Table) -> Figure:
    figure = new_figure(3.2)
    axes = figure.subplots()
    x = [row.macs / 1e6 for row in table.rows]
    lines(axes, x, {"": accuracies(table.rows)}, room=0.35)
    means = accuracies(table.rows).mean(axis=0)
    for row, place, mean in zip(table.rows, x, means, strict=True):
        words = f"{row.name}\n{row.about['tokens']} tokens"
        note(axes, place, mean, words, left=means[0] > means[-1])  # the first has most tokens, and lies on the right
    axes.set_xscale("log")
    axes.margins(x=0.2)
    axes.set_xlabel("million multiply-adds per picture (logarithmic)")
    return figure


PATCH_SIZE = Study(
    name="patch-size",
    question="How do tokens trade against accuracy and cost?",
    varies="patches from coarse to fine at fixed width",
    claim="smaller patches give more tokens, more cost and more accuracy",
    fair="the same steps, pictures and order; the cost differs and is the point",
    arms=_patches,
    find=_find_patch,
    draw=_draw_patch,
    reference="",
)

# --- depth-width -------------------------------------------------------------------------------------

DEPTHS = (1, 2, 3, 7)


def _macs(config: ViTConfig) -> int:
    """patches + depth (4 T D^2 + 2 T^2 D + 2 T D M) + head: enough to find a width."""
    t, d = config.tokens, config.width
    values = config.patch_size[0] * config.patch_size[1] * config.channels
    block = 4 * t * d * d + 2 * t * t * d + 2 * t * d * config.mlp_width
    return (t - 1) * values * d + config.depth * block + d * config.classes


def _shapes(s: Setting) -> list[Arm]:
    goal = _macs(s.vit())
    arms = []
    for depth in DEPTHS:
        made = [s.vit(depth=depth, width=width) for width in range(16, 161, 4)]
        config = min(made, key=lambda c: abs(_macs(c) - goal))
        arms.append(Arm(f"{depth} x {config.width}", config, about={"depth": depth, "width": config.width}))
    return arms


def _find_shape(table: Table) -> Finding:
    names = [row.name for row in table.rows]
    wide, deep, count = names[0], names[-1], len(names)
    found = table.gap(deep, wide)
    slow = table[deep].seconds / max(1e-9, table[wide].seconds)
    first = f"at equal multiply-adds {compare(f'depth x width {deep}', wide, found)}; "
    first += f"equal multiply-adds are not equal time, the deepest takes {slow:.1f} times as long"
    best, usual = table.best(names), names[2]
    second = f"{best} is best"
    if best != usual:
        second += f"; {compare(best, f'the {usual} of the other studies', table.gap(best, usual, pairs=count - 1))}"
    return Finding(f"Deep ({deep}) instead of wide ({wide}): {gained(found)}", (sentence(first), sentence(second)))


def _layers(row: Row) -> str:
    depth = row.about["depth"]
    return f"{depth} layer{'s' if depth > 1 else ''} of {row.about['width']}"


DEPTH_WIDTH = Study(
    name="depth-width",
    question="How to spend a budget: deep or wide?",
    varies="depth 1 to 7 with the width that keeps the multiply-adds equal",
    claim="depth helps more than width, with diminishing returns",
    fair="equal multiply-adds per picture within a tenth, the same steps, pictures and order",
    arms=_shapes,
    find=_find_shape,
    draw=lambda table: dot_figure(table.rows, [_layers(row) for row in table.rows]),
    reference="3 x 48",
)

# --- dropout -----------------------------------------------------------------------------------------

RATES = (0.0, 0.1, 0.3)
PARTS = {"1/16": 1 / 16, "all": 1.0}


def _dropped(s: Setting) -> list[Arm]:
    return [
        Arm(f"{rate:g}, {label}", s.vit(dropout=rate), share=share, about={"rate": rate, "share": label})
        for label, share in PARTS.items()
        for rate in RATES
    ]


def _find_dropout(table: Table) -> Finding:
    clauses, heads = [], []
    for label, of in (("1/16", "1/16 of the pictures"), ("all", "all of them")):
        found = {r: table.gap(f"{r:g}, {label}", f"0, {label}", pairs=len(RATES) - 1) for r in RATES if r}
        told = ", ".join(compare(f"dropout {rate:g}", "none", gap) for rate, gap in found.items())
        clauses.append(f"with {of} {told}")
        heads.append(gained(found[RATES[-1]]))
    headline = f"Dropout {RATES[-1]:g} with few pictures: {heads[0]}; with all: {heads[1]}"
    return Finding(headline, (sentence(clauses[0]), sentence(clauses[1])))


def _draw_dropout(table: Table) -> Figure:
    figure = new_figure(ROW * len(table.rows) + 1.3)
    panels = figure.subplots(2, 1)
    for number, (axes, label) in enumerate(zip(panels, PARTS, strict=True)):
        rows = table.where(share=label)
        dots(axes, rows, [f"dropout {row.about['rate']:g}" for row in rows], [number] * len(rows))
        axes.set_title("all of the pictures" if label == "all" else f"{label} of the pictures", loc="left")
    panels[0].set_xlabel("")
    return figure


DROPOUT = Study(
    name="dropout",
    question="Does dropout help a short training?",
    varies="dropout 0, 0.1 and 0.3 on few and on all pictures",
    claim="the paper drops 0.1 when it trains on ImageNet alone, and nothing on larger sets",
    fair=SAME,
    arms=_dropped,
    find=_find_dropout,
    draw=_draw_dropout,
    reference="0, all",
)
