"""How far a long job is: one protocol for the library, one bar for people.

The library takes a `Progress` and calls `note` and `update`; `SILENT` ignores both. The commands hand in a
`Bar`, which draws on a terminal and prints only the notes elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from vitkit.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

T = TypeVar("T")
_PATIENCE = 0.5  # seconds before a bar appears: what is quicker needs none


class Progress:
    """Ignores everything; subclasses show it."""

    def note(self, text: str) -> None:
        """A line worth reading."""

    def update(self, what: str, done: float, total: float | None = None) -> None:
        """`done` of `total` (None: unknown) of the job called `what`."""

    def track(self, items: Sequence[T], what: str) -> Iterator[T]:
        """The items one by one, counted."""
        for count, item in enumerate(items, start=1):
            yield item
            self.update(what, count, len(items))


SILENT = Progress()


class Bar(Progress):
    """A bar per job on the error stream, for as long as the `with` block lasts; no bar where that is no terminal."""

    def __init__(self, shown: bool = True) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False, markup=False)
        self.shown = shown
        self.drawn = shown and self.console.is_terminal
        self.started = time.monotonic()
        self.bars: RichProgress | None = None
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bars is not None:
            self.bars.stop()

    def note(self, text: str) -> None:
        if self.shown:
            self.console.print(printable(text, keep="\n"), soft_wrap=True)

    def update(self, what: str, done: float, total: float | None = None) -> None:
        if not self.drawn or (self.bars is None and time.monotonic() - self.started < _PATIENCE):
            return
        if self.bars is None:
            from rich.progress import Progress as RichProgress

            self.bars = RichProgress(console=self.console, transient=True)
            self.bars.start()
        if what not in self.tasks:
            self.tasks[what] = self.bars.add_task(printable(what), total=total)
        self.bars.update(self.tasks[what], completed=done, total=total)
