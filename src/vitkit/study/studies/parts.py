"""Parts of the model that can be chosen: `positions`, `pooling`, `depth-width`, `dropout`."""

from __future__ import annotations

from vitkit.figures.style import Figure, new_figure
from vitkit.model.config import ViTConfig
from vitkit.study.numbers import compare, gained, verdict
from vitkit.study.table import ROW, Arm, Finding, Row, Setting, Study, Table, dots

KINDS = {"none": "none", "1-D learned": "learned", "2-D learned": "learned-2d"}
KINDS |= {"relative": "relative", "sin-cos": "sincos-2d", "RoPE": "rope-2d"}
FAST = "relative, learned faster"
WHERE = {"every block, own tables": "positions-each", "every block, one table": "positions-shared"}
DEPTHS = (1, 2, 3, 7)
RATES = (0.0, 0.1, 0.3)  # of dropout; the first comparison is the one that was stated, the second comes on top
SHARES = {"1/16": 1 / 16, "all": 1.0}


class Positions(Study):
    name = "positions"
    question = "Do position encodings matter, which, and where?"
    varies = "none, 1-D, 2-D, relative, sin-cos, RoPE; learned ones before every block; with augmentation"
    claim = "none is worse, the kinds are alike, and where they are added does not matter"
    source = "Dosovitskiy et al. 2021, table 8: 61.4% without, 64.2% with learned 1-D positions, 5-shot ImageNet"
    reference = "1-D learned"
    contrast = ("none", "1-D learned")
    expected = -1

    def arms(self, s: Setting) -> list[Arm]:
        bare = s.vit(positions="none")
        where = [Arm(name, bare, variant) for name, variant in WHERE.items()]
        varied = [
            Arm(f"{name}, augmented", s.vit(positions=KINDS[name]), augment="light") for name in ("none", "1-D learned")
        ]
        kinds = [Arm(name, s.vit(positions=kind)) for name, kind in KINDS.items()]
        return [*kinds, Arm(FAST, s.vit(positions="relative"), "relative-fast"), *where, *varied]

    def find(self, table: Table) -> Finding:
        none = table.gap("none", "1-D learned")
        varied = table.gap("none, augmented", "1-D learned, augmented")
        kinds, places = list(KINDS)[1:], ["1-D learned", *WHERE]
        best, worst = table.best(kinds), table.worst(kinds)
        among = table.gap(best, worst, pairs=10)
        paper = "the paper (5-shot ImageNet: 61.4 against 64.2)"
        first = f"{compare('no position encoding', 'learned 1-D positions', none)}, {verdict(none, -1, paper)}; with "
        first += f"light augmentation {compare('none', 'learned', varied)}"
        second = f"of the five kinds {best} is best and {worst} worst: {compare(best, worst, among)}, "
        second += f"{verdict(among, 0, 'the paper, where they are alike')}; added {_where(table.best(places))} is best "
        second += f"and {_where(table.worst(places))} worst: "
        second += compare("the first", "the second", table.gap(table.best(places), table.worst(places), pairs=3))
        second += f"; a relative table that learns faster: {compare('it', 'relative', table.gap(FAST, 'relative'))}"
        return Finding(f"Leaving positions out: {gained(none)}", first, second)


def _where(name: str) -> str:
    return "to the patches alone" if name == "1-D learned" else f"before {name}"


class Pooling(Study):
    name = "pooling"
    question = "Class token or mean over the patches?"
    varies = "cls, mean, map; each at its own best learning rate"
    claim = "a class token and the mean work alike, but want different learning rates"
    source = "Dosovitskiy et al. 2021, figure 9: alike at rates of 0.0008 (class token) and 0.0003 (mean)"
    reference = "class token"
    effect, contrast = 0.01, ("mean", "class token")

    def arms(self, s: Setting) -> list[Arm]:
        others = {"mean": "mean", "MAP": "map"}
        kinds = [Arm(name, s.vit(pooling=kind, class_token=False)) for name, kind in others.items()]
        return [Arm("class token", s.vit()), *kinds]

    def find(self, table: Table) -> Finding:
        mean, probe = (table.gap(name, "class token") for name in ("mean", "MAP"))
        rates = " and ".join("?" if (lr := table[name].lr) is None else f"{lr:g}" for name in ("mean", "class token"))
        paper = "the paper, where both work alike once each has its own rate"
        first = f"at learning rates of their own ({rates}) {compare('mean pooling', 'a class token', mean)}, "
        first += verdict(mean, 0, paper)
        second = f"attention pooling: {compare('MAP', 'a class token', probe)}"
        return Finding(f"Mean instead of a class token: {gained(mean)}", first, second)


