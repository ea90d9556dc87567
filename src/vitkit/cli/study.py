"""`vitkit study`: the articles' experiments, each one command."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitkit.cli.output import JsonOption, open_table, print_json

if TYPE_CHECKING:
    from vitkit.study.plan import Plan
    from vitkit.study.run import Result, Watcher


def study_names(incomplete: str) -> list[str]:
    from vitkit.study.studies import STUDIES

    return [name for name in STUDIES if name.startswith(incomplete)]


def study(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A study; leave it out for a list.", autocompletion=study_names),
    ] = None,
    data: Annotated[str, typer.Option(help="A set of pictures, as for `vitkit train`.")] = "digits",
    budget: Annotated[str, typer.Option(help="Time for all trainings together: 90s, 10m, 1h30m.")] = "10m",
    out: Annotated[Path, typer.Option(help="Results go to DIR/NAME; DIR/runs remembers trainings.")] = Path("studies"),
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each arm; 3 give an interval.")] = 3,
    steps: Annotated[int, typer.Option(min=0, help="Steps of each training instead of a budget.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Watch a claim about Vision Transformers come true, or not: short trainings, a table, a figure.

    Killed? The same command goes on where it was.
    """
    from vitkit.train.config import parse_duration

    seconds = parse_duration(budget)
    if name is None:
        return _list(seconds, seeds, as_json)
    from vitkit.explain.figures.style import need_matplotlib
    from vitkit.study.run import named, run

    named(name)
    need_matplotlib()  # before the trainings, not after them
    with _watched(name) as watcher:
        result = run(name, data, out, seconds, steps, seeds, watcher)
    return _report(result, out / name, as_json)


def _list(budget: float, seeds: int, as_json: bool) -> None:
    from vitkit.study.plan import expected_minutes
    from vitkit.study.studies import STUDIES

    rows = []
    for one in STUDIES.values():
        trainings, minutes, steps = expected_minutes(one, seeds, budget)
        rows.append((one, trainings, minutes, steps))
    if as_json:
        keys = ("name", "question", "varies", "trainings", "minutes", "steps")
        values = [(o.name, o.question, o.varies, t, round(m, 1), s) for o, t, m, s in rows]
        return print_json([dict(zip(keys, v, strict=True)) for v in values])
    print_, table = open_table("study", "question", "trainings", "steps", "minutes", left=2)
    for one, trainings, minutes, steps in rows:
        table.add_row(one.name, one.question, str(trainings), f"{steps:,}", f"{minutes:.0f}")
    print_(table)
    return typer.echo(
        f"Expected on digits with {seeds} seeds on this machine as it is now. `vitkit study NAME` runs one; "
        f"--budget 5m takes less time, --data mnist more pictures."
    )


def _report(result: Result, folder: Path, as_json: bool) -> None:
    from vitkit.study.write import as_json as flat
    from vitkit.study.write import table_lines

    if as_json:
        return print_json(flat(result))
    for line in table_lines(result.table, result.study.reference):
        typer.echo(line)
    typer.echo("")
    for sentence in result.finding.sentences:
        typer.echo(sentence)
    return typer.echo(f"written: {folder / result.study.name}.png, .svg, .md, .csv, .json")


@contextmanager
def _watched(name: str) -> Iterator[Watcher]:
    """A bar over all trainings on a terminal; a line for each elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from vitkit.study.run import Watcher

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    began, done = time.monotonic(), [0, 0]
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=None)

        def planned(plan: Plan, trainings: int) -> None:
            done[1] = trainings
            progress.update(task, total=trainings)
            about = f", about {plan.seconds / 60:.1f} minutes" if plan.seconds else ""
            console.print(f"{name}: {trainings} trainings of up to {plan.steps:,} steps{about}", highlight=False)

        def finished(what: str, accuracy: float, remembered: bool) -> None:
            done[0] += 1
            progress.update(task, completed=done[0])
            took = "remembered" if remembered else f"{time.monotonic() - began:.0f} s"
            console.print(f"{done[0]:3}/{done[1]}  {accuracy:6.1%}  {what}  ({took})", highlight=False)

        try:
            yield Watcher(plan=planned, done=finished)
        except KeyboardInterrupt:
            console.print(f"{done[0]} trainings are kept; the same command goes on from there", highlight=False)
            raise
