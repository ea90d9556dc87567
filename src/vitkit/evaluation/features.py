"""What the classifier sees of every sample of a set, computed once: for probes, and for a head on a frozen backbone.

With a folder the features are a memory map there, and a pass that was killed continues at its last mark with the same
batches, so the numbers are those of a pass that was not.

Shapes: N samples of the set, M of them readable, D width of the representation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.data import Augment, BadFile, Loader, Source, normalise
from vitkit.errors import DataError
from vitkit.evaluation.run import How, evaluating, evaluation_loader
from vitkit.io import read_json, write_json
from vitkit.progress import SILENT, Progress
from vitkit.tasks.trainee import unwrapped
from vitkit.world import gather

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MARK_EVERY = 5.0  # seconds between marks of how far a pass is


@dataclass(frozen=True)
class Features:
    """Representations of the readable samples, in the order of the set."""

    indices: np.ndarray  # M, numbers in the set
    values: Tensor  # M D float32, on the CPU
    labels: Tensor  # M ...
    bad: tuple[BadFile, ...]


@dataclass
class Kept:
    """What is known so far: rows of a memory map under `path` (or of memory alone), and how many batches they are."""

    path: Path | None
    count: int  # N
    batches: int = 0
    unread: list[int] = field(default_factory=list)
    bad: list[BadFile] = field(default_factory=list)
    ended: bool = False  # before the last batch, for want of time
    rows: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))  # N D

    @classmethod
    def open(cls, path: Path | None, count: int) -> Kept:
        kept = cls(path, count)
        try:
            mark = read_json(path.with_suffix(".json")) if path is not None else None
            if mark is not None and path is not None:
                kept._map(path, "r+", int(mark["width"]))
                kept.batches, kept.unread = int(mark["batches"]), list(mark["unread"])
                kept.bad, kept.ended = [BadFile(*bad) for bad in mark["bad"]], mark.get("ended") is True
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or nothing that could be used
            return cls(path, count)
        return kept

    def _map(self, path: Path, mode: str, width: int) -> None:
        if mode == "w+" and hasattr(os, "posix_fallocate"):  # a disk that is too full says so now, and in words
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, 4 * self.count * width))
            mode = "r+"
        self.rows = np.memmap(path, np.float32, mode, shape=(self.count, width))  # type: ignore[call-overload]

    def put(self, indices: np.ndarray, values: np.ndarray, asked: np.ndarray, bad: list[BadFile]) -> None:
        if not self.rows.size:
            self.rows = np.zeros((self.count, values.shape[1]), dtype=np.float32) if self.path is None else self.rows
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._map(self.path, "w+", values.shape[1])
        self.rows[indices] = values
        self.unread += np.setdiff1d(asked, indices).tolist()
        self.bad += bad
        self.batches += 1

    def mark(self) -> None:
        """From here a pass that is killed continues."""
        if self.path is not None and isinstance(self.rows, np.memmap):
            self.rows.flush()
            about = {"batches": self.batches, "width": self.rows.shape[1], "unread": self.unread}
            about |= {"ended": self.ended, "bad": [[b.path, b.label, b.reason] for b in self.bad]}
            write_json(self.path.with_suffix(".json"), about)


def features(
    model: nn.Module,
    source: Source,
    progress: Progress = SILENT,
    path: Path | None = None,
    augment: Augment | None = None,
    seed: int = 0,
    view: int = 0,
    check: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
    **how: Unpack[How],
) -> Features:
    """What the classifier sees of every readable sample; ranks share the work and all get the whole.

    path     keep them as a memory map there (in one process); what an earlier pass kept is not computed again
    augment  vary the images as in training, by (seed, view, sample); None: as in evaluation
    check    is called after every batch and may raise: everything is marked before
    enough   is asked after every batch (in one process); once it says so, only the samples before are in the result,
             also when the same pass is asked for again
    """
    kept = Kept.open(path, len(source))
    with evaluation_loader(source, unwrapped(model).config, **how, augment=augment, seed=seed) as loader:
        fill(kept, model, loader, unwrapped(model).pooled, view, progress, check, enough)
    return _whole(kept, loader, source)


def fill(
    kept: Kept,
    model: nn.Module,
    loader: Loader,
    compute: Callable[[Tensor], Tensor],
    view: int,
    progress: Progress,
    check: Callable[[], None],
    enough: Callable[[], bool],
) -> None:
    """The rows that are missing, each what `compute` makes of an image; the rest is as `features` says."""
    if kept.batches >= len(loader) or kept.ended:
        return
    first, marked = next(model.parameters()), time.monotonic()
    total, what = len(loader.source), f"computing features of {loader.source.name} ({loader.source.split})"
    loader.epoch, loader.step = view, kept.batches
    with evaluating(model):
        for batch in loader:
            blank = torch.zeros(1, *batch.images.shape[1:], dtype=torch.uint8)  # for a rank with nothing to do
            images = normalise((batch.images if len(batch) else blank).to(first.device), loader.pre)
            values = compute(images.to(first.dtype))[: len(batch)].float().cpu().numpy()
            kept.put(batch.indices.numpy(), values, asked_of(loader, kept.batches), batch.bad)
            progress.update(what, min(total, kept.batches * loader.batch_size), total)
            if time.monotonic() - marked > _MARK_EVERY:
                kept.mark()
                marked = time.monotonic()
            try:
                check()
            except BaseException:
                kept.mark()
                raise
            if kept.batches < len(loader) and enough():
                kept.ended = True
                break
    kept.mark()


def _whole(kept: Kept, loader: Loader, source: Source) -> Features:
    """The parts of all ranks, each readable sample once, in the order of the set."""
    if loader.world_size == 1:
        count = min(len(source), kept.batches * loader.batch_size) if kept.ended else len(source)
        indices, rows, bad = np.delete(np.arange(count), kept.unread), kept.rows[:count], kept.bad
        values = rows if not kept.unread else rows[indices]
    else:
        asked = np.concatenate([asked_of(loader, step) for step in range(len(loader))])
        mine = np.setdiff1d(asked, kept.unread)
        parts = gather((mine, kept.rows[mine], kept.bad), loader.world_size)
        indices = np.concatenate([part[0] for part in parts])
        order = np.argsort(indices)
        indices, values = indices[order], np.concatenate([part[1] for part in parts])[order]
        bad = [b for part in parts for b in part[2]]
    if not len(indices):
        first = f", the first one because: {bad[0].reason}" if bad else ""
        raise DataError(f"no image of {source.name} can be read{first}; `vitkit data check` lists them all")
    return Features(indices, torch.from_numpy(values), torch.from_numpy(source.labels[indices]), tuple(bad))


def asked_of(loader: Loader, step: int) -> np.ndarray:
    """The samples that this rank is asked for in a step of a pass in order."""
    low, high = step * loader.batch_size, min(len(loader.source), (step + 1) * loader.batch_size)
    return np.arange(*(low + (high - low) * rank // loader.world_size for rank in (loader.rank, loader.rank + 1)))
