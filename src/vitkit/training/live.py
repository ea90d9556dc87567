"""How a training run looks while it goes: a live panel on a terminal, a table in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from vitkit.display import Grid, in_notebook, on_terminal
from vitkit.errors import printable
from vitkit.progress import Cell
from vitkit.training.result import Line, Rate, Watcher

_EVERY = 5.0  # seconds between plain lines


class View(Watcher):
    """Shows nothing, and knows how fast a run is and how long it takes."""

    def __init__(self) -> None:
        self.last = Rate(0.0, 0)
        self.speed = self.neighbours = 0.0
        self.left = ""
        self.ahead = ""  # the score that is expected at the end
        self.heard = time.monotonic()
        self.first: tuple[float, float] | None = None  # seconds and progress at the first step

    def update(self, what: str, done: float, total: float | None = None) -> None:
        """A job beside the steps: now and then a line says how far it is."""
        if total and done < total and time.monotonic() - self.heard > _EVERY:
            self.heard = time.monotonic()
            self.note(f"{done / total:4.0%}  {what}: {done:,.0f} of {total:,.0f}")

    def expected(self, score: str) -> None:
        self.ahead = score

    def measure(self, progress: float, rate: Rate) -> None:
        start, at = self.first = self.first or (rate.seconds, progress)  # starting up is not counted
        if progress > at:
            self.left = remaining((rate.seconds - start) * (1 - progress) / (progress - at))
        if rate.seconds > self.last.seconds:
            self.speed = (rate.images - self.last.images) / (rate.seconds - self.last.seconds)
        self.last, self.neighbours = rate, rate.neighbours

    @property
    def others(self) -> str:
        """Who is in the way."""
        return f" (other processes take {self.neighbours:.1f} cores)" if self.neighbours else ""


def remaining(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


def loss_of(line: Line) -> str:
    return "not finite" if line["loss"] is None else f"{line['loss']:.4f}"


class PlainView(View):
    """For logs: the choices, a line every few seconds, every evaluation."""

    written = 0.0

    def note(self, text: str) -> None:
        print(printable(text, keep="\n\t"), file=sys.stderr, flush=True)

    def step(self, progress: float, line: Line, rate: Rate) -> None:
        self.measure(progress, rate)
        if time.monotonic() - self.written > _EVERY:
            self.written = time.monotonic()
            self.note(
                f"{progress:4.0%}  step {line['step']}  epoch {line['epoch']:.2f}  loss {loss_of(line)}  "
                f"lr {line['lr']:.2e}  {self.speed:,.0f} img/s{self.others}  {self.left}"
            )

    def evaluated(self, line: Line, score: str, best: str) -> None:
        if score:  # a set without validation images is not evaluated
            self.note(f"      step {line['step']}  validation {score}  best {best}")

    def expected(self, score: str) -> None:
        self.note(f"      expected at the end: {score}")


class LiveView(View):
    """For people: one panel that stays in place."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console, self.score = console, ""
        percent = TextColumn("{task.percentage:.0f}%  {task.fields[left]}")
        self.bar = Progress(TextColumn("training"), BarColumn(), percent)
        self.task = self.bar.add_task("", total=1.0, left="")
        self.shown = self.live = Live(self.bar, console=console, refresh_per_second=4)
        self.line: Line | None = None

    def note(self, text: str) -> None:
        self.console.print(printable(text, keep="\n"), highlight=False, markup=False)

    def step(self, progress: float, line: Line, rate: Rate) -> None:
        self.measure(progress, rate)
        self.line = line
        self.bar.update(self.task, completed=progress, left=self.left)
        self.draw()

    def evaluated(self, line: Line, score: str, best: str) -> None:
        self.score = f"{score} (best {best})" if score else ""
        self.draw()

    def draw(self) -> None:
        if (line := self.line) is None:
            return
        table = Table.grid(padding=(0, 2))
        speed = f"{self.speed:,.0f}{self.others}"
        table.add_row("step", f"{line['step']:,}", "epoch", f"{line['epoch']:.1f}", "img/s", speed)
        table.add_row("loss", loss_of(line), "lr", f"{line['lr']:.2e}", "validation", self.score)
        if self.ahead:
            table.add_row("", "", "", "", "expected at the end", self.ahead)
        grid = Table.grid()
        grid.add_row(self.bar)
        grid.add_row(table)
        self.live.update(grid)


class NotebookView(View):
    """For notebooks: a table that is updated in place, and the choices above it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.notes, self.score = Cell(), list[str](), ""
        self.line: Line | None = None
        self.progress = 0.0

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.draw()

    def step(self, progress: float, line: Line, rate: Rate) -> None:
        self.measure(progress, rate)
        self.progress, self.line = progress, line
        self.draw()

    def evaluated(self, line: Line, score: str, best: str) -> None:
        self.score = f"{score} (best {best})" if score else ""
        self.draw()

    def draw(self) -> None:
        parts: list[str | Grid] = list(self.notes)
        if (line := self.line) is not None:
            heads = ["training", "step", "epoch", "loss", "img/s", "validation", "expected at the end"]
            row = [f"{self.progress:.0%} {self.left}", f"{line['step']:,}", f"{line['epoch']:.1f}", loss_of(line)]
            parts.append(Grid([heads, [*row, f"{self.speed:,.0f}{self.others}", self.score, self.ahead]]))
        self.cell.show(parts)


def view_here(otherwise: type[View] = View) -> View:
    """What suits the place that a run is started from."""
    if in_notebook():
        return NotebookView()
    return LiveView(Console(stderr=True)) if on_terminal() else otherwise()
