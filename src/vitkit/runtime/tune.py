"""Try every runtime that is here, in every precision, with more and less merging; keep the fastest that is right.

First the speed of every way at one batch size. Then, from the fastest to the slowest, whether it is right enough; the
first that is, is the winner: nothing slower can beat it. At last its batch sizes and threads.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError, VitkitError
from vitkit.model.config import AnyConfig
from vitkit.model.vit import ViT
from vitkit.runtime import open_runtime
from vitkit.runtime.base import Runtime
from vitkit.runtime.compiled import compiler
from vitkit.runtime.measure import images_per_second, logits_of
from vitkit.runtime.onnx_int8 import Calibration
from vitkit.runtime.tuned import Choice
from vitkit.runtime.verify import Check, Pictures, judge

FEWEST = 20  # pictures; fewer say nothing about int8 and merging, which are then not chosen
_BATCH = 8  # for throughput, while ways are compared
_SIZES = (1, 4, 8, 16, 32)


@dataclass(frozen=True)
class Row:
    """One way to run the model. Empty fields were not needed, or `problem` says why they are empty."""

    choice: Choice
    speed: float | None = None  # images per second
    ratio: float | None = None  # to PyTorch as it is, at the same batch size
    check: Check | None = None
    problem: str | None = None

    @property
    def right(self) -> float | None:
        """Accuracy where labels are known, else agreement with the model."""
        if self.check is None:
            return None
        return self.check.agreement if self.check.accuracy is None else self.check.accuracy


@dataclass(frozen=True)
class Tuned:
    rows: list[Row]
    winner: Row
    pictures: str
    labelled: bool

    def report(self) -> dict[str, Any]:
        return {"pictures": self.pictures, "labelled": self.labelled, "rows": [asdict(row) for row in self.rows]}


OnRow = Callable[[list[Row]], None]


def available() -> list[str]:
    """The runtimes that can be opened here."""
    have = {"onnx": ("onnx", "onnxruntime"), "openvino": ("openvino",)}
    found = [kind for kind, packages in have.items() if all(importlib.util.find_spec(p) for p in packages)]
    return ["eager", *(["compiled"] if compiler() else []), *found]


def ways(model: nn.Module, kinds: list[str], batch_size: int, calibrated: bool) -> Iterator[Choice]:
    """Every runtime x precision x merging that makes sense for this model."""
    for merge in (0, *merges(model)):
        for kind in kinds:
            yield Choice(kind, merge=merge, batch_size=batch_size)
            has_int8 = kind == "onnx" or (kind == "openvino" and importlib.util.find_spec("nncf") is not None)
            if has_int8:
                yield Choice(kind, int8=True, merge=merge, batch_size=batch_size)
                if calibrated and not merge:
                    yield Choice(kind, int8=True, calibrated=True, batch_size=batch_size)


def merges(model: nn.Module) -> list[int]:
    """Patches per block that leave a third of them or more at the end, for models that can merge."""
    if not isinstance(model, ViT) or model.config.positions in ("relative", "rope-2d"):
        return []
    patches, depth = model.config.grid[0] * model.config.grid[1], model.config.depth
    shares = (patches * part / depth for part in (0.25, 0.5, 0.8))
    return sorted({round(share) for share in shares if round(share) >= 1})


def tune(
    model: nn.Module,
    pictures: Pictures,
    max_drop: float = 0.005,
    latency: bool = False,
    kinds: list[str] | None = None,
    calibration: Calibration | None = None,
    seconds: float = 1.0,
    on_row: OnRow = lambda rows: None,
) -> Tuned:
    """`max_drop` is of the accuracy, or of the agreement where there are no labels. `on_row` sees the table grow."""
    config: AnyConfig = model.config  # type: ignore[assignment]
    if not config.classes:
        raise ConfigError("the model has no classifier (classes=0), so nothing tells whether a fast way is right")
    images = next(pictures.batches(config, 1 if latency else min(_BATCH, len(pictures))))
    opener = _Opener(model, calibration)
    expected = logits_of(opener.open(Choice()), pictures, config, _BATCH)
    rows: list[Row] = []
    for choice in ways(model, kinds or available(), len(images), calibration is not None):
        rows.append(_measured(choice, opener, images, seconds))
        on_row(rows)
    winner = _first_right(rows, opener, pictures, config, expected, max_drop, on_row)
    winner = _refined(winner, opener, pictures, config, latency, seconds, rows, on_row)
    return Tuned(rows, winner, pictures.name, pictures.labels is not None)


class _Opener:
    """Runtimes, made once; all but PyTorch are dropped after use, as each holds all weights."""

    def __init__(self, model: nn.Module, calibration: Calibration | None) -> None:
        self.model, self.calibration = model, calibration
        self.kept: tuple[Choice, Runtime] | None = None

    def open(self, choice: Choice) -> Runtime:
        if self.kept is not None and self.kept[0] == choice:
            return self.kept[1]
        self.kept = None
        runtime = open_runtime(
            self.model,
            choice.runtime,
            int8=choice.int8,
            merge=choice.merge,
            threads=choice.threads,
            calibration=self.calibration if choice.calibrated else None,
        )
        self.kept = (choice, runtime)
        return runtime


def _measured(choice: Choice, opener: _Opener, images: Tensor, seconds: float) -> Row:
    """Beside PyTorch as it is, in turns: the ratio holds also when the machine is busy."""
    try:
        runtime = opener.open(choice)
        plain = open_runtime(opener.model, "eager")
        speeds = images_per_second({"it": runtime, "eager": plain}, images, seconds)
    except (VitkitError, RuntimeError) as e:
        return Row(choice, problem=str(e).splitlines()[0][:100])
    return Row(choice, speeds["it"], speeds["it"] / speeds["eager"])


def _first_right(
    rows: list[Row],
    opener: _Opener,
    pictures: Pictures,
    config: AnyConfig,
    expected: Tensor,
    max_drop: float,
    on_row: OnRow,
) -> Row:
    usable = [i for i, row in enumerate(rows) if row.ratio is not None]
    if len(pictures) < FEWEST:
        usable = [i for i in usable if not (rows[i].choice.int8 or rows[i].choice.merge)]
    for i in sorted(usable, key=lambda i: -(rows[i].ratio or 0)):
        choice = rows[i].choice
        found = logits_of(opener.open(choice), pictures, config, choice.batch_size)
        check = judge(expected, found, pictures, True, exact=False)
        rows[i] = replace(rows[i], check=check)
        on_row(rows)
        before = 1.0 if check.accuracy_before is None else check.accuracy_before
        if before - (rows[i].right or 0.0) <= max_drop + 1e-9:
            return rows[i]
    raise ConfigError("no runtime could run the model; `vitkit predict --runtime eager` says why")


def _refined(
    winner: Row,
    opener: _Opener,
    pictures: Pictures,
    config: AnyConfig,
    latency: bool,
    seconds: float,
    rows: list[Row],
    on_row: OnRow,
) -> Row:
    """Other batch sizes (for throughput) and numbers of threads; neither changes an answer."""
    cores = os.cpu_count() or 1
    sizes = [winner.choice.batch_size] if latency else [s for s in _SIZES if s <= len(pictures)]
    threads = [None, *([cores // 2] if cores > 2 else [])]
    best = winner
    for t in threads:
        runtime = opener.open(replace(winner.choice, threads=t))
        for size in sizes:
            choice = replace(winner.choice, batch_size=size, threads=t)
            if choice == winner.choice:
                continue
            images = next(pictures.batches(config, size))
            speed = images_per_second({"it": runtime}, images, seconds)["it"]
            rows.append(Row(choice, speed, check=winner.check))
            on_row(rows)
            if speed > (best.speed or 0) * 1.03:  # less is noise
                best = rows[-1]
    return best


def exported(model: nn.Module, choice: Choice, calibration: Calibration | None) -> dict[str, bytes]:
    """The files that `stored` opens: what was measured, not made again at every start."""
    if choice.runtime not in ("onnx", "openvino"):
        return {}
    from vitkit.runtime.export import write_files

    with tempfile.TemporaryDirectory(prefix="vitkit-") as folder:
        name = "model.onnx" if choice.runtime == "onnx" else "model.xml"
        used = calibration if choice.calibrated else None
        with torch.no_grad():
            write_files(
                model, choice.runtime, Path(folder, name), int8=choice.int8, merge=choice.merge, calibration=used
            )
        return {p.name: p.read_bytes() for p in Path(folder).iterdir()}
