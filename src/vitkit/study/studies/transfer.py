"""`resolution`: fine-tuning on more pixels with resized positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitkit.explain.figures.style import new_figure
from vitkit.study.draw import ROW, dots, legend_above, lines, measured
from vitkit.study.numbers import compare, gained, sentence, verdict
from vitkit.study.table import Arm, Finding, Setting, Study, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = ("official", "timm", "huggingface", "torchvision", "dinov2")
SHORT = 0.25  # fine-tuning takes a quarter of the steps


def _arms(s: Setting) -> list[Arm]:
    low, high, patch = {8: (6, 8, 2), 28: (20, 28, 4)}.get(s.side, (20, 32, 4))
    small, large = (s.vit(image_size=n, patch_size=patch) for n in (low, high))
    before = Arm("before", small, about={"kind": "before", "side": low})
    fine: dict[str, Any] = {"before": before, "length": SHORT, "about": {"kind": "fine", "side": high}}
    arms = [before]
    for way in WAYS:
        config = small.replace(position_resize=way)
        arms.append(Arm(f"{way}, untrained", config, before=before, length=0, measure="sizes", about={"way": way}))
    for way in WAYS:
        rate_of = "" if way == WAYS[0] else WAYS[0]
        arms.append(Arm(way, large.replace(position_resize=way), rate_of=rate_of, **fine))
    arms.append(Arm("fresh positions", large, fresh_positions=True, **fine))
    arms.append(Arm("small pictures again", small, **fine))
    arms.append(Arm("large from scratch", large, **{**fine, "before": None, "length": 1 + SHORT}))
    return arms


def _find(table: Table) -> Finding:
    stay = table.gap("official", "small pictures again")
    fresh = table.gap("official", "fresh positions")
    best, worst = table.best(WAYS), table.worst(WAYS)
    low, high = table["before"].about["side"], table["official"].about["side"]
    first = f"after fine-tuning at {high} instead of {low} pixels "
    first += f"{compare('the model', 'one that stays small', stay)}, {verdict(stay, 1)}"
    second = f"resized positions against fresh ones: {compare('resized', 'fresh', fresh)}; of the five ways to resize "
    second += f"{best} is best and {worst} worst: {compare(best, worst, table.gap(best, worst, pairs=10))}"
    return Finding(f"Fine-tuning on more pixels: {gained(stay)}", (sentence(first), sentence(second)))


def _draw(table: Table) -> Figure:
    fine = table.where(kind="fine")
    figure = new_figure(2.7 + ROW * len(fine) + 0.6)
    upper, lower = figure.subplots(2, 1, height_ratios=[2.2, ROW * len(fine) + 0.2])
    sizes = table[f"{WAYS[0]}, untrained"].extra[0]["sizes"]
    lines(upper, sizes, {way: measured(table[f"{way}, untrained"], "by_size") for way in WAYS})
    upper.set_xticks(sizes)
    upper.set_xlabel("pixels a side, before any fine-tuning")
    dots(lower, fine, groups=[*range(len(WAYS)), 0, 0, 0])
    lower.set_xlabel("test accuracy after fine-tuning, %")
    legend_above(figure, upper, 3)
    return figure


RESOLUTION = Study(
    name="resolution",
    question="What does fine-tuning at a higher resolution bring, and how are positions best resized?",
    varies="five ways to resize, fresh positions, staying small, starting large",
    claim="fine-tuning on more pixels than in pre-training helps; positions are resized in 2-D",
    fair="the same steps of fine-tuning, a quarter of the training; from scratch gets both; more pixels cost more",
    arms=_arms,
    find=_find,
    draw=_draw,
    reference="small pictures again",
)
