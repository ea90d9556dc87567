"""`vitkit data check` and `vitkit data show`: look at a set before training on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from vitkit.cli.output import JsonOption, one_line, open_table, print_json, print_some

if TYPE_CHECKING:
    from vitkit.data.check import Report
    from vitkit.model.config import Preprocessing

app = typer.Typer(help="Look at a set of pictures.", no_args_is_help=True, rich_markup_mode=None)

DataArgument = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="digits, mnist, fashion-mnist, cifar10; a folder of classes; a .csv, .jsonl or .parquet list; "
        ".npz arrays; Parquet with pictures; shards/train-{0000..0099}.tar.",
    ),
]


@app.command()
def check(
    data: DataArgument,
    as_json: JsonOption = False,
    out: Annotated[Path | None, typer.Option(help="Draw a contact sheet into this .png.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that decode; by default one per core.")] = None,
) -> None:
    """Count, decode and compare every picture; exits with code 1 when something is wrong with the set."""
    from vitkit.data import check as checking
    from vitkit.data import open_data
    from vitkit.data.progress import bar
    from vitkit.data.sheet import contact_sheet

    workers = _cores(data) if workers is None else workers
    report = checking.check(data, workers, bar)
    if out is not None:
        _save(contact_sheet(open_data(data, "all")), out)
    print_json(report.to_dict()) if as_json else _print_report(report)
    if out is not None and not as_json:
        typer.echo(f"contact sheet: {out}")
    if report.bad or any(d.leaks or d.contradicts for d in report.duplicates):
        raise typer.Exit(1)


def _cores(data: str) -> int:
    """Sets in memory and small folders are not worth starting processes for."""
    few = os.path.isdir(data) and sum(len(files) for _, _, files in os.walk(data)) < 500
    return 0 if few or not os.path.exists(data) else os.cpu_count() or 1


def _print_report(report: Report) -> None:
    splits = list(report.splits)
    print_, table = open_table("class", *splits, "all")
    for name, counts in report.classes.items():
        table.add_row(one_line(name), *(f"{counts[s]:,}" for s in splits), f"{sum(counts.values()):,}")
    table.add_row("all pictures", *(f"{report.splits[s]:,}" for s in splits), f"{sum(report.splits.values()):,}")
    print_(table)
    sizes = ", ".join(f"{word} {w}x{h}" for word, (w, h) in report.sizes.items())
    typer.echo(f"sizes (width x height): {sizes or 'none'}")
    typer.echo(f"formats: {_tally(report.formats)}; modes: {_tally(report.modes)}")
    if report.multi_label:
        typer.echo("a picture may have several labels")
    if report.empty_classes:
        typer.echo(f"folders without a picture: {', '.join(map(one_line, report.empty_classes))}")
    _print_problems(report)


def _print_problems(report: Report) -> None:
    empty = {name: [s for s, n in counts.items() if not n] for name, counts in report.classes.items()}
    missing = [f"{name}: none in {', '.join(splits)}" for name, splits in empty.items() if splits]
    print_some("classes that a split says nothing about (add pictures, or sort them into train, val, test)", missing)
    print_some(f"{len(report.bad)} unreadable", [f"{b.path}: {b.reason}" for b in report.bad])
    if report.bad:
        typer.echo("training takes other pictures for those that cannot be read, and lists them")
    groups = {
        "the same picture in different splits (leakage)": [d for d in report.duplicates if d.leaks],
        "the same picture with different labels": [d for d in report.duplicates if d.contradicts and not d.leaks],
        "exact duplicates": [d for d in report.duplicates if not d.leaks and not d.contradicts],
    }
    for what, found in groups.items():
        lines = [" = ".join(f"{p} ({s})" for p, s in zip(d.paths, d.splits, strict=True)) for d in found]
        print_some(f"{len(found)} x {what}", lines)
    if not report.bad and not report.duplicates:
        typer.echo("no unreadable pictures, no duplicates")


def _tally(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in counts.items()) or "none"


class _BareAugment(TyperCommand):
    """Lets `--augment` stand alone, for the preset that is used most."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--augment" in args:
            at = args.index("--augment")
            if at + 1 == len(args) or args[at + 1].startswith("-"):
                args = [*args[: at + 1], "medium", *args[at + 1 :]]
        return super().parse_args(ctx, args)


@app.command(cls=_BareAugment)
def show(
    data: DataArgument,
    augment: Annotated[
        str, typer.Option(metavar="[PRESET]", help="none, light, medium or strong; alone it means medium.")
    ] = "none",
    out: Annotated[Path, typer.Option(help="The .png to draw.")] = Path("show.png"),
    split: Annotated[str, typer.Option(help="train, val, test or all.")] = "train",
    size: Annotated[str | None, typer.Option(help="224, or 224x448 (height x width).")] = None,
    rows: Annotated[int, typer.Option(min=1, max=50, help="Samples to draw.")] = 6,
    seed: Annotated[int, typer.Option(help="Another seed draws other samples and other variations.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Draw what training will see of a few samples, epoch after epoch."""
    from vitkit.data import open_data, preset, suited
    from vitkit.data.progress import bar
    from vitkit.data.sheet import training_sheet

    chosen = preset(augment)
    source = open_data(data, split, bar)
    chosen = suited(chosen, source.mirrors)
    pre = _view(source.pixels, size)
    about = f"augmentation {augment}, seed {seed}; the first column is the evaluation view, then one epoch per column"
    _save(training_sheet(source, pre, chosen, rows, seed=seed, about=about), out)
    print_json({"drawn": str(out)}) if as_json else typer.echo(f"drawn: {out}")


def _view(pixels: Any, size: str | None) -> Preprocessing:
    """The pictures' own size for sets in memory, 224 for files, unless a size is given."""
    from vitkit.model.config import Preprocessing, as_size

    if size is not None:
        chosen = as_size(size, "--size")
    else:
        chosen = (224, 224) if pixels is None else (pixels.shape[-2], pixels.shape[-1])
    return Preprocessing(size=chosen, fit="crop")


def _save(picture: Any, path: Path) -> None:
    from vitkit.errors import DataError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    except (OSError, ValueError) as e:
        raise DataError(f"the picture cannot be written to {path}: {e}; give --out a path ending in .png") from e
