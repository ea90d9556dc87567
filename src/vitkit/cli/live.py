"""How a training run looks while it goes: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from vitkit.train.loop import Watcher

if TYPE_CHECKING:
    from typing_extensions import Self

_EVERY = 5.0  # seconds between plain lines


class View(Watcher):
    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        pass

    def __init__(self) -> None:
        self.accuracy = self.best = ""
        self.last = (0.0, 0)  # seconds and images at the last line
        self.speed = 0.0
        self.left = ""
        self.first: tuple[float, float] | None = None  # seconds and progress when the first step was told

    def measure(self, progress: float, line: dict[str, Any]) -> None:
        begun, at = self.first = self.first or (line["seconds"], progress)  # starting up is not counted
        if progress > at:
            self.left = remaining((line["seconds"] - begun) * (1 - progress) / (progress - at))
        seconds, images = self.last
        if line["seconds"] > seconds:
            self.speed = (line["images"] - images) / (line["seconds"] - seconds)
        self.last = line["seconds"], line["images"]

    def judge(self, line: dict[str, Any]) -> None:
        score = line.get("val_top1", line.get("val_map"))
        if score is not None:
            self.accuracy = f"{score:.2%}"
            self.best = f"{line['best']:.2%}"


def remaining(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


class PlainView(View):
    """For logs: the choices, a line every few seconds, every evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0.0

    def note(self, text: str) -> None:
        typer.echo(text, err=True)

    def step(self, progress: float, line: dict[str, Any]) -> None:
        self.measure(progress, line)
        if time.monotonic() - self.written > _EVERY:
            self.written = time.monotonic()
            loss = "not finite" if line["loss"] is None else f"{line['loss']:.4f}"
            typer.echo(
                f"{progress:4.0%}  step {line['step']}  epoch {line['epoch']:.2f}  loss {loss}  "
                f"lr {line['lr']:.2e}  {self.speed:,.0f} images/s  {self.left}",
                err=True,
            )

    def evaluated(self, line: dict[str, Any]) -> None:
        self.judge(line)
        if self.accuracy:  # a set without validation pictures is not judged
            typer.echo(f"      step {line['step']}  validation {self.accuracy}  best {self.best}", err=True)


class LiveView(View):
    """For people: one panel that stays in place."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.bar = Progress(
            TextColumn("training"), BarColumn(), TextColumn("{task.percentage:.0f}%  {task.fields[left]}")
        )
        self.task = self.bar.add_task("", total=1.0, left="")
        self.live = Live(self.bar, console=console, refresh_per_second=4)
        self.line: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.live.stop()

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def step(self, progress: float, line: dict[str, Any]) -> None:
        self.measure(progress, line)
        self.line = line
        self.bar.update(self.task, completed=progress, left=self.left)
        self.draw()

    def evaluated(self, line: dict[str, Any]) -> None:
        self.judge(line)
        self.draw()

    def draw(self) -> None:
        if not self.line:
            return
        table = Table.grid(padding=(0, 2))
        loss = "not finite" if self.line["loss"] is None else f"{self.line['loss']:.4f}"
        table.add_row(
            "step", f"{self.line['step']:,}", "epoch", f"{self.line['epoch']:.1f}", "images/s", f"{self.speed:,.0f}"
        )
        table.add_row("loss", loss, "lr", f"{self.line['lr']:.2e}", "validation", f"{self.accuracy} (best {self.best})")
        grid = Table.grid()
        grid.add_row(self.bar)
        grid.add_row(table)
        self.live.update(grid)
