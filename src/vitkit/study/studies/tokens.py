"""What the tokens are: `head-type`, `why-a-class-token`, `add-or-concatenate`, `positions-by-patch-size`, and
`registers`."""

from __future__ import annotations

from collections.abc import Sequence

from vitkit.figures.style import Figure
from vitkit.study.numbers import compare, direction, gained, interval, points, spread, verdict
from vitkit.study.table import Arm, Finding, Row, Setting, Study, Table, accuracies, line_figure

CLS, GAP = "class token", "mean"
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the learning rate that is best for the class token
ADDED, BESIDE, NEITHER = "added", "concatenated", "no positions"
PATCH, FIXED = "first patch", "fixed class token"
UNSEEN, LATE, REGISTER = "unseen class token", "class token, last block alone", "mean, with a register"


class HeadType(Study):
    name = "head-type"
    question = "Is a mean over the patches worse than a class token, or does it only want another learning rate?"
    varies = "class token and mean over learning rates from an eighth to eight times the best one of the class token"
    claim = "both work alike, but at different learning rates"
    source = "Dosovitskiy et al. 2021, figure 9: alike at rates of 0.0008 (class token) and 0.0003 (mean)"
    fair = "the same steps, images and order, and the same rates for both"
    reference = CLS
    effect, contrast, others = 0.01, (GAP, CLS), 3

    def arms(self, s: Setting) -> list[Arm]:
        models = {CLS: s.vit(), GAP: s.vit(pooling="mean", class_token=False)}
        own = [Arm(name, config, tags={"head": name, "kind": "own"}) for name, config in models.items()]
        rates = [
            Arm(f"{name}, {f:g} x", config, rate_of=CLS, factor=f, tags={"head": name, "factor": f})
            for name, config in models.items()
            for f in FACTORS
        ]
        return [*own, *rates]

    def find(self, table: Table) -> Finding:
        own, borrowed = table.gap(GAP, CLS), table.gap(f"{GAP}, 1 x", f"{CLS}, 1 x")
        best = {head: max(FACTORS, key=lambda f: table[f"{head}, {f:g} x"].mean.mean) for head in (CLS, GAP)}
        first = f"each at its own learning rate {compare('the mean', 'a class token', own)}, "
        first += verdict(own, 0, "the paper")
        second = f"at the class token's rate {compare('the mean', 'a class token', borrowed)}; of the rates that were "
        second += f"tried {best[GAP]:g} times that is best for the mean and {best[CLS]:g} times for the class token"
        return Finding(f"Mean instead of a class token, each at its rate: {gained(own)}", first, second)

    def draw(self, table: Table) -> Figure:
        heads = {head: accuracies([table[f"{head}, {f:g} x"] for f in FACTORS]) for head in (CLS, GAP)}
        return line_figure(FACTORS, heads, "learning rate, times the best one of the class token")


class WhyClassToken(Study):
    name = "why-a-class-token"
    question = "Why a class token, and not the output of a patch?"
    varies = "a class token; one that stays zero, that patches do not see, that reads once; the first patch; the mean"
    claim = "a token of its own belongs to no patch, so that what it collects is not mixed with what a patch must keep"
    source = "Dosovitskiy et al. 2021, section 3.1, after BERT, without a number"
    reference = CLS
    contrast = (PATCH, CLS)
    expected = -1

    def arms(self, s: Setting) -> list[Arm]:
        kinds = {CLS: "", FIXED: "fixed-token", UNSEEN: "unseen-token", LATE: "late-token"}
        bare = s.vit(pooling="mean", class_token=False)
        means = [Arm(PATCH, bare, "first-patch"), Arm(GAP, bare), Arm(REGISTER, bare.replace(registers=1))]
        return [*(Arm(name, s.vit(), variant) for name, variant in kinds.items()), *means]

    def find(self, table: Table) -> Finding:
        patch, fixed, unseen, late, mean = (table.gap(name, CLS) for name in (PATCH, FIXED, UNSEEN, LATE, GAP))
        first = f"{compare('the output of the first patch', 'a class token', patch)}, "
        first += f"{verdict(patch, -1, 'the claim')}; "
        first += compare("a class token that never learns", "one that does", fixed)
        second = f"{compare('the mean of the patches', 'a class token', mean)}; what the token has over it: "
        second += f"{compare('one that patches do not see', 'one that they see', unseen)}, "
        second += f"{compare('one that reads in the last block alone', 'one that reads in all', late)}, "
        second += compare("the mean with one more token that is not read", "without", table.gap(REGISTER, GAP))
        return Finding(f"A patch in the place of the class token: {gained(patch)}", first, second)


class AddOrConcatenate(Study):
    name = "add-or-concatenate"
    question = "Why are positions added, and not concatenated?"
    varies = "learned positions added to the patches, in a quarter of the width beside them, none"
    claim = "adding takes no width from the patches, and the model can keep the two apart: concatenating reaches less"
    source = "a question of the articles, without a number"
    reference = ADDED
    effect, contrast, expected = 0.01, (BESIDE, ADDED), -1

    def arms(self, s: Setting) -> list[Arm]:
        bare = s.vit(positions="none")
        return [Arm(ADDED, s.vit()), Arm(BESIDE, bare, "positions-beside"), Arm(NEITHER, bare)]

    def find(self, table: Table) -> Finding:
        beside, none = (table.gap(name, ADDED) for name in (BESIDE, NEITHER))
        first = f"{compare('concatenating positions', 'adding them', beside)}, at equal width"
        second = f"{compare('a model without positions', 'one that adds them', none)}, "
        second += verdict(none, -1, "the paper (5-shot ImageNet: 61.4 against 64.2)")
        return Finding(f"Concatenating instead of adding: {gained(beside)}", first, second)


