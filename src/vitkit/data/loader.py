"""Batches of a source: shuffled, shared among ranks, loaded by processes, resumable from two integers.

    loader = Loader(open_data("photos"), preprocessing, batch_size=256, augment=preset("medium"), workers=4)
    for batch in loader:            # one epoch; the next `for` is the next epoch
        images = normalise(batch.images.to(device), preprocessing)

`batch_size` counts the samples of all ranks together, so a run on two machines sees the same batches
as a run on one. Evaluation (no `augment`) gives every sample exactly once; training leaves out the
last, incomplete batch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vitkit.data.augment import Augment
from vitkit.data.badfiles import BadFiles
from vitkit.data.order import Order, epoch_order
from vitkit.data.parallel import as_it_is, begin, explain, own_child_handler
from vitkit.data.samples import Batch, Samples
from vitkit.data.source import Source
from vitkit.errors import ConfigError, VitkitError
from vitkit.model.config import Preprocessing

_AHEAD = 2  # batches that each process keeps ready


class Loader:
    """Iterating gives the rest of the current epoch, from `step` on.

    source       what `open_data` returned
    pre          the model's preprocessing
    batch_size   samples per batch, over all ranks
    augment      None for evaluation; an `Augment` (which may do nothing) for training
    seed         of the order and of all augmentation
    workers      loading processes; sets in memory need none and ignore it
    rank         which part of every batch is loaded here, of `world_size` parts
    balanced     draw every class equally often
    bad_files    where unreadable files are written; by default in memory, with the usual limit
    channels     of the model's input; by default the source's
    """

    def __init__(
        self,
        source: Source,
        pre: Preprocessing,
        batch_size: int,
        augment: Augment | None = None,
        seed: int = 0,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        balanced: bool = False,
        bad_files: BadFiles | None = None,
        channels: int | None = None,
    ) -> None:
        _check(batch_size, workers, rank, world_size, training=augment is not None)
        self.source, self.pre, self.augment, self.seed = source, pre, augment, seed
        self.rank, self.world_size, self.balanced = rank, world_size, balanced
        self.training = augment is not None
        self.batch_size = batch_size
        if self.training and len(source) < batch_size:  # a tiny set: one batch of all there is
            self.batch_size = max(world_size, len(source) // world_size * world_size)
        self.samples = Samples(source, pre, augment, seed, channels)
        self.workers = 0 if self.samples.pixels is not None else workers
        self.bad_files = bad_files if bad_files is not None else BadFiles(total=len(source))
        self.epoch = self.step = 0
        self._feed = _Feed()
        self._processes: DataLoader | None = None

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        whole, rest = divmod(len(self.source), self.batch_size)
        return whole if self.training else whole + bool(rest)

    def state_dict(self) -> dict[str, int]:
        """Where the run is: two integers. The next batch is number `step` of epoch `epoch`."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.step = int(state["epoch"]), int(state["step"])

    def __iter__(self) -> Iterator[Batch]:
        """The batches of this epoch that are still to come. On a rank, the last of an evaluation may be empty."""
        order = epoch_order(self.source, self.seed, self.epoch, shuffle=self.training, balanced=self.balanced)
        parts = [order.part(s, self.batch_size, self.rank, self.world_size) for s in range(self.step, len(self))]
        for batch in self._load(self.epoch, parts):
            self.bad_files.record(*batch.bad)
            self.step += 1
            yield batch
        self.epoch, self.step = self.epoch + 1, 0

    def _load(self, epoch: int, parts: list[Order]) -> Iterator[Batch]:
        if not self.workers:
            for part in parts:
                yield self.samples.load(epoch, part)
            return
        self._feed.work = [(epoch, part.indices, part.repeats) for part in parts]
        if self._processes is None:
            self._processes = self._start()
        try:
            with own_child_handler():
                results = iter(self._processes)
            for result in results:
                if isinstance(result, VitkitError):
                    raise result
                yield result if isinstance(result, Batch) else _from_numpy(result)
        except GeneratorExit:  # the caller broke off; the processes wait for the next epoch
            raise
        except BaseException as e:
            explained = explain(e, getattr(self._processes, "_iterator", None))
            self.close()
            raise explained from e

    def _start(self) -> DataLoader:
        shape = (self.batch_size // self.world_size + 1, self.samples.channels, *self.pre.size)
        by_pipe = not _fits_shared_memory(int(np.prod(shape)) * self.workers * (_AHEAD + 1))
        return DataLoader(
            _Work(self.samples, by_pipe),
            batch_size=None,  # an item of the feed is a whole batch
            sampler=self._feed,
            num_workers=self.workers,
            prefetch_factor=_AHEAD,
            persistent_workers=True,
            worker_init_fn=begin,
            collate_fn=as_it_is,
            pin_memory=False,
        )

    def close(self) -> None:
        """End the loading processes. They also end by themselves when the loader is forgotten."""
        running = getattr(self._processes, "_iterator", None)
        self._processes = None
        if running is not None:
            running._shutdown_workers()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _check(batch_size: int, workers: int, rank: int, world_size: int, training: bool) -> None:
    if batch_size < 1 or workers < 0:
        raise ConfigError(f"batch_size={batch_size} must be at least 1 and workers={workers} at least 0")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} must be from 0 to world_size - 1 = {world_size - 1}")
    if training and batch_size % world_size:
        near = max(1, batch_size // world_size) * world_size
        raise ConfigError(f"batch_size={batch_size} counts all {world_size} ranks and must divide evenly; try {near}")


# --- what runs in the loading processes ------------------------------------------------------------


class _Feed:
    """The work of the coming epoch, handed to the processes in order."""

    def __init__(self) -> None:
        self.work: list[tuple[int, np.ndarray, np.ndarray]] = []

    def __iter__(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        return iter(self.work)

    def __len__(self) -> int:
        return len(self.work)


class _Work(Dataset):
    """Turns an item of the feed into a batch. Errors travel as values, whole and without a traceback."""

    def __init__(self, samples: Samples, by_pipe: bool) -> None:
        self.samples, self.by_pipe = samples, by_pipe

    def __getitem__(self, item: tuple[int, np.ndarray, np.ndarray]) -> Any:
        epoch, indices, repeats = item
        try:
            batch = self.samples.load(epoch, Order(indices, repeats))
        except VitkitError as e:
            return e
        if not self.by_pipe:
            return batch
        return batch.images.numpy(), batch.labels.numpy(), batch.indices.numpy(), batch.keys, batch.bad


def _from_numpy(parts: tuple[Any, ...]) -> Batch:
    images, labels, indices, keys, bad = parts
    return Batch(torch.from_numpy(images), torch.from_numpy(labels), torch.from_numpy(indices), keys, bad)


def _fits_shared_memory(size: int) -> bool:
    """False where /dev/shm is too small for the batches on their way, as in many containers."""
    return not os.path.isdir("/dev/shm") or shutil.disk_usage("/dev/shm").free > 2 * size
