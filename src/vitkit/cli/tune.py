"""`vitkit tune`: the fastest way to run a model on this machine that is right enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.output import JsonOption, open_table, print_json
from vitkit.cli.predict import ModelArgument, SizeOption

if TYPE_CHECKING:
    from rich.table import Table

    from vitkit.runtime.tune import Row, Tuned

_CALIBRATE, _FEW = 64, 100  # pictures
_WIDTH = 40  # of the drawing


def tune(
    model: ModelArgument,
    data: Annotated[
        str | None, typer.Argument(metavar="[DATA]", help="Pictures like those to come, with labels or without.")
    ] = None,
    max_drop: Annotated[
        str, typer.Option(help="What may be lost of the accuracy (without labels: of the agreement).")
    ] = "0.5%",
    latency: Annotated[
        bool, typer.Option("--latency/--throughput", help="One picture at a time, or many per second.")
    ] = False,
    runtimes: Annotated[str | None, typer.Option(help="Only these: eager,onnx.")] = None,
    pictures: Annotated[int, typer.Option(min=8, help="Pictures of DATA that are used, at most.")] = 500,
    seconds: Annotated[float, typer.Option(min=0.0, help="Time spent on measuring each way.")] = 1.0,
    image_size: SizeOption = None,
    out: Annotated[Path | None, typer.Option(help="Draw speed and accuracy into this .png or .svg.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure every runtime, precision and merging on this machine; keep the fastest that is right enough.

    It is stored beside the model: `predict` and `serve` then use it by themselves.
    """
    from vitkit.checkpoints.load import load
    from vitkit.runtime.tune import FEWEST, exported
    from vitkit.runtime.tune import tune as search
    from vitkit.runtime.tuned import store
    from vitkit.runtime.verify import pictures_of

    drop, kinds = _share(max_drop), _kinds(runtimes)
    loaded: Any = load(model, image_size=image_size)
    source, calibration = _pictures(data, loaded.config)
    judged = pictures_of(source, loaded.config, pictures if source is not None else 64, model=loaded)
    if source is None:
        typer.echo("note: no DATA was given: agreement is measured on made-up pictures; yours tell more", err=True)
    elif len(judged) < _FEW:
        lossy = (
            " too few to choose int8 or merging" if len(judged) < FEWEST else f" one of them is {1 / len(judged):.1%}"
        )
        typer.echo(f"note: {len(judged)} pictures are few:{lossy}", err=True)
    with _live(not as_json) as show:
        found = search(loaded, judged, drop, latency, kinds, calibration, seconds, show)
    files = exported(loaded, found.winner.choice, calibration)
    folder = store(model, loaded, found.winner.choice, found.report(), files)
    if out is not None:
        _draw(found, out)
    if as_json:
        stored = None if folder is None else str(folder)
        return print_json({"winner": _cells(found.winner, True), **found.report(), "stored": stored})
    return _tell(found, model, folder)


def _share(text: str) -> float:
    from vitkit.data.badfiles import parse_limit
    from vitkit.errors import ConfigError

    if not text.strip().endswith("%"):
        raise ConfigError(f"--max-drop {text} must be a share such as 0.5%")
    return parse_limit(text, 1_000_000) / 1_000_000


def _kinds(text: str | None) -> list[str] | None:
    from vitkit.errors import ConfigError, did_you_mean
    from vitkit.runtime import KINDS

    names = None if text is None else text.split(",")
    for name in names or ():
        if name not in KINDS[1:]:
            raise ConfigError(f"there is no runtime {name!r}.{did_you_mean(name, KINDS)} Known: {', '.join(KINDS[1:])}")
    return names


