"""What a study is, and the table that comes out of it.

An `Arm` is one thing that is tried; the study trains it with every seed. A `Row` is what came out of an
arm, a `Table` all rows: figures and findings are functions of the table alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitkit.model.config import AnyConfig, ResNetConfig, StemConfig, ViTConfig
from vitkit.study.numbers import Interval, difference, interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Setting:
    """The pictures a study's models are made for, and the sizes that suit them."""

    side: int
    channels: int
    classes: int

    @property
    def patch(self) -> int:
        """Sixteen patches on every side: few tokens, so that a training takes seconds."""
        return self.side // 4

    def vit(self, **changes: Any) -> ViTConfig:
        """The paper's model in small: class token, learned positions, MLP of four times the width."""
        width = changes.setdefault("width", 48)
        given = {"image_size": self.side, "patch_size": self.patch, "channels": self.channels, "classes": self.classes}
        given |= {"depth": 3, "heads": 4, "mlp_width": 4 * width}
        return ViTConfig(**{**given, **changes})

    def hybrid(self) -> ViTConfig:
        """A small residual stage before the patches; as many multiply-adds as `vit()`, within a tenth."""
        width, depth = {8: (48, 3), 28: (32, 3)}.get(self.side, (32, 2))
        return self.vit(width=width, depth=depth, stem=StemConfig((1,), 4, "small"))

    def resnet(self) -> ResNetConfig:
        """The CNN; as many multiply-adds as `vit()`, within a tenth."""
        layers, width = {8: ((2, 1, 1), 16), 28: ((2, 2, 2), 4)}.get(self.side, ((1, 2, 1), 4))
        stem = StemConfig(layers, width, "small")
        return ResNetConfig((self.side, self.side), self.channels, self.classes, stem)


@dataclass(frozen=True)
class Arm:
    name: str
    config: AnyConfig
    variant: str = ""  # of study.variants
    share: float = 1.0  # of the training pictures
    measure: str = ""  # of study.measures
    length: float = 1.0  # steps, as a share of the study's; 0: not trained
    rate_of: str = ""  # takes the learning rate chosen for that arm
    before: Arm | None = None  # starts from that arm's weights
    fresh_positions: bool = False
    about: dict[str, Any] = field(default_factory=dict, hash=False)  # for figures and findings


@dataclass(frozen=True)
class Row:
    name: str
    accuracy: tuple[float, ...]  # on the test pictures, one per seed
    about: dict[str, Any] = field(default_factory=dict)
    lr: float | None = None
    at_edge: bool = False  # the best learning rate was the smallest or the largest that was tried
    params: int = 0
    macs: int = 0  # for one picture
    pictures: int = 0  # seen in a training, each as often as it was seen
    seconds: float = 0.0  # of one training with its judgement, processor time
    spent: float = 0.0  # of all trainings of the arm, the search included
    extra: tuple[dict[str, Any], ...] = ()  # what was measured besides, one per seed
    losses: tuple[tuple[float, ...], ...] = ()  # of every step, one per seed

    @property
    def mean(self) -> Interval:
        return interval(self.accuracy)


@dataclass(frozen=True)
class Table:
    rows: tuple[Row, ...]
    data: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def where(self, **about: Any) -> list[Row]:
        return [row for row in self.rows if all(row.about.get(k) == v for k, v in about.items())]

    def gap(self, a: str, b: str, pairs: int = 1) -> Interval:
        """Accuracy of a - accuracy of b, seed by seed; `pairs`: how many they were picked from."""
        return difference(self[a].accuracy, self[b].accuracy, pairs)

    def best(self, names: Sequence[str]) -> str:
        return max(names, key=lambda n: self[n].mean.mean)

    def worst(self, names: Sequence[str]) -> str:
        return min(names, key=lambda n: self[n].mean.mean)


@dataclass(frozen=True)
class Finding:
    headline: str  # a few words above the figure
    sentences: tuple[str, str]


@dataclass(frozen=True)
class Study:
    name: str
    question: str
    varies: str
    claim: str  # what the paper or the articles say
    fair: str  # what is held equal
    arms: Callable[[Setting], list[Arm]]
    find: Callable[[Table], Finding]
    draw: Callable[[Table], Figure]
    reference: str  # the arm that others are compared with
    curves: bool = False  # losses are part of the result
