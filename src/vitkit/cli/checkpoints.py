"""`vitkit convert` and `vitkit inspect`: checkpoints of every family, from and to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.output import JsonOption, open_table, print_json
from vitkit.errors import CheckpointError

if TYPE_CHECKING:
    from vitkit.checkpoints.layout import Checkpoint

SourceArgument = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A file, a folder, a run directory, hf:owner/name or timm:name."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="State what the file cannot tell, such as heads=6. Repeatable."),
]


def convert(
    source: SourceArgument,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="The file or folder to write.")],
    to: Annotated[str, typer.Option(help="native, google, big_vision, timm, huggingface or torchvision.")],
    dtype: Annotated[str | None, typer.Option(help="float32, float16, bfloat16 or float64; else as in SOURCE.")] = None,
    image_size: Annotated[str | None, typer.Option(help="Resize positions for 384, or 224x448 pixels.")] = None,
    patch_size: Annotated[str | None, typer.Option(help="Resize the patch embedding (FlexiViT).")] = None,
    channels: Annotated[int | None, typer.Option(help="Adapt the first filters to so many input channels.")] = None,
    classes: Annotated[int | None, typer.Option(help="A new classifier of so many classes; 0 for none.")] = None,
    resize: Annotated[
        str | None, typer.Option(help="How to resize positions: official, timm, ...; else the family's own way.")
    ] = None,
    stated: SetOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DEST if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read a checkpoint of any family and write it in another format."""
    from vitkit.checkpoints.adapt import adapt
    from vitkit.checkpoints.convert import check_to, write
    from vitkit.checkpoints.load import open_checkpoint, parse_dtype
    from vitkit.checkpoints.strict import check_fit, to_one_dtype

    check_to(dest, to)
    wanted = None if dtype is None else parse_dtype(dtype)
    if dest.exists() and not force:
        raise CheckpointError(f"{dest} exists already; choose another name, or replace it with --force")
    checkpoint = open_checkpoint(source, **{"image_size": image_size, **_fields(stated)})
    checkpoint = adapt(checkpoint, image_size, patch_size, channels, classes, resize)
    check_fit(checkpoint, source)
    to_one_dtype(checkpoint, wanted)
    notes = [*checkpoint.notes, *write(checkpoint, dest, to)]
    if as_json:
        about = {"source": source, "dest": str(dest), "from": checkpoint.format, "to": to, "notes": notes}
        return print_json(about | {"parameters": _parameters(checkpoint)})
    for line in notes:
        typer.echo(f"note: {line}", err=True)
    return typer.echo(f"{checkpoint.format} -> {to}: {_parameters(checkpoint):,} parameters written to {dest}")


def inspect(
    source: SourceArgument,
    stated: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint is: its format, configuration, preprocessing, classes and tensors."""
    from vitkit.checkpoints.load import open_checkpoint
    from vitkit.checkpoints.strict import check_fit

    checkpoint = open_checkpoint(source, **_fields(stated))
    check_fit(checkpoint, source)
    about = describe(checkpoint)
    if as_json:
        return print_json({"source": source, **about})
    size = f"{about['parameters']:,} parameters, {about['dtype']}"
    typer.echo(f"{source}: {about['kind']}, format {about['format']}, {size}")
    config = dict(about["config"])
    preprocessing = config.pop("preprocessing")
    typer.echo("config         " + _listed(config))
    typer.echo("preprocessing  " + _listed(preprocessing))
    typer.echo("classes        " + _classes(about["config"]["classes"], about["class_names"]))
    for line in about["notes"]:
        typer.echo(f"note           {line}")
    print_, table = open_table("tensor", "shape", "dtype", "parameters", left=1)
    for row in about["tensors"]:
        table.add_row(row["name"], " x ".join(map(str, row["shape"])), row["dtype"], f"{row['parameters']:,}")
    return print_(table)


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    tensors = checkpoint.tensors
    rows = [
        {"name": n, "shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), "parameters": t.numel()}
        for n, t in tensors.items()
    ]
    names = checkpoint.class_names
    return {
        "format": checkpoint.format,
        "kind": type(checkpoint.config).__name__.removesuffix("Config"),
        "parameters": _parameters(checkpoint),
        "dtype": ", ".join(sorted({str(row["dtype"]) for row in rows})),
        "config": checkpoint.config.to_dict(),
        "class_names": None if names is None else list(names),
        "notes": list(checkpoint.notes),
        "tensors": rows,
    }


def _parameters(checkpoint: Checkpoint) -> int:
    return sum(t.numel() for t in checkpoint.tensors.values())


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in values.items() if v not in (None, False, 0, 0.0))


def _classes(count: int, names: list[str] | None) -> str:
    if not count:
        return "none: the model returns a representation"
    if names is None:
        return f"{count}, without names"
    return f"{count}: {', '.join(names[:10])}" + (f", and {count - 10} more" if count > 10 else "")


def _fields(stated: list[str] | None) -> dict[str, Any]:
    """["heads=6", "activation=gelu-tanh"] -> {"heads": 6, "activation": "gelu-tanh"}"""
    fields = {}
    for item in stated or []:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise CheckpointError(f"--set {item!r} is not FIELD=VALUE; write, for example, --set heads=6")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields
