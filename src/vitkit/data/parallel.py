"""One job per sample, done in order, by several processes if asked."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset

from vitkit.data.progress import Track, quiet
from vitkit.errors import DataError

T = TypeVar("T")


def in_order(job: Callable[[int], T], count: int, workers: int, what: str, track: Track = quiet) -> Iterator[T]:
    """job(0), job(1), ... job(count - 1). With workers, the job and its results must be picklable."""
    if not workers:
        for i in track(range(count), what):
            yield job(i)
        return
    pool: DataLoader[Any] = DataLoader(
        _Jobs(job, count), batch_size=None, num_workers=workers, collate_fn=as_it_is, worker_init_fn=begin
    )
    results = iter(pool)
    for _ in track(range(count), what):
        try:
            yield next(results)
        except RuntimeError as e:
            raise explain(e) from e


class _Jobs(Dataset):
    def __init__(self, job: Callable[[int], Any], count: int) -> None:
        self.job, self.count = job, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.job(index)


def as_it_is(item: Any) -> Any:
    """The result of a process, not collated into anything."""
    return item


def begin(number: int) -> None:
    """Ctrl-C is for the main process, which ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def explain(error: RuntimeError) -> DataError | RuntimeError:
    """A process that was killed is named; anything else stays what it is."""
    text = str(error)
    if "DataLoader worker" not in text:
        return error
    return DataError(
        f"a loading process died: {text.splitlines()[0].strip()}. Most often memory ran out: try fewer --workers "
        f"or a smaller batch. The run can be resumed from its last checkpoint"
    )
