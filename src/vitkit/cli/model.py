"""`vitkit zoo` and `vitkit summary`: what models there are, and what is in one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from vitkit.cli.completion import model_names
from vitkit.cli.output import JsonOption, open_table, print_json


def zoo(as_json: JsonOption = False) -> None:
    """List the models that can be built by name."""
    from vitkit.model.summary import summarize
    from vitkit.model.zoo import ZOO

    rows = [summarize(config, name) for name, config in ZOO.items()]
    for row in rows:
        del row["layers"]
    if as_json:
        return print_json(rows)
    print_, table = open_table("name", "pixels", "patch", "width", "depth", "heads", "tokens", "parameters", "GMACs")
    for row in rows:
        numbers = (row["width"], row["depth"], row["heads"] or "-", row["tokens"] or "-")
        cells = (row["name"], times(row["image_size"]), times(row["patch_size"]), *map(str, numbers))
        table.add_row(*cells, f"{row['params']:,}", f"{row['gmacs']:.3f}")
    print_(table)
    return print_("vitkit summary NAME shows the layers of one")


def summary(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name of `vitkit zoo`, or timm's or HF's for it, or a checkpoint.",
            autocompletion=model_names,
        ),
    ],
    image_size: Annotated[str | None, typer.Option(help="384, or 224x448 (height x width).")] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes; 0 for no classifier.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the layer table of a model: output shapes, parameters and multiply-adds."""
    from vitkit.checkpoints.load import find_config
    from vitkit.model.config import as_size
    from vitkit.model.summary import summarize

    changes: dict[str, Any] = {}
    if image_size is not None:
        changes["image_size"] = as_size(image_size, "--image-size")
    if classes is not None:
        changes["classes"] = classes
    config = find_config(model)
    about = summarize(config.replace(**changes) if changes else config, model)
    if as_json:
        return print_json(about)
    print_, table = open_table("layer", "kind", "output", "parameters", "multiply-adds", left=2)
    for row in about["layers"]:
        name, shape = row["name"].removeprefix("encoder."), " x ".join(map(str, row["shape"][1:]))
        table.add_row(name, row["kind"], shape, f"{row['params']:,}", f"{row['macs']:,}")
    print_(f"{model} at {times(about['image_size'])} pixels, {about['classes']:,} classes")
    print_(table)
    tokens = f"{about['tokens']:,} tokens, " if about["tokens"] else ""
    return print_(
        f"{tokens}{about['params']:,} parameters ({about['params_without_head']:,} without the head), "
        f"{about['gmacs']:.3f} GMACs"
    )


def times(size: list[int]) -> str:
    return f"{size[0]}" if size[0] == size[1] else f"{size[0]}x{size[1]}"