def _pictures(data: str | None, config: Any) -> tuple[Any, list[Any] | None]:
    """The pictures to judge on, and batches of the split train for calibrating, where there is one."""
    from pathlib import Path

    from vitkit.cli.evaluate import open_evaluation
    from vitkit.data import open_data
    from vitkit.errors import DataError
    from vitkit.predict import open_inputs
    from vitkit.runtime.verify import pictures_of

    if data is None:
        return None, None
    try:
        source = open_evaluation(data)
        train = pictures_of(open_data(data, "train"), config, _CALIBRATE)
        return source, list(train.batches(config, 8))
    except DataError:
        if not Path(data).is_dir():
            raise
        return open_inputs([data]), None  # pictures without classes


# --- what is told ------------------------------------------------------------------------------------


def _live(shown: bool) -> Any:
    """A context that gives a function which is shown the rows so far: a live table, or plain lines elsewhere."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.live import Live

    @contextmanager
    def context() -> Any:
        console = Console(stderr=True)
        if shown and console.is_terminal:
            with Live(console=console, transient=True) as live:
                yield lambda rows: live.update(_table(rows)[1])
            return
        told: set[int] = set()

        def line(rows: list[Row]) -> None:
            if shown and len(rows) - 1 not in told:
                told.add(len(rows) - 1)
                typer.echo("  ".join(_cells(rows[-1])), err=True)

        yield line

    return context()


def _table(rows: list[Row]) -> tuple[Callable[[Any], None], Table]:
    print_, table = open_table("way", "batch", "threads", "images/s", "to PyTorch", "right")
    for row in rows:
        table.add_row(*_cells(row))
    return print_, table


def _cells(row: Row, words: bool = False) -> Any:
    choice = row.choice
    speed = row.problem if row.speed is None else f"{row.speed:.1f}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
    right = "" if row.right is None else f"{row.right:.2%}"
    cells = (choice.name, str(choice.batch_size), str(choice.threads or "all"), speed or "", ratio, right)
    names = ("way", "batch", "threads", "images_per_second", "ratio", "right")
    return dict(zip(names, cells, strict=True)) if words else cells


def _tell(found: Tuned, model: str, folder: Path | None) -> None:
    print_, table = _table(found.rows)
    print_(table)
    what = "accuracy" if found.labelled else "agreement with the model"
    for line in front(found):
        typer.echo(line)
    winner = _cells(found.winner, True)
    check = found.winner.check
    before = f" ({check.accuracy_before:.2%} before)" if check and check.accuracy_before is not None else ""
    typer.echo(
        f"best: {winner['way']}, batch {winner['batch']}, {winner['images_per_second']} images/s, "
        f"{what} {winner['right']}{before} on {found.pictures}"
    )
    if folder is None:
        return typer.echo(f"{model} is a name of the zoo: its weights are new every time, so nothing was stored")
    return typer.echo(f"stored in {folder}; `vitkit predict` and `vitkit serve` use it from now on")


def front(found: Tuned) -> list[str]:
    """The ways that were judged, as bars of their speed beside how right they are."""
    judged = [row for row in found.rows if row.right is not None and row.ratio is not None]
    most = max((row.ratio or 0 for row in judged), default=1.0)
    lines = []
    for row in sorted(judged, key=lambda r: -(r.ratio or 0)):
        bar = "█" * max(1, round(_WIDTH * (row.ratio or 0) / most))
        chosen = " <- chosen" if row.choice == found.winner.choice else ""
        lines.append(f"{row.right:7.2%} {bar} {row.ratio:.2f}x {row.choice.name}{chosen}")
    return lines


def _draw(found: Tuned, out: Path) -> None:
    from vitkit.runtime.base import need

    plt = need("matplotlib.pyplot", "drawing", "explain")
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for row in found.rows:
        if row.right is not None and row.ratio is not None:
            axes.scatter(row.ratio, 100 * row.right, color="tab:blue")
            axes.annotate(
                row.choice.name, (row.ratio, 100 * row.right), fontsize=8, xytext=(4, 4), textcoords="offset points"
            )
    axes.set_xlabel("speed, PyTorch as it is = 1")
    axes.set_ylabel("accuracy, %" if found.labelled else "agreement with the model, %")
    figure.tight_layout()
    figure.savefig(out)
    plt.close(figure)
