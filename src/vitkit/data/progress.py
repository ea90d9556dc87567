"""Progress bars that readers may be given, without knowing about terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

# Wraps a sequence that takes long to go through; the second argument says in words what is done.
Track = Callable[[Sequence[Any], str], Iterable[Any]]


def quiet(items: Sequence[T], what: str) -> Iterable[T]:
    """No bar at all: what the library does unless it is asked."""
    return items


def bar(items: Sequence[T], what: str) -> Iterable[T]:
    """A bar on the error stream, for people; it draws nothing when that is not a terminal."""
    from rich.console import Console
    from rich.progress import track

    return track(items, description=what, console=Console(stderr=True), transient=True, disable=len(items) < 200)


@contextmanager
def download_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told how many bytes have just arrived."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=total)
        yield lambda size: shown.advance(task, size)
