"""`vitkit study`: the articles' experiments, each one command."""

from __future__ import annotations

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
    data: Annotated[str, Option(help="A set of images, as for `vitkit train`.")] = "digits",
    budget: Annotated[str, Option(help="Time for all trainings together: 90s, 10m, 1h30m.")] = "10m",
    out: Annotated[Path, Option(help="Results go to DIR/NAME; DIR/runs remembers trainings.")] = Path("studies"),
    seeds: Annotated[int, Option(min=1, help="Trainings of each arm; 3 give an interval.")] = 3,
    steps: Annotated[int, Option(min=0, help="Steps of each training instead of a budget.")] = 0,
    as_json: opt.Json = False,
) -> None:
    """Watch a claim about Vision Transformers come true, or not: short trainings, a table, a figure.

    The same command resumes a study that was stopped.
    """
    from vitkit.training.config import parse_duration

    seconds = parse_duration(budget)
    if name is None:
        return _list(seconds, seeds, as_json)
    from vitkit.figures.style import need_matplotlib
    from vitkit.study.run import named, run
    from vitkit.study.write import as_json as flat
    from vitkit.study.write import table_lines

    named(name)
    need_matplotlib()  # before the trainings, not after them
    with Bar() as progress:
        try:
            result = run(name, data, out, seconds, steps, seeds, progress)
        except KeyboardInterrupt:
            progress.note("finished trainings are kept; the same command resumes")
            raise
    if as_json:
        return opt.print_json(flat(result))
    written = f"written: {out / name / result.study.name}.png, .svg, .md, .csv, .json"
    lines = [*table_lines(result.table, result.study.reference), "", *result.finding.sentences, written]
    return echo("\n".join(lines))


def _list(budget: float, seeds: int, as_json: bool) -> None:
    from vitkit.study.run import expected
    from vitkit.study.studies import STUDIES

    rows: list[dict[str, str | float]] = []
    for one in STUDIES.values():
        trainings, plan = expected(one, seeds, budget)
        rows.append({"name": one.name, "question": one.question, "varies": one.varies, "trainings": trainings})
        rows[-1] |= {"minutes": round(plan.seconds / 60, 1), "steps": plan.steps}
    if as_json:
        return opt.print_json(rows)
    shown = {"name": "", "question": "", "trainings": "", "steps": ",", "minutes": ".0f"}
    cells = ([format(row[key], form) for key, form in shown.items()] for row in rows)
    opt.print_table(("study", *list(shown)[1:]), cells, left=2)
    return echo(
        f"Expected on digits with {seeds} seeds on this machine as it is now. `vitkit study NAME` runs one; "
        f"--budget 5m takes less time, --data mnist more images."
    )
