"""Batches of a source: shuffled, shared among ranks, loaded by processes, resumable from two integers.

    loader = Loader(open_data("photos").split(), preprocessing, batch_size=256, augment=preset("medium"), workers=4)
    for batch in loader:            # one epoch; the next `for` is the next epoch
        images = normalise(batch.images.to(device), preprocessing)

`batch_size` counts the samples of all ranks together, so a run on two machines sees the same batches
as a run on one. Evaluation (no `augment`) gives every sample exactly once; training leaves out the
last, incomplete batch. `ImageBatches` reads images without labels, by threads, in the order asked for.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess, parent_process
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitkit.data.augment import Augment
from vitkit.data.badfiles import BadFiles
from vitkit.data.decode import BadImage
from vitkit.data.order import EpochOrder, InOrder, Order, epoch_order, order_version
from vitkit.data.samples import Batch, Samples
from vitkit.data.source import Source
from vitkit.errors import ConfigError, DataError, VitkitError
from vitkit.model.config import AnyConfig, Preprocessing
from vitkit.progress import SILENT, Progress

AHEAD = 2  # results that each process keeps ready; batches that threads read while one is computed
SOON = 32  # batches before its turn that a sample is announced to its source, which may be far away
Item = TypeVar("Item")
T = TypeVar("T")
In = TypeVar("In", covariant=True)
Work = tuple[int, Order]  # epoch and samples of one batch
Result = Batch | bytes | VitkitError  # a batch in shared memory, or pickled


class Items(Protocol[In]):
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[In]: ...


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
    replace_bad  put another image of its class in the place of one that cannot be read, or leave it out
    in_order     every sample once and in order, also with an `augment`
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
        replace_bad: bool = True,
        in_order: bool = False,
    ) -> None:
        self.source, self.pre, self.augment, self.seed = source, pre, augment, seed
        self.rank, self.world_size, self.balanced = rank, world_size, balanced
        self.training, self.batch_size = augment is not None and not in_order, batch_size
        if batch_size < 1 or workers < 0:
            raise ConfigError(f"batch_size={batch_size} must be at least 1 and workers={workers} at least 0")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} must be from 0 to world_size - 1 = {world_size - 1}")
        if self.training and batch_size % world_size:
            near = max(1, batch_size // world_size) * world_size
            raise ConfigError(
                f"batch_size={batch_size} counts all {world_size} ranks and must divide evenly; try {near}"
            )
        if self.training and len(source) < batch_size:  # a tiny set: one batch of all there is
            self.batch_size = max(world_size, len(source) // world_size * world_size)
        self.samples = Samples(source, pre, augment, seed, channels, replace_bad)
        self.workers = 0 if self.samples.pixels is not None else workers
        self.bad_files = bad_files if bad_files is not None else BadFiles(total=len(source))
        self.epoch = self.step = 0
        self._feed = _Feed(source, rank, world_size)  # what the processes of this rank load, in order
        self._processes: DataLoader[Result] | None = None

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        whole, rest = divmod(len(self.source), self.batch_size)
        return whole if self.training else whole + bool(rest)

    def state_dict(self) -> dict[str, int]:
        """Where the run is: two integers, and in which order. The next batch is number `step` of epoch `epoch`."""
        return {"epoch": self.epoch, "step": self.step, "order": order_version(self.source, self.balanced)}

    def load_state_dict(self, state: dict[str, int], accept_order: bool = False) -> None:
        """An error in the middle of an epoch that began in an order of another version, unless that is accepted."""
        epoch, step, order = int(state["epoch"]), int(state["step"]), int(state.get("order", 1))
        now = order_version(self.source, self.balanced)
        if step and order != now and not accept_order:
            raise DataError(
                f"the run was stopped in the middle of epoch {epoch + 1} of {self.source.name} by a vitkit that puts "
                f"samples in another order (order {order}, here {now}): the rest of the epoch would repeat some and "
                f"leave out others. Resume with that version (config.json names it), accept it for this epoch with "
                f"--accept-changed-data, or begin again with --restart"
            )
        self.epoch, self.step = epoch, step

    def __iter__(self) -> Iterator[Batch]:
        """The batches of this epoch that are still to come. On a rank, the last of an evaluation may be empty."""
        order = epoch_order(self.source, self.seed, self.epoch, shuffle=self.training, balanced=self.balanced)
        self._feed.fill(self.epoch, order, self.batch_size, range(self.step, len(self)))
        for batch in self._load():
            self.bad_files.record(*batch.bad)
            self.step += 1
            yield batch
        self.epoch, self.step = self.epoch + 1, 0

    def _load(self) -> Iterator[Batch]:
        if not self.workers:
            for epoch, part in self._feed:
                yield self.samples.load(epoch, part)
            return
        if self._processes is None:
            shape = (self.batch_size // self.world_size + 1, self.samples.channels, *self.pre.size)
            by_pipe = not _fits_shared_memory(int(np.prod(shape)) * self.workers * (AHEAD + 1))
            load = partial(_load_batch, self.samples, by_pipe)
            self._processes = processes(load, self._feed, self.workers, keep=True)
        try:
            with own_child_handler():
                results = iter(self._processes)
            for result in results:
                if isinstance(result, VitkitError):
                    raise result
                yield pickle.loads(result) if isinstance(result, bytes) else result
        except GeneratorExit:  # the caller broke off; the processes wait for the next epoch
            raise
        except BaseException as e:
            explained = explain(e, getattr(self._processes, "_iterator", None))
            self.close()
            raise explained from e

    def close(self) -> None:
        """End the loading processes. They also end by themselves when the loader is forgotten."""
        running = getattr(self._processes, "_iterator", None)
        self._processes = None
        if running is not None:
            running._shutdown_workers()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Feed:
    """The work of a rank in an epoch; each item is made when it is asked for."""

    def __init__(self, source: Source, rank: int, world_size: int) -> None:
        self.source = source
        self.place, self.epoch, self.batch_size, self.steps = (rank, world_size), 0, 1, range(0)
        self.order: EpochOrder = InOrder(0)

    def fill(self, epoch: int, order: EpochOrder, batch_size: int, steps: range) -> None:
        self.epoch, self.order, self.batch_size, self.steps = epoch, order, batch_size, steps

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Work]:
        parts = (self.order.part(step, self.batch_size, *self.place) for step in self.steps)
        return ((self.epoch, part) for part in announced(parts, lambda part: self.source.soon(part.indices)))


def announced(items: Iterable[Item], announce: Callable[[Item], None]) -> Iterator[Item]:
    """The items, each of which is announced SOON items before its turn."""
    waiting = deque[Item]()
    for item in items:
        announce(item)
        waiting.append(item)
        if len(waiting) > SOON:
            yield waiting.popleft()
    yield from waiting


def _load_batch(samples: Samples, by_pipe: bool, item: Work) -> Result:
    """Turns an item of the feed into a batch. Errors travel as values, whole and without a traceback."""
    try:
        batch = samples.load(*item)
    except VitkitError as e:
        return e
    return pickle.dumps(batch) if by_pipe else batch


def _fits_shared_memory(size: int) -> bool:
    """False where /dev/shm is too small for the batches on their way, as in many containers."""
    return not os.path.isdir("/dev/shm") or shutil.disk_usage("/dev/shm").free > 2 * size


@dataclass(frozen=True)
class ReadImages:
    """Images that could be read, with their numbers, and those that could not, with the reason."""

    images: Tensor  # uint8 B C H W
    indices: list[int]
    bad: dict[int, str]


class ImageBatches:
    """Batches of a source as a model wants them, in the order asked for; threads read a few batches ahead."""

    def __init__(self, source: Source, config: AnyConfig, threads: int | None = None) -> None:
        self.source, self.pre, self.channels = source, config.preprocessing, config.channels
        self.threads = threads or min(8, os.cpu_count() or 1)

    def batches(self, wanted: Iterable[Sequence[int]]) -> Iterator[ReadImages]:
        """Each item of `wanted` holds the numbers of the samples of a batch."""
        pool = ThreadPoolExecutor(self.threads)
        waiting: deque[tuple[Sequence[int], list[Future[Tensor | str]]]] = deque()
        try:
            for numbers in announced(wanted, lambda numbers: self.source.soon(np.asarray(numbers))):
                waiting.append((numbers, [pool.submit(self._read, i) for i in numbers]))
                if len(waiting) > AHEAD:
                    yield self._assemble(*waiting.popleft())
            while waiting:
                yield self._assemble(*waiting.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, index: int) -> Tensor | str:
        try:
            return self.source.pixels_of(index, self.pre, self.channels)
        except BadImage as e:
            return e.reason

    def _assemble(self, numbers: Sequence[int], reads: list[Future[Tensor | str]]) -> ReadImages:
        results = {i: read.result() for i, read in zip(numbers, reads, strict=True)}
        good = {i: r for i, r in results.items() if isinstance(r, Tensor)}
        bad = {i: r for i, r in results.items() if isinstance(r, str)}
        empty = torch.empty(0, self.channels, *self.pre.size, dtype=torch.uint8)
        return ReadImages(torch.stack(list(good.values())) if good else empty, list(good), bad)


def in_order(job: Callable[[int], T], count: int, workers: int, what: str, progress: Progress = SILENT) -> Iterator[T]:
    """job(0), job(1), ... job(count - 1). With workers, the job and its results must be picklable."""
    if not workers:
        yield from map(job, progress.track(range(count), what))
        return
    with own_child_handler():
        results = iter(processes(job, range(count), workers))
    for _ in progress.track(range(count), what):
        try:
            yield next(results)
        except Exception as e:
            raise explain(e, results) from e


def processes(job: Callable[[Item], T], items: Items[Item], workers: int, keep: bool = False) -> DataLoader[T]:
    """Iterating does the job for what `items` then holds, in order, in so many processes; they may be kept."""
    return DataLoader(
        _Jobs(job),
        batch_size=None,
        sampler=items,
        num_workers=workers,
        prefetch_factor=AHEAD,
        persistent_workers=keep,
        worker_init_fn=begin,
        collate_fn=as_it_is,
    )


class _Jobs(Dataset[T], Generic[Item, T]):
    def __init__(self, job: Callable[[Item], T]) -> None:
        self.job = job

    def __getitem__(self, item: Item) -> T:
        return self.job(item)


def as_it_is(item: T) -> T:
    return item


def begin(number: int) -> None:
    """Ctrl-C is for the main process, which ends the others. When it is killed they end by themselves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None and parent.pid is not None:
        threading.Thread(target=end_after, args=(parent.pid,), daemon=True).start()


