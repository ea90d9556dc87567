"""How far a long job is: one protocol for the library, one bar for people.

The library takes a `Progress` and calls `note` and `update`; `SILENT` ignores both. The commands hand in a
`Bar`, which draws on a terminal and prints only the notes elsewhere. From Python, `progress_here` takes what suits
the place: a `Cell` of a notebook, a bar on a terminal, nothing in a script whose output is a file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from vitkit.display import Part, Shown, in_notebook, on_terminal
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


class Cell(Progress):
    """Below a cell of a notebook: what is shown, updated in place, at most a few times a second."""

    def __init__(self) -> None:
        from IPython.display import display  # a notebook has it; vitkit needs none

        self.handle, self.display = None, display
        self.lines, self.last = dict[str, str](), 0.0

    def __enter__(self) -> Cell:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.handle is not None:  # what was still to be drawn; bars of finished jobs go
            self.show([line for what, line in self.lines.items() if not what], at_once=True)

    def show(self, parts: Sequence[Part], at_once: bool = False) -> None:
        shown = _Parts(parts)
        if self.handle is None:
            self.handle = self.display(shown, display_id=True)
        elif at_once or time.monotonic() - self.last > _PATIENCE:
            self.handle.update(shown)
            self.last = time.monotonic()

    def note(self, text: str) -> None:
        self.lines[""] = f"{self.lines.get('', '')}{text}\n"
        self.show(list(self.lines.values()), at_once=True)

    def update(self, what: str, done: float, total: float | None = None) -> None:
        self.lines[what] = f"{what}: {done:,.0f}" + (f" of {total:,.0f} ({done / total:.0%})" if total else "")
        self.show(list(self.lines.values()), at_once=done == total)


class _Parts(Shown):
    def __init__(self, parts: Sequence[Part]) -> None:
        self.shown = parts

    def parts(self) -> Sequence[Part]:
        return self.shown


@contextmanager
def progress_here(given: Progress | None = None) -> Iterator[Progress]:
    """The progress that was given, or what suits the place where Python runs."""
    if given is not None:
        yield given
    elif in_notebook():
        with Cell() as cell:
            yield cell
    elif on_terminal():
        with Bar() as bar:
            yield bar
    else:
        yield SILENT
