"""One job per sample, done in order, by several processes if asked."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    with own_child_handler():
        results = iter(pool)
    for _ in track(range(count), what):
        try:
            yield next(results)
        except Exception as e:
            raise explain(e, results) from e


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


def explain(error: BaseException, running: Any) -> BaseException:
    """A process of the running loader that was killed is named; otherwise the error stays what it is.

    When a process dies, what fails first may be anything from a time-out to a broken connection.
    """
    if not isinstance(error, (RuntimeError, OSError, EOFError)):
        return error
    workers = getattr(running, "_workers", [])
    for worker in workers:
        worker.join(0.5)  # one that is dying may need a moment to be dead
    dead = [w for w in workers if not w.is_alive() and w.exitcode]
    if not dead:
        return error
    named = ", ".join(f"{w.pid} ({_ending(w.exitcode)})" for w in dead)
    return DataError(
        f"a loading process died: {named}. Most often memory ran out: try fewer --workers or a smaller batch. "
        f"The run can be resumed from its last checkpoint"
    )


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
