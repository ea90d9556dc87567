"""What every command prints with: JSON for programs, plain tables for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

_LISTED = 10
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def open_table(*columns: str, left: int = 1) -> tuple[Callable[[Any], None], Table]:
    """A printer and an empty table; the first `left` columns hold words, the others numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # a file or a pipe has no width: never cut a line there
        console = Console(highlight=False, markup=False, width=200)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    return console.print, table


@contextmanager
def progress_bar(what: str, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on the error stream; nothing when that is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def best_device(wanted: str | None) -> str:
    """The device that was asked for, if it can be used; otherwise the best there is."""
    import torch

    from vitkit.errors import ConfigError

    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=wanted or best)
    except (RuntimeError, AssertionError) as e:
        first = str(e).splitlines()[0]
        raise ConfigError(f"--device {wanted} cannot be used here ({first}); leave it out for {best}") from None
    return wanted or best


def print_some(title: str, lines: list[str], all_of_them: str = "--json lists them all") -> None:
    """A title and the first lines under it; nothing when there are none."""
    if not lines:
        return
    typer.echo(f"{title}:")
    for line in lines[:_LISTED]:
        typer.echo(f"  {one_line(line)}")
    if len(lines) > _LISTED:
        typer.echo(f"  ... and {len(lines) - _LISTED} more; {all_of_them}")


def one_line(text: str) -> str:
    """File names may hold line breaks and bytes that are no text."""
    return text.encode(errors="backslashreplace").decode().replace("\r", "\\r").replace("\n", "\\n")
