"""What `tune` has measured so far, in a file: after a kill, what was measured is not measured again.

It counts for the same weights, images, machine, packages and settings alone: the file names a digest of them all.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vitkit.io import canonical, parse_json, write_json
from vitkit.model.base import VisionModel
from vitkit.runtime.base import Choice
from vitkit.runtime.table import RUNTIMES
from vitkit.runtime.verify import Check, Images
from vitkit.tasks import Metric, task_of


@dataclass(frozen=True)
class Row:
    """One configuration. Empty fields were not needed, or `problem` says why they are empty."""

    choice: Choice
    speed: float | None = None  # img/s
    ratio: float | None = None  # to PyTorch as it is, at the same batch size
    check: Check | None = None
    problem: str | None = None
    seconds: float = 0.0  # that finding this out took

    def cells(self) -> dict[str, str]:
        """What people read, with the keys of version 0.1."""
        speed = (self.problem or "") if self.speed is None else f"{self.speed:.1f}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}x"
        right = "" if self.check is None else self.check.text(self.check.score)
        batch, threads = str(self.choice.batch_size), str(self.choice.threads or "all")
        how = {"way": self.choice.name, "batch": batch, "threads": threads}
        return {**how, "images_per_second": speed, "ratio": ratio, "right": right}

    @property
    def words(self) -> str:
        """On one line, with its units."""
        name, batch, threads, speed, ratio, right = self.cells().values()
        how = f"{name}, batch {batch}" + (f", {threads} threads" if self.choice.threads else "")
        metric = None if self.check is None or self.check.accuracy is None else self.check.metric
        score = "agreement" if metric is None else metric.words
        found = [speed if self.speed is None else f"{speed} img/s", ratio, right and f"{score} {right}"]
        return f"{how}: {', '.join(filter(None, found))}"


def digest_of_images(images: Images) -> str:
    found = hashlib.sha256(canonical([images.name, list(images.pixels.shape)]).encode())
    found.update(images.pixels.contiguous().numpy().data)
    if images.labels is not None:
        found.update(images.labels.contiguous().numpy().data)
    return found.hexdigest()


def versions() -> dict[str, str]:
    """Of PyTorch and of the packages that run models."""
    found = {"torch": str(torch.__version__)}
    for package in sorted({package for row in RUNTIMES.values() for package in row.packages}):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


class Kept:
    """The rows in a file, by configuration. No path: nothing is kept."""

    def __init__(self, path: Path | None, about: Mapping[str, object], model: VisionModel) -> None:
        self.path, self.digest = path, hashlib.sha256(canonical(about).encode()).hexdigest()
        self.rows: dict[Choice, Row] = {}
        if path is not None and path.is_file():
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged, or of something else
                found = parse_json(path.read_text(encoding="utf-8"))
                if found["digest"] == self.digest:
                    rows = [_row(one, task_of(model).score) for one in found["rows"]]
                    self.rows = {row.choice: row for row in rows}

    def add(self, row: Row) -> None:
        self.rows[row.choice] = row
        if self.path is not None:
            rows = [{**asdict(one), "check": one.check and _plain(one.check)} for one in self.rows.values()]
            write_json(self.path, {"digest": self.digest, "rows": rows})


def _plain(check: Check) -> dict[str, object]:
    return {key: value for key, value in vars(check).items() if key != "metric"}


def _row(found: Mapping[str, object], metric: Metric) -> Row:
    fields = dict(found)
    choice, check = fields.pop("choice"), fields.pop("check")
    if not isinstance(choice, dict):
        raise TypeError("a configuration is an object")
    whole = Check(**check, metric=metric) if isinstance(check, dict) else None
    return Row(Choice(**choice), check=whole, **fields)  # type: ignore[arg-type]
