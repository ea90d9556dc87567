"""What a CNN knows before it has seen anything: `data-size` and `shift`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitkit.explain.figures.style import new_figure
from vitkit.study.draw import accuracies, legend_above, lines, measured
from vitkit.study.numbers import Interval, compare, difference, gained, interval, points, sentence, spread, verdict
from vitkit.study.table import Arm, Finding, Setting, Study, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = {"1/32": 1 / 32, "1/8": 1 / 8, "1/2": 1 / 2, "all": 1.0}
MODELS = ("ViT", "hybrid", "ResNet")


def _models(s: Setting) -> dict[str, Arm]:
    return {"ViT": Arm("ViT", s.vit()), "hybrid": Arm("hybrid", s.hybrid()), "ResNet": Arm("ResNet", s.resnet())}


# --- data-size ---------------------------------------------------------------------------------------


def _sized(s: Setting) -> list[Arm]:
    return [
        Arm(f"{kind}, {label}", arm.config, share=share, about={"model": kind, "share": label})
        for kind, arm in _models(s).items()
        for label, share in SHARES.items()
    ]


def _gap_change(table: Table) -> Interval:
    """(ViT - ResNet with all pictures) - (ViT - ResNet with the fewest)."""
    by = {(m, s): table[f"{m}, {s}"].accuracy for m in ("ViT", "ResNet") for s in ("1/32", "all")}
    late = [v - r for v, r in zip(by["ViT", "all"], by["ResNet", "all"], strict=True)]
    early = [v - r for v, r in zip(by["ViT", "1/32"], by["ResNet", "1/32"], strict=True)]
    return difference(late, early)


def _find_size(table: Table) -> Finding:
    few, all_ = table.gap("ViT, 1/32", "ResNet, 1/32"), table.gap("ViT, all", "ResNet, all")
    change = _gap_change(table)
    ends = [gained(found, less="-", more="+").replace("- ", "-").replace("+ ", "+") for found in (few, all_)]
    headline = f"ViT against ResNet, 1/32 of the data: {ends[0]}; all: {ends[1]}"
    if change.covers_zero:
        tail = f"no change of the gap is seen from the smallest to the largest set ({spread(change, unit=' points')})"
    else:
        word = "gains on" if change.mean > 0 else "falls behind"
        tail = f"from the smallest to the largest set the ViT {word} the ResNet by {points(change.mean)} points "
        tail += f"({spread(change)})"
    first = f"with 1/32 of the pictures {compare('the ViT', 'the ResNet', few)}, {verdict(few, -1)}"
    second = f"with all of them {compare('the ViT', 'the ResNet', all_)}; {tail}, {verdict(change, 1)}"
    return Finding(headline, (sentence(first), sentence(second)))


def _draw_size(table: Table) -> Figure:
    figure = new_figure(3.4)
    axes = figure.subplots()
    train = table.data["train"]
    x = [max(table.data["classes"], round(train * share)) for share in SHARES.values()]
    lines(axes, x, {kind: accuracies([table[f"{kind}, {label}"] for label in SHARES]) for kind in MODELS})
    axes.set_xscale("log")
    axes.set_xticks(x, [f"{n:,}\n({label})" for n, label in zip(x, SHARES, strict=True)])
    axes.minorticks_off()
    axes.set_xlabel("training pictures (share of the set)")
    legend_above(figure, axes, 3)
    return figure


DATA_SIZE = Study(
    name="data-size",
    question="Does a ViT need more data than a CNN?",
    varies="ViT, hybrid and ResNet over 1/32 to all of the pictures",
    claim="lacking a CNN's priors (locality, translation equivariance), a ViT loses on few pictures, but not on many",
    fair="equal multiply-adds per picture within a tenth, the same steps, the same pictures in the same order",
    arms=_sized,
    find=_find_size,
    draw=_draw_size,
    reference="ResNet, all",
)


# --- shift -------------------------------------------------------------------------------------------


def _shifted(s: Setting) -> list[Arm]:
    return [Arm(kind, arm.config, measure="shift") for kind, arm in _models(s).items()]


def _at(table: Table) -> int:
    """The place in the list of shifts that the sentences speak of: about a seventh of the side."""
    shifts = table.rows[0].extra[0]["shifts"]
    wanted = table.data["side"] / 7
    return min(range(len(shifts)), key=lambda i: abs(shifts[i] - wanted))


def _find_shift(table: Table) -> Finding:
    at = _at(table)
    pixels = table.rows[0].extra[0]["shifts"][at]
    lost = {m: [one["by_shift"][0] - one["by_shift"][at] for one in table[m].extra] for m in MODELS}
    found = difference(lost["ViT"], lost["ResNet"])
    means = {m: interval(v).mean for m, v in lost.items()}
    told = ", ".join(f"the {m} {100 * means[m]:.1f}" for m in MODELS)
    moved = f"{pixels} pixel{'s' if pixels != 1 else ''}"
    first = f"test pictures moved by {moved} cost {told} points of accuracy"
    if found.covers_zero:
        headline = f"Moved by {moved}: no difference seen between ViT and ResNet"
        second = (
            f"no difference seen between the losses of ViT and ResNet ({100 * found.mean:+.1f} points, "
            f"{spread(found)}), so a CNN's translation equivariance does not show here"
        )
    else:
        more, agrees = ("more", "as expected of") if found.mean > 0 else ("less", "unlike what is expected of")
        headline = f"Moved by {moved}, the ViT loses {points(found.mean)} points {more} than the ResNet"
        second = (
            f"the ViT loses {points(found.mean)} points {more} than the ResNet ({spread(found)}), "
            f"{agrees} a model without translation equivariance"
        )
    return Finding(headline, (sentence(first), sentence(second)))


def _draw_shift(table: Table) -> Figure:
    figure = new_figure(3.2)
    axes = figure.subplots()
    x = table.rows[0].extra[0]["shifts"]
    lines(axes, x, {kind: measured(table[kind], "by_shift") for kind in MODELS})
    axes.set_xticks(x)
    axes.set_xlabel(f"pixels that test pictures of {table.data['side']} pixels are moved by")
    legend_above(figure, axes, 3)
    return figure


SHIFT = Study(
    name="shift",
    question="What does moving a picture do to each kind of model?",
    varies="ViT, hybrid and ResNet on test pictures moved by whole pixels",
    claim="convolutions treat a moved picture alike; a ViT must learn every place anew",
    fair="equal multiply-adds per picture within a tenth, the same steps and pictures, nothing moved in training",
    arms=_shifted,
    find=_find_shift,
    draw=_draw_shift,
    reference="ResNet",
)
