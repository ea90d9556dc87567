"""What a study is, the table that comes out of it, and the shapes that figures of tables are made of.

An `Arm` is one thing that is tried; the study trains it with every seed. A `Row` is what came out of an
arm, a `Table` all rows: figures and findings are functions of the table alone. A new study is one class
derived from `Study`, and one row of `STUDIES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vitkit.figures.panels import legend_above
from vitkit.figures.style import COLOURS, Axes, Figure, new_figure
from vitkit.model.config import AnyConfig, ConvStemConfig, ResNetConfig, StemConfig, ViTConfig
from vitkit.study.numbers import POWER, Interval, difference, interval, sentence

BATCH = 64  # images in a step of every training
RATES = (1e-3, 4e-3, 1.6e-2)  # the search begins with, for every arm that is trained from the start
RATES_AFTER = (2.5e-4, 1e-3, 4e-3)  # and for those that start from trained weights
Tags = dict[str, str | float]  # of an arm, for figures and findings
Facts = dict[str, str | int]  # about the data


@dataclass(frozen=True)
class Setting:
    """The images a study's models are made for, and the sizes that suit them."""

    side: int
    channels: int
    classes: int

    def vit(self, width: int = 48, **changes: object) -> ViTConfig:
        """The paper's model in small: class token, learned positions, 16 patches, MLP of four times the width."""
        sizes = {"image_size": self.side, "patch_size": self.side // 4, "channels": self.channels}
        sizes |= {"classes": self.classes, "width": width, "depth": 3, "heads": 4, "mlp_width": 4 * width}
        return ViTConfig(**{**sizes, **changes})  # type: ignore[arg-type]

    def hybrid(self, share: float = 1.0) -> ViTConfig:
        """Convolutions before the patches, all of `share` the width; multiply-adds as `vit()`, within a tenth."""
        made = {8: ((16, 16), (1, 2), 48), 16: ((16, 32, 32), (1, 2, 2), 40), 28: ((12,), (1,), 40)}
        widths, strides, width = made.get(self.side, ((16, 32, 32), (2, 2, 2), 40))
        return self.vit(round(share * width), stem=ConvStemConfig(tuple(round(share * w) for w in widths), strides))

    def resnet(self) -> ResNetConfig:
        """The CNN; as many multiply-adds as `vit()`, within a tenth."""
        layers, width = {8: ((2, 1, 1), 16), 16: ((1, 2, 1), 8), 28: ((2, 2, 2), 4)}.get(self.side, ((1, 2, 1), 4))
        size = (self.side, self.side)
        return ResNetConfig(size, self.channels, self.classes, StemConfig(layers, width, "small"))


@dataclass(frozen=True)
class Arm:
    name: str
    config: AnyConfig
    variant: str = ""  # of study.variants
    share: float = 1.0  # of the training images
    augment: str = "none"  # a preset
    classes: tuple[int, ...] = ()  # only images of these classes; (): all
    task: str = ""  # a method of pre-training without labels, or METHOD:LOSS; "": the classes are learned
    learns: str = ""  # "head" or "lora": that alone; "": everything
    parts: int = 1  # that a batch is computed in, gradients added up
    measure: str = ""  # of study.measures
    length: float = 1.0  # steps, as a share of the study's; 0: not trained
    rate_of: str = ""  # takes the learning rate chosen for that arm
    factor: float = 1.0  # times so much
    before: Arm | None = None  # starts from that arm's weights
    fresh_positions: bool = False
    tags: Tags = field(default_factory=dict, hash=False)

    @property
    def rates(self) -> tuple[float, ...]:
        return RATES_AFTER if self.before and not self.learns else RATES


@dataclass(frozen=True)
class Row:
    name: str
    accuracy: tuple[float, ...]  # on the test images, one per seed
    tags: Tags = field(default_factory=dict)
    lr: float | None = None
    at_edge: bool = False  # the best learning rate was the smallest or the largest that was tried
    params: int = 0
    macs: int = 0  # for one image
    images: int = 0  # seen in a training, each as often as it was seen
    seconds: float = 0.0  # of one training with its evaluation, processor time
    spent: float = 0.0  # of all trainings of the arm, the search included
    extra: tuple[Mapping[str, object], ...] = ()  # what was measured besides, one per seed
    losses: tuple[tuple[float, ...], ...] = ()  # of some steps, one per seed
    steps: tuple[int, ...] = ()  # which; default: all

    @property
    def mean(self) -> Interval:
        return interval(self.accuracy)

    @property
    def loss_steps(self) -> np.ndarray:
        """The number of the step of every loss, from 1."""
        count = min(map(len, self.losses))
        return 1 + np.array((self.steps or range(count))[:count])

    def measured(self, key: str) -> np.ndarray:
        """What was measured besides, seeds x whatever shape one of them has."""
        return np.array([one[key] for one in self.extra])


@dataclass(frozen=True)
class Table:
    rows: tuple[Row, ...]
    data: Facts = field(default_factory=dict)

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def where(self, **tags: str | float) -> list[Row]:
        return [row for row in self.rows if tags.items() <= row.tags.items()]

    def count(self, key: str) -> int:
        """A number about the data: train, classes, side ..."""
        return int(self.data[key])

    def images(self, shares: Mapping[str, float]) -> tuple[list[int], list[str]]:
        """How many training images each share is, and words for it."""
        counts = [max(self.count("classes"), round(self.count("train") * share)) for share in shares.values()]
        return counts, [f"{n:,}\n({label})" for n, label in zip(counts, shares, strict=True)]

    def gap(self, a: str, b: str, pairs: int = 1) -> Interval:
        """Accuracy of a - accuracy of b, seed by seed; `pairs`: how many they were picked from."""
        return difference(self[a].accuracy, self[b].accuracy, pairs)

    def measured_gap(self, a: str, b: str, key: str) -> list[float]:
        """What was measured of a minus that of b, one for each seed."""
        found: list[float] = (self[a].measured(key) - self[b].measured(key)).tolist()
        return found

    def best(self, names: Sequence[str]) -> str:
        return max(names, key=lambda n: self[n].mean.mean)

    def worst(self, names: Sequence[str]) -> str:
        return min(names, key=lambda n: self[n].mean.mean)


@dataclass(frozen=True)
class Finding:
    """A few words above the figure, and two clauses that become sentences."""

    headline: str
    first: str
    second: str

    @property
    def sentences(self) -> tuple[str, str]:
        return sentence(self.first), sentence(self.second)


class Study:
    """One experiment: its words, the arms that are trained, and what their table shows."""

    name: str
    question: str
    varies: str
    claim: str  # what the paper or the articles say
    source: str  # who says it and where, with the number if there is one
    fair = "the same steps, images and order; multiply-adds as stated in the table"  # what is held equal
    reference = ""  # the arm that others are compared with
    effect = 0.02  # the smallest difference that it must be able to see
    expected = 0  # its sign by the claim: +1, -1, or 0 where it should not be there
    contrast: tuple[str, ...] = ()  # the arms that it is a difference of; default: the first and the last
    others = 0  # seeds of all other arms, at most; 0: as many
    slowest = ""  # the arm that needs the longest training; default: the first
    data = "cifar10@16/4"  # the set that can show it; a quarter of it is learned in a quarter of the time
    curves = False  # losses are part of the result

    def arms(self, s: Setting) -> list[Arm]:
        raise NotImplementedError

    def find(self, table: Table) -> Finding:
        raise NotImplementedError

    def compared(self, names: Sequence[str]) -> tuple[str, ...]:
        """Of all arms those that the effect is a difference of."""
        return self.contrast or (names[0], names[-1])

    def effects(self, table: Table) -> list[float]:
        """What the study is about, one for each seed: a difference of accuracies unless it says otherwise."""
        first, second = (table[name].accuracy for name in self.compared([row.name for row in table.rows]))
        return [a - b for a, b in zip(first, second, strict=True)]

    @property
    def sought(self) -> str:
        return f"a difference of {100 * self.effect:g} points"

    def label(self, row: Row) -> str:
        return row.name

    def draw(self, table: Table) -> Figure:
        """All rows as dots, but for those that others start from."""
        rows = [row for row in table.rows if row.tags.get("kind") != "before"]
        figure = new_figure(ROW * len(rows) + 0.6)
        dots(figure.subplots(), rows, [self.label(row) for row in rows])
        return figure


@dataclass(frozen=True)
class Context:
    """How a result came about."""

    command: str  # gives the same numbers again on the same machine
    steps: int
    batch: int
    seeds: int
    machine: str
    seconds_here: float
    data: Facts
    training_seconds: float
    effect: float  # that was looked for
    power: float | None  # chance that so many seeds see it, by the spread that they showed; None: it is not known
    plateau: bool | None  # twice as long a training gains next to nothing; None: nobody looked


@dataclass(frozen=True)
class Result:
    study: Study
    table: Table
    finding: Finding
    context: Context

    @property
    def gap(self) -> Interval:
        return interval(self.study.effects(self.table))

    @property
    def small(self) -> bool:
        """Whether the effect that is looked for is excluded."""
        return self.gap.known and -self.context.effect < self.gap.low <= self.gap.high < self.context.effect

    @property
    def agreement(self) -> str:
        """How it stands to the claim: "agrees", "contradicts", "does not show here" or "open"."""
        seen = 0 if self.gap.covers_zero else 1 if self.gap.mean > 0 else -1
        if seen and seen == self.study.expected:
            return "agrees"
        if self.small:
            return "does not show here" if self.study.expected else "agrees"
        return "contradicts" if seen else "open"

    @property
    def doubts(self) -> list[str]:
        """Why the result is not to be trusted; empty when it can be, or when what it looks for was seen."""
        context, found = self.context, list[str]()
        decided = not self.gap.covers_zero or self.small
        if context.power is None:
            found.append(f"underpowered: one seed cannot show {self.study.sought}")
        elif context.power < POWER and not decided:
            found.append(f"underpowered: {self.study.sought} would be seen by {context.power:.0%} of such studies")
        if context.plateau is False and self.agreement != "agrees":
            found.append("short: the budget ended before longer trainings stopped to gain")
        return found


# --- figures -----------------------------------------------------------------------------------

ROW = 0.32  # inches of figure for each line of dots


def dots(axes: Axes, rows: Sequence[Row], names: Sequence[str] | None = None, groups: Sequence[int] = ()) -> None:
    """One line per row: small dots are seeds, the large one their mean, the bar the 95% interval."""
    for place, row in enumerate(rows):
        colour = COLOURS[(groups[place] if groups else 0) % len(COLOURS)]
        mean, values = row.mean, 100 * np.array(row.accuracy)
        if mean.known:
            bar(axes, mean, place, colour)
        axes.scatter(values, [place] * len(values), s=12, color=colour, alpha=0.8, linewidths=0, zorder=3)
        axes.scatter([100 * mean.mean], [place], s=34, color=colour, edgecolors="white", linewidths=0.9, zorder=4)
    axes.set_yticks(range(len(rows)), names or [row.name for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    label = "test accuracy, % (bar: 95% interval)"
    every = 100 * np.concatenate([row.accuracy for row in rows])  # of some arms there may be fewer seeds
    axes.set(ylim=(len(rows) - 0.5, -0.5), axisbelow=True, xlim=_frame(every), xlabel=label)


def bar(axes: Axes, share: Interval, place: float, colour: str) -> None:
    """The interval as a broad pale bar, which shows beside the dots however short it is."""
    ends = [100 * share.low, 100 * share.high]
    axes.plot(ends, [place, place], color=colour, linewidth=8, alpha=0.3, solid_capstyle="butt")


def _frame(percents: np.ndarray, room: float = 0.35) -> tuple[float, float]:
    """A scale that shows all seeds; an interval that is far wider than they are runs off its edge."""
    low, high = float(percents.min()), float(percents.max())
    beyond = max(room * (high - low), 0.3)
    return max(0.0, low - beyond), min(100.4, high + beyond)


Places = Sequence[float] | Mapping[str, Sequence[float]]  # the same for all lines, or by name


def lines(axes: Axes, x: Places, by_name: dict[str, np.ndarray], room: float = 0.1) -> None:
    """One line per name. Values are seeds x places, in percent."""
    for number, (label, by_seed) in enumerate(by_name.items()):
        line(axes, x[label] if isinstance(x, Mapping) else x, by_seed, label, number)
    frame = _frame(np.concatenate([v.ravel() for v in by_name.values()]), room)
    axes.set(ylim=frame, ylabel="accuracy, % (band: 95%)")


def line(axes: Axes, x: Sequence[float] | np.ndarray, by_seed: np.ndarray, label: str, number: int) -> None:
    """The mean over seeds with a band, its 95% interval; one line of several, each of its own colour and mark."""
    means = [interval(column.tolist()) for column in by_seed.T]
    colour, marker = COLOURS[number % len(COLOURS)], "os^Dv"[number % 5]
    if means[0].known:
        axes.fill_between(x, [m.low for m in means], [m.high for m in means], color=colour, alpha=0.15, linewidth=0)
    axes.plot(x, [m.mean for m in means], color=colour, label=label, linewidth=1.8, marker=marker, markersize=4.5)
    axes.grid(axis="y")


def log_ticks(axes: Axes, x: Sequence[float], words: Sequence[str] = ()) -> None:
    """A logarithmic axis with these places alone on it."""
    axes.set_xscale("log")
    axes.set_xticks(x, words or [f"{place:g}" for place in x])
    axes.minorticks_off()


def line_figure(
    x: Sequence[float], by_name: dict[str, np.ndarray], xlabel: str, words: Sequence[str] = (), room: float = 0.1
) -> Figure:
    """One panel of `lines` over a logarithmic axis, with a legend above it where there are several."""
    figure = new_figure(3.3)
    axes = figure.subplots()
    lines(axes, x, by_name, room)
    log_ticks(axes, x, words)
    axes.set_xlabel(xlabel)
    if len(by_name) > 1:
        legend_above(figure, axes, 3 if len(by_name) == 3 else 2)
    return figure


def curves(axes: Axes, rows: Sequence[Row], window: float = 0.05) -> None:
    """Training loss, a running mean over seeds and steps."""
    from matplotlib.ticker import MaxNLocator

    for number, row in enumerate(rows):
        steps = row.loss_steps
        losses = np.mean([one[: len(steps)] for one in row.losses], axis=0)
        width = max(1, round(window * len(losses)))
        x, smooth = (np.convolve(values, np.ones(width) / width, mode="valid") for values in (steps, losses))
        style = (0, (2.5, 2.5)) if number == 1 else "-"  # the second often lies on the first
        axes.plot(x, smooth, linestyle=style, color=COLOURS[number % len(COLOURS)], linewidth=1.6, label=row.name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="training loss")
    axes.grid(axis="y")


def accuracies(rows: Sequence[Row]) -> np.ndarray:
    """seeds x rows, in percent."""
    return 100 * np.array([row.accuracy for row in rows]).T


def losses_apart(table: Table, a: str, b: str) -> np.ndarray:
    """seeds x steps: how far the losses of two arms are apart."""
    return np.abs([np.subtract(x, y) for x, y in zip(table[a].losses, table[b].losses, strict=True)])


def draw_apart(axes: Axes, table: Table, pairs: Mapping[str, tuple[str, str]], words: str) -> None:
    """How far the losses of each pair are apart, a line for every seed; pairs by the label of their lines."""
    for number, (label, pair) in enumerate(pairs.items()):
        for seed, apart in enumerate(losses_apart(table, *pair)):
            steps, shown, named = table[pair[0]].loss_steps, np.maximum(apart, 1e-9), "" if seed else label
            axes.plot(steps, shown, color=COLOURS[number], linewidth=0.8, label=named)
    axes.set(yscale="log", ylabel=words, xlabel="step (one line per seed)")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(axis="y")
