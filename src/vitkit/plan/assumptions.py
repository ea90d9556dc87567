"""Everything that a plan for many machines takes for granted, in one table: low, likely and high, and where it is from.

None of it was measured here but where the source says so. `vitkit plan --json` prints it; docs/plan.md shows it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Literal


@dataclass(frozen=True)
class Range:
    low: float
    likely: float
    high: float
    unit: str
    source: str
    better: Literal["low", "high"] = "high"  # which end makes a run shorter

    @property
    def best(self) -> float:
        return self.high if self.better == "high" else self.low

    @property
    def worst(self) -> float:
        return self.low if self.better == "high" else self.high

    def at(self, case: Case) -> float:
        return float(getattr(self, case))


Case = Literal["best", "likely", "worst"]


@dataclass(frozen=True)
class Assumptions:
    node_mtbf: Range = Range(
        2_000,
        6_300,
        20_000,
        "hours between failures of one node",
        "likely: Llama 3, 419 interruptions in 54 days of 2,048 nodes (arXiv 2407.21783); low and high: guesses, a "
        "third and three times that",
    )
    restart: Range = Range(
        120, 300, 900, "s from a failure to the next step", "a guess: 15 s to notice, 30 s to meet, loading", "low"
    )
    storage: Range = Range(0.3e9, 1e9, 5e9, "bytes/s that one node reads from storage", "round figures; measure yours")
    written: Range = Range(0.2e9, 1e9, 3e9, "bytes/s that one node writes to storage", "round figures; measure yours")
    copied: Range = Range(
        2e9, 10e9, 20e9, "bytes/s from a device to the host, while training waits", "round figures for PCIe 4"
    )
    cores: Range = Range(64, 96, 192, "cores of a node that decode", "machines with 8 A100 or H100 have 96 to 192")
    decoded: Range = Range(
        150,
        250,
        400,
        "images/s that a core decodes and varies",
        "round figures for images of ImageNet's size; measure yours",
    )
    step: Range = Range(0.85, 1.0, 1.15, "of the estimated step", "held to timm's published speeds within 15%", "low")
    spread: Range = Range(0.01, 0.03, 0.08, "deviation of a rank's step from its mean, relative", "a guess", "low")
    slow_steps: Range = Range(0, 1e-5, 1e-4, "of all steps of a rank take twice as long", "a guess", "low")
    price: Range = Range(0.6, 1.0, 2.0, "of the price of the table of devices", "reserved, on demand, scarce", "low")
    index: Range = Range(40, 40, 40, "bytes of the index of shards per sample", "the format of the index", "low")

    def rows(self) -> list[tuple[str, float, float, float, str, str]]:
        found = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return [(name, r.low, r.likely, r.high, r.unit, r.source) for name, r in found]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


ASSUMED = Assumptions()
