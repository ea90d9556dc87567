"""`vitkit study`: the articles' experiments, each one command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.progress import Bar

_STUDIES = opt.keys_of("vitkit.study.studies", "STUDIES")


def study(
    name: Annotated[
        str | None, Argument(metavar="[NAME]", help="A study; leave it out for a list.", autocompletion=_STUDIES)
    ] = None,
    data: Annotated[
        str, Option(help="A set of images, as for `vitkit train`, @16 for 16 pixels; default: the study's own.")
    ] = "",
    budget: Annotated[str, Option(help="Time for all trainings together: 90s, 10m, 1h30m.")] = "90m",
    out: Annotated[Path, Option(help="Results go to DIR/NAME; DIR/runs remembers trainings.")] = Path("studies"),
    seeds: Annotated[int, Option(min=0, help="Trainings of each arm; 0: as many as see the effect.")] = 0,
    steps: Annotated[int, Option(min=0, help="Steps of each training; 0: until longer ones gain nothing.")] = 0,
    workers: Annotated[int, Option(min=0, help="Trainings side by side; 0: one for each core.")] = 0,
    as_json: opt.Json = False,
) -> None:
    """Watch a claim about Vision Transformers come true, or not: short trainings, a table, a figure.

    The same command resumes a study that was stopped.
    """
    from vitkit.training.config import parse_duration

    seconds, workers = parse_duration(budget), workers or os.cpu_count() or 1
    if name is None:
        return _list(seconds, workers, as_json)
    from vitkit.figures.style import need_matplotlib
    from vitkit.study.numbers import sentence
    from vitkit.study.run import named, run
    from vitkit.study.write import as_json as flat
    from vitkit.study.write import table_lines

    named(name)
    need_matplotlib()  # before the trainings, not after them
    with Bar() as progress:
        try:
            result = run(name, data, out, seconds, steps, seeds, workers, progress)
        except KeyboardInterrupt:
            progress.note("finished trainings are kept; the same command resumes")
            raise
    if as_json:
        return opt.print_json(flat(result))
    written = f"written: {out / name / result.study.name}.png, .svg, .md, .csv, .json"
    doubts = [sentence(doubt) for doubt in result.doubts]
    lines = [*table_lines(result.table, result.study.reference), "", *result.finding.sentences, *doubts, written]
    return echo("\n".join(lines))


def _list(budget: float, workers: int, as_json: bool) -> None:
    from vitkit.study.run import expected
    from vitkit.study.studies import STUDIES

    rows: list[dict[str, str | float]] = []
    for one in STUDIES.values():
        arms, steps = expected(one, budget, workers)
        rows.append({"name": one.name, "question": one.question, "varies": one.varies, "data": one.data})
        rows[-1] |= {"arms": arms, "steps": steps}
    if as_json:
        return opt.print_json(rows)
    shown = {"name": "", "question": "", "data": "", "arms": "", "steps": ","}
    cells = ([format(row[key], form) for key, form in shown.items()] for row in rows)
    opt.print_table(("study", *list(shown)[1:]), cells, left=3)
    return echo(
        f"Steps of each training that {budget / 60:.0f} minutes buy here for three seeds; fewer are taken when longer "
        f"trainings gain nothing. `vitkit study NAME` runs one; --data digits is a smoke test that takes a minute."
    )
