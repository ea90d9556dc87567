"""`vitkit explain`: everything a model has learned, in pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitkit.cli.output import JsonOption, print_json

FIGURES = "attention, relevance, occlusion, faithfulness, query, tokens, distance, positions, filters, training"


def explain(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint, a run's folder, or a name.")],
    images: Annotated[list[str] | None, typer.Argument(metavar="[IMAGE]...", help="Pictures, or folders.")] = None,
    data: Annotated[str | None, typer.Option(help="A set of pictures, for statistics, accuracy and mistakes.")] = None,
    out: Annotated[Path, typer.Option(help="Where report.html, figures/ and arrays/ go.")] = Path("explained"),
    only: Annotated[
        list[str] | None, typer.Option(help=f"Only this figure; may be repeated. One of {FIGURES}.")
    ] = None,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class", help="Explain this class (name or number); may be repeated. Default: the likeliest two."
        ),
    ] = None,
    query: Annotated[str | None, typer.Option(help="The patch to ask: ROW,COLUMN, counted from 0.")] = None,
    run: Annotated[str | None, typer.Option(help="The folder of a training run, for its curves.")] = None,
    image_size: Annotated[str | None, typer.Option(help="384, or 224x448 (height x width).")] = None,
    pictures: Annotated[int, typer.Option(min=1, help="Pictures that are shown one by one, at most.")] = 8,
    samples: Annotated[int, typer.Option(min=1, help="Pictures of DATA that are used, at most.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Draw what a Vision Transformer has learned: one page, its figures and their arrays."""
    from vitkit.explain.command import explain as make

    def say(line: str) -> None:
        typer.echo(f"{line} ...", err=True)

    report = make(
        model,
        out,
        only or None,
        say,
        images=images or [],
        data=data,
        image_size=image_size,
        classes=classes or [],
        query=query,
        run=run,
        most=pictures,
        samples=samples,
    )
    if as_json:
        return print_json(report.as_json())
    for warning in report.warnings:
        typer.echo(f"warning: {warning}", err=True)
    for section in report.sections:
        typer.echo(f"{section.heading}: {section.finding}")
    for name, reason in report.left_out:
        typer.echo(f"not made: {name}: {reason}")
    return typer.echo(f"open {report.page}")
