"""`vitkit config`: configuration files and their schema; `vitkit runs`: a table of runs, and what differs between some;
`vitkit sweep`: a small search over settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.errors import ConfigError, shell_word

config = Typer(help="Configuration files of training runs.", no_args_is_help=True)
Set = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="A setting; wins over the file.")]
Config = Annotated[str | None, Option(metavar="FILE|RUN", help="Settings from .toml, .json or a run; options win.")]


@config.command("show")
def show(
    file: Annotated[str | None, Argument(metavar="[FILE|RUN]", help="A .toml or .json file, or a run.")] = None,
    settings: Set = None,
    as_json: opt.Json = False,
) -> None:
    """Print settings as a file for `vitkit train --config`: those of a file or a run, else every default."""
    from vitkit.training.config import TrainConfig, assign
    from vitkit.training.files import as_toml, read_settings

    given = read_settings(file) if file else {}
    values = assign(TrainConfig(**given), settings or []).to_dict()  # type: ignore[arg-type]  # it checks its fields
    if file and not given.get("out"):
        del values["out"]
    opt.print_json(values) if as_json else echo(as_toml(values).rstrip("\n"))


@config.command("schema")
def schema() -> None:
    """Print the JSON Schema of a configuration file, for editors."""
    from vitkit.training.files import schema as made

    opt.print_json(made())


def runs(
    folders: Annotated[list[str] | None, Argument(metavar="[DIR|RUN]...", help="Runs, or folders of runs.")] = None,
    sort: Annotated[
        str, Option(help="A column or a setting; -best: the highest first. Default: run; with --compare as named.")
    ] = "",
    compare: Annotated[bool, Option("--compare", help="Show only what differs between the runs.")] = False,
    as_json: opt.Json = False,
) -> None:
    """List training runs and what they reached, or compare some of them."""
    from vitkit.training.runs import COLUMNS, differences, find_runs, sort_runs

    found = find_runs(folders or ["runs"])
    found = found if compare and not sort else sort_runs(found, sort or "run")
    names = [str(run.folder) for run in found]
    if compare:
        lines = differences(found)
        if as_json:
            return opt.print_json({"runs": names, "differences": dict(lines)})
        texts = [(name, *(run.text(name, v) for run, v in zip(found, values, strict=True))) for name, values in lines]
        return opt.print_table(("differs", *names), texts)
    rows = [run.row() for run in found]
    if as_json:
        return opt.print_json([{**row, "config": run.config} for row, run in zip(rows, found, strict=True)])
    if not rows:
        return echo(f"no runs in {', '.join(folders or ['runs'])}; start one with: vitkit train DATA")
    cells = [[run.text(column, row[column]) for column in COLUMNS] for row, run in zip(rows, found, strict=True)]
    return opt.print_table(COLUMNS, cells, left=5)


def track(
    run: Annotated[Path, Argument(metavar="RUN", help="The folder of a run.")],
    tracker: Annotated[str, Argument(metavar="TRACKER", help="mlflow or wandb.")],
    as_json: opt.Json = False,
) -> None:
    """Send the log of a run to an experiment tracker; what it has already is not repeated."""
    from vitkit.training.track import send_run

    lines = send_run(run, tracker, lambda line: echo(line, err=as_json))
    if as_json:
        opt.print_json({"tracker": tracker, "run": str(run), "lines": lines})
    else:
        echo(f"{tracker} has the {lines:,} lines of {run}")


def sweep(
    data: opt.Data,
    settings: Annotated[
        list[str], Option("--set", metavar="KEY=VALUE,...", help="Values to try of a setting; may be repeated.")
    ],
    config: Config = None,
    out: Annotated[Path, Option(help="Folder of the sweep, with a run for each combination.")] = Path("sweep"),
    random: Annotated[int, Option(min=0, help="Try so many combinations, drawn at random; 0: all.")] = 0,
    search: Annotated[str, Option(help="grid, or optuna: learns from its runs; also takes ranges LOW..HIGH.")] = "grid",
    trials: Annotated[int, Option(min=1, help="Runs of --search optuna.")] = 20,
    resume: Annotated[bool, Option("--resume", help="Continue a sweep that was stopped.")] = False,
    early: Annotated[
        bool, Option("--early/--no-early", help="Stop runs that are below the median of the finished ones.")
    ] = True,
    as_json: opt.Json = False,
) -> None:
    """Try settings: a run for each combination, the best first. A setting with one value is the same in all runs."""
    from vitkit.training.config import TrainConfig
    from vitkit.training.files import read_settings
    from vitkit.training.guided import search as guided
    from vitkit.training.live import PlainView, View, view_here
    from vitkit.training.sweep import sweep as every

    if search not in ("grid", "optuna"):
        raise ConfigError(f"--search {search} is not known; choose grid or optuna")
    base = {**(read_settings(config) if config else {}), "data": data, "out": ""}
    made = TrainConfig(**base)  # type: ignore[arg-type]
    view = View if as_json else lambda: view_here(otherwise=PlainView)
    run, many = (guided, trials) if search == "optuna" else (every, random)
    found = run(made, settings, out, many, resume, early, view)
    rows = [(t, t.run.best if t.run is not None else None) for t in found]
    if as_json:
        return opt.print_json(
            [{"run": str(t.folder), "settings": t.settings, "state": t.state, "best": best} for t, best in rows]
        )
    opt.print_table(
        ("run", "settings", "state", "best"),
        [(str(t.folder), " ".join(t.settings), t.state, t.run.text("best", b) if t.run else "") for t, b in rows],
        left=3,
    )
    return echo(f"Best: {found[0].folder}. Next: vitkit evaluate {shell_word(found[0].folder)} {shell_word(data)}")