def _macs(config: ViTConfig) -> int:
    """patches + depth (4 T D^2 + 2 T^2 D + 2 T D M) + head: enough to find a width."""
    t, d = config.tokens, config.width
    values = config.patch_size[0] * config.patch_size[1] * config.channels
    block = 4 * t * d * d + 2 * t * t * d + 2 * t * d * config.mlp_width
    return (t - 1) * values * d + config.depth * block + d * config.classes


class DepthWidth(Study):
    name = "depth-width"
    question = "How to spend a budget: deep or wide?"
    varies = "depth 1 to 7 with the width that keeps the multiply-adds equal"
    claim = "depth helps more than width, with diminishing returns"
    source = "Dosovitskiy et al. 2021, figure 8: depth brings most, and little beyond 16 layers"
    fair = "equal multiply-adds per image within a tenth, the same steps, images and order"
    reference = slowest = "3 x 48"
    expected = -1

    def arms(self, s: Setting) -> list[Arm]:
        goal = _macs(s.vit())
        made = ([s.vit(depth=depth, width=width) for width in range(16, 161, 4)] for depth in DEPTHS)
        nearest = [min(configs, key=lambda c: abs(_macs(c) - goal)) for configs in made]
        return [Arm(f"{c.depth} x {c.width}", c, tags={"depth": c.depth, "width": c.width}) for c in nearest]

    def find(self, table: Table) -> Finding:
        names = [row.name for row in table.rows]
        wide, deep, count = names[0], names[-1], len(names)
        gap = table.gap(deep, wide)
        slow = table[deep].seconds / max(1e-9, table[wide].seconds)
        first = f"at equal multiply-adds {compare(f'depth x width {deep}', wide, gap)}; "
        first += f"equal multiply-adds are not equal time, the deepest takes {slow:.1f} times as long"
        best, usual = table.best(names), names[2]
        second = f"{best} is best"
        if best != usual:
            second += f"; {compare(best, f'the {usual} of the other studies', table.gap(best, usual, pairs=count - 1))}"
        return Finding(f"Deep ({deep}) instead of wide ({wide}): {gained(gap)}", first, second)

    def label(self, row: Row) -> str:
        return f"{row.tags['depth']} layer{'s' if row.tags['depth'] != 1 else ''} of {row.tags['width']}"


class Dropout(Study):
    name = "dropout"
    question = "Does dropout help a short training?"
    varies = "dropout 0, 0.1 and 0.3 on few and on all images"
    claim = "the paper drops 0.1 on ImageNet and ImageNet-21k, and nothing on JFT-300M: dropout is for few images"
    source = "Dosovitskiy et al. 2021, table 3"
    reference = "0, all"
    effect, contrast, slowest = 0.01, ("0.1, 1/16", "0, 1/16"), "0, all"
    expected = 1

    def arms(self, s: Setting) -> list[Arm]:
        return [
            Arm(f"{rate:g}, {label}", s.vit(dropout=rate), share=share, tags={"rate": rate, "share": label})
            for label, share in SHARES.items()
            for rate in RATES
        ]

    def find(self, table: Table) -> Finding:
        clauses, heads = [], []
        for label, of in (("1/16", "1/16 of the images"), ("all", "all of them")):
            gaps = {r: table.gap(f"{r:g}, {label}", f"0, {label}", pairs) for pairs, r in enumerate(RATES) if pairs}
            compared = ", ".join(compare(f"dropout {rate:g}", "none", gap) for rate, gap in gaps.items())
            clauses.append(f"with {of} {compared}")
            heads.append(gained(gaps[RATES[1]]))
        return Finding(f"Dropout {RATES[1]:g} with few images: {heads[0]}; with all: {heads[1]}", *clauses)

    def draw(self, table: Table) -> Figure:
        figure = new_figure(ROW * len(table.rows) + 1.3)
        panels = figure.subplots(2, 1)
        for number, (axes, label) in enumerate(zip(panels, SHARES, strict=True)):
            rows = table.where(share=label)
            dots(axes, rows, [f"dropout {row.tags['rate']:g}" for row in rows], [number] * len(rows))
            axes.set_title("all of the images" if label == "all" else f"{label} of the images", loc="left")
        panels[0].set_xlabel("")
        return figure
