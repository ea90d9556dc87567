"""`vitkit study`: the articles' experiments, each one command."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.errors import ConfigError
from vitkit.progress import Bar

if TYPE_CHECKING:
    from vitkit.study.compare import Agreement
    from vitkit.study.table import Result

_STUDIES = opt.keys_of("vitkit.study.studies", "STUDIES")


def study(
    name: Annotated[
        str | None, Argument(metavar="[NAME]", help="A study; leave it out for a list.", autocompletion=_STUDIES)
    ] = None,
    results: Annotated[
        list[Path] | None, Argument(metavar="[A.json B.json]", help="After `compare`: two results of one study.")
    ] = None,
    data: Annotated[
        str, Option(help="A set of images, as for `vitkit train`, @16 for 16 pixels; default: the study's own.")
    ] = "",
    every: Annotated[bool, Option("--all", help="All studies, in equal parts of the budget.")] = False,
    budget: Annotated[str, Option(help="Time for all trainings together: 90s, 10m, 1h30m.")] = "90m",
    out: Annotated[Path, Option(help="Results go to DIR/NAME; DIR/runs remembers trainings.")] = Path("studies"),
    seeds: Annotated[int, Option(min=0, help="Trainings of each arm; 0: as many as see the effect.")] = 0,
    steps: Annotated[int, Option(min=0, help="Steps of each training; 0: until longer ones gain nothing.")] = 0,
    workers: Annotated[int, Option(min=0, help="Trainings side by side; 0: one for each core.")] = 0,
    as_json: opt.Json = False,
) -> None:
    """Watch a claim about Vision Transformers come true, or not: trainings, a table, a figure.

    The same command resumes a study that was stopped. `vitkit study compare A.json B.json` says whether two results
    of one study agree, and exits with code 1 when they do not.
    """
    from vitkit.training.config import parse_duration

    seconds, workers = parse_duration(budget), workers or os.cpu_count() or 1
    if name == "compare":
        return _compare(results or [], as_json)
    if results or (every and name):
        raise ConfigError("give one of `vitkit study NAME`, `vitkit study --all`, `vitkit study compare A B`")
    if name is None and not every:
        return _list(seconds, workers, as_json)
    from vitkit.figures.style import need_matplotlib
    from vitkit.study.run import named, run
    from vitkit.study.studies import STUDIES
    from vitkit.study.write import as_json as flat

    names = list(STUDIES) if every else [named(name or "").name]
    need_matplotlib()  # before the trainings, not after them
    with Bar() as progress:
        try:
            found = [run(n, data, out, seconds / len(names), steps, seeds, workers, progress) for n in names]
        except KeyboardInterrupt:
            progress.note("finished trainings are kept; the same command resumes")
            raise
    if as_json:
        return opt.print_json([flat(result) for result in found] if every else flat(found[0]))
    return echo("\n\n".join(_told(result, out) for result in found))


def _told(result: Result, out: Path) -> str:
    from vitkit.study.numbers import sentence
    from vitkit.study.write import table_lines

    name = result.study.name
    written = f"written: {out / name / name}.png, .svg, .md, .csv, .json"
    doubts = [sentence(doubt) for doubt in result.doubts]
    return "\n".join(
        [*table_lines(result.table, result.study.reference), "", *result.finding.sentences, *doubts, written]
    )


def _compare(results: list[Path], as_json: bool) -> None:
    from vitkit.study.compare import agreements, read_result

    if len(results) != 2:
        raise ConfigError("compare two results: vitkit study compare A.json B.json")
    found = agreements(*map(read_result, results))
    if as_json:
        opt.print_json([asdict(one) for one in found])
    else:
        rows = (
            (one.arm, f"{one.first:.1%}", f"{one.second:.1%}", f"{100 * one.gap.mean:+.1f}", _between(one), one.verdict)
            for one in found
        )
        opt.print_table(("arm", *(path.stem for path in results), "difference", "95% interval", ""), rows)
    raise Exit(1 if any(one.verdict == "differs" for one in found) else 0)


def _between(one: Agreement) -> str:
    return f"{100 * one.gap.low:+.1f} to {100 * one.gap.high:+.1f}" if one.gap.known else "one seed"


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