def end_after(parent: int, every: float = 1.0) -> None:
    """torch looks for the parent too, but takes whoever it has when it starts looking: perhaps already another."""
    while os.getppid() == parent:
        time.sleep(every)
    os._exit(1)


@contextmanager
def own_child_handler() -> Iterator[None]:
    """Keep torch's handler for dead processes out: it raises wherever the main program happens to be,
    even between the halves of an optimiser step. Without it the death shows when the next batch is asked for.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if on_main_thread and hasattr(signal, "SIGCHLD") else None
    yield
    if before is not None and signal.getsignal(signal.SIGCHLD) is not before:
        signal.signal(signal.SIGCHLD, before)


def explain(error: BaseException, running: object) -> BaseException:
    """A process of the running loader that was killed is named; otherwise the error stays what it is.

    When a process dies, what fails first may be anything from a time-out to a broken connection.
    """
    if not isinstance(error, (RuntimeError, OSError, EOFError)):
        return error
    workers: list[BaseProcess] = getattr(running, "_workers", [])
    for worker in workers:
        worker.join(0.5)  # one that is dying may need a moment to be dead
    dead = {w.pid: w.exitcode for w in workers if not w.is_alive() and w.exitcode}
    if not dead:
        return error
    endings = [f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}" for code in dead.values()]
    named = ", ".join(f"{pid} ({ending})" for pid, ending in zip(dead, endings, strict=True))
    return DataError(
        f"a loading process died: {named}. Most often memory ran out: try fewer --workers or a smaller batch. "
        f"The run can be resumed from its last checkpoint"
    )