class PositionsByPatchSize(Study):
    name = "positions-by-patch-size"
    question = "Do positions matter more with smaller patches?"
    varies = "patches from coarse to fine, with learned positions and without any"
    claim = "the smaller the patches, the less each of them says about the image, and the more its place does"
    source = "an expectation of the articles, without a number"
    effect, slowest = 0.02, ""
    expected = 1

    def arms(self, s: Setting) -> list[Arm]:
        sizes = {8: (4, 2, 1), 28: (14, 7, 4)}.get(s.side, (s.side // 2, s.side // 4, s.side // 8))
        return [
            Arm(f"patch {n}, {word}", s.vit(patch_size=n, positions=k, depth=2), tags={"patch": n, "positions": word})
            for n in sizes
            for word, k in (("learned", "learned"), ("none", "none"))
        ]

    def compared(self, names: Sequence[str]) -> tuple[str, ...]:
        return (*names[:2], *names[-2:])

    def effects(self, table: Table) -> list[float]:
        """How much more positions bring with the finest patches than with the coarsest."""
        coarse, fine = self._gains(table)[0], self._gains(table)[-1]
        return [b - a for a, b in zip(coarse, fine, strict=True)]

    def _gains(self, table: Table) -> list[list[float]]:
        """What positions bring, patch sizes x seeds."""
        learned, none = (table.where(positions=word) for word in ("learned", "none"))
        return [
            [a - b for a, b in zip(x.accuracy, y.accuracy, strict=True)] for x, y in zip(learned, none, strict=True)
        ]

    def find(self, table: Table) -> Finding:
        sizes = [row.tags["patch"] for row in table.where(positions="learned")]
        gains = dict(zip(sizes, map(interval, self._gains(table)), strict=True))
        more = interval(self.effects(table))
        model, bare = "a model with positions", "one without"
        words = "; ".join(f"with patches of {n} {compare(model, bare, gain)}" for n, gain in gains.items())
        coarse, fine = sizes[0], sizes[-1]
        tail = f"it is open whether positions bring more with patches of {fine} than of {coarse} ({spread(more)})"
        if word := direction(more, "more", "less"):
            tail = f"with patches of {fine} positions bring {points(more.mean)} points {word} than with those of "
            tail += f"{coarse} ({spread(more)}), {verdict(more, 1, 'the claim')}"
        ends = [gained(gains[size], less="-", more="+") for size in (coarse, fine)]
        return Finding(f"What positions bring: patch {coarse} {ends[0]}, patch {fine} {ends[1]}", words, tail)

    def draw(self, table: Table) -> Figure:
        sizes = [float(row.tags["patch"]) for row in table.where(positions="learned")]
        words = {f"positions: {word}": accuracies(table.where(positions=word)) for word in ("learned", "none")}
        figure = line_figure(sizes, words, "pixels of a patch's side")
        figure.axes[0].invert_xaxis()
        return figure


class Registers(Study):
    name = "registers"
    question = "Do registers take away the long tokens that disturb attention maps?"
    varies = "no register and four of them; lengths of the patch tokens after the last block"
    claim = "large models, trained long, keep notes in a few patch tokens of great length; registers take them over"
    source = "Darcet et al. 2024: about 2% of the tokens, about ten times as long as the others"
    fair = "the same steps, images and order; four more tokens cost a little more"
    reference = "no register"
    effect, contrast, data = 0.5, ("4 registers", "no register"), "cifar10@32/4"
    sought = "a difference of half the median length of a token"
    expected = -1

    def arms(self, s: Setting) -> list[Arm]:
        sizes = {"patch_size": {8: 1, 16: 2}.get(s.side, 4), "depth": 6}
        kinds = {"no register": 0, "4 registers": 4}
        return [Arm(name, s.vit(registers=n, **sizes), measure="norms") for name, n in kinds.items()]

    def effects(self, table: Table) -> list[float]:
        """The longest token with registers minus that without, in median lengths."""
        return table.measured_gap(*self.contrast, "longest")

    def label(self, row: Row) -> str:
        return f"{row.name}\nlongest token: {row.measured('longest').mean():.1f} medians"

    def find(self, table: Table) -> Finding:
        gap = interval(self.effects(table))
        before, after = (table[name] for name in reversed(self.contrast))
        longest, share = (float(before.measured(key).mean()) for key in ("longest", "outliers"))
        first = f"without registers the longest patch token is {longest:.1f} times the median and {share:.2%} are "
        first += f"outliers; with four it is {float(after.measured('longest').mean()):.1f} times and "
        first += f"{float(after.measured('outliers').mean()):.2%}"
        tail = f"it is open whether the longest is shorter with registers ({gap.mean:+.2f} median lengths)"
        headline = "Open whether registers make the longest token shorter"
        if word := direction(gap, "longer", "shorter"):
            tail = f"with registers the longest is {abs(gap.mean):.2f} median lengths {word} ({spread(gap, 1)}), "
            tail += verdict(gap, -1, "the claim")
            headline = f"With registers the longest token is {abs(gap.mean):.1f} median lengths {word}"
        second = f"{tail}; in accuracy {compare('four registers', 'none', table.gap(*self.contrast))}"
        return Finding(headline, first, second)
