"""`vitkit zoo`, `summary`, `inspect`, `load`, `verify`, `convert` and `zeroshot`: models, and their file formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

import vitkit
from vitkit.checkpoints.families import formats
from vitkit.checkpoints.options import ModelOptions
from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.errors import CheckpointError

SourceArgument = Annotated[
    str, Argument(metavar="SOURCE", help="A file, a folder, a run directory, hf:owner/name or timm:name.")
]


def zoo(as_json: opt.Json = False) -> None:
    """List the models that can be built by name."""
    from vitkit.model.zoo import ZOO

    rows = [vitkit.summarize(config, name) for name, config in ZOO.items()]
    for row in rows:
        del row["layers"]
    if as_json:
        return opt.print_json(rows)
    columns = ("name", "pixels", "patch", "width", "depth", "heads", "tokens", "parameters", "GMACs")
    cells = []
    for row in rows:
        numbers = (row["width"], row["depth"], row["heads"] or "-", row["tokens"] or "-", f"{row['params']:,}")
        sizes = (_times(row["image_size"]), _times(row["patch_size"]))
        cells.append((row["name"], *sizes, *map(str, numbers), f"{row['gmacs']:.3f}"))
    opt.print_table(columns, cells)
    return echo("vitkit summary NAME shows the layers of one")


@opt.takes_model
def summary(model: opt.Model, options: ModelOptions, as_json: opt.Json = False) -> None:
    """Print the layer table of a model: output shapes, parameters and multiply-adds."""
    from vitkit.checkpoints.load import find_config

    about = vitkit.summarize(find_config(model, options), model)
    if as_json:
        return opt.print_json(about)
    echo(f"{model} at {_times(about['image_size'])} pixels, {about['classes']:,} classes")
    rows = []
    for row in about["layers"]:
        name, shape = row["name"].removeprefix("encoder."), " x ".join(map(str, row["shape"][1:]))
        rows.append((name, row["kind"], shape, f"{row['params']:,}", f"{row['macs']:,}"))
    opt.print_table(("layer", "kind", "output", "parameters", "multiply-adds"), rows, left=2)
    tokens = f"{about['tokens']:,} tokens, " if about["tokens"] else ""
    parameters = f"{about['params']:,} parameters ({about['params_without_head']:,} without the head)"
    return echo(f"{tokens}{parameters}, {about['gmacs']:.3f} GMACs")


@opt.takes_model
def inspect(
    source: SourceArgument,
    options: ModelOptions,
    every: Annotated[bool, Option("--all", help="List every tensor, not a line for each part.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Show what a checkpoint is: its format, configuration, preprocessing, classes and parts."""
    from vitkit.checkpoints.load import open_checkpoint, prepare
    from vitkit.model.build import outline

    _, checkpoint = prepare(open_checkpoint(source, options), options)
    config, outputs, format = checkpoint.config, checkpoint.outputs, checkpoint.format
    place = {name: i for i, name in enumerate(outline(config).state_dict())}  # in the order an image meets them
    tensors = sorted(checkpoint.tensors.items(), key=lambda item: place.get(item[0], len(place)))
    rows = [(name, list(t.shape), str(t.dtype).removeprefix("torch."), t.numel()) for name, t in tensors]
    total, dtypes = sum(row[-1] for row in rows), ", ".join(sorted({row[2] for row in rows}))
    if as_json:
        about = {"source": source, "format": format, "kind": config.kind, "parameters": total, "dtype": dtypes}
        about |= {"config": config.to_dict(), "class_names": list(outputs.names) or None, "outputs": outputs.kind}
        listed = [dict(zip(("name", "shape", "dtype", "parameters"), row, strict=True)) for row in rows]
        return opt.print_json(about | {"notes": checkpoint.notes, "tensors": listed})
    echo(f"{source}: {config.kind}, format {format}, {total:,} parameters, {dtypes}")
    echo("config         " + _listed({k: v for k, v in config.to_dict().items() if k != "preprocessing"}))
    echo("preprocessing  " + _listed(config.preprocessing.to_dict()))
    echo(f"{outputs.kind:14} " + _classes(config.classes, outputs.names))
    for line in checkpoint.notes:
        echo(f"note           {line}")
    if not every:
        parts = [(part, str(held), f"{count:,}") for part, held, count in _parts(rows)]
        opt.print_table(("part", "tensors", "parameters"), parts)
        return echo("--all lists every tensor, --json has everything")
    cells = [(name, " x ".join(map(str, shape)), dtype, f"{count:,}") for name, shape, dtype, count in rows]
    return opt.print_table(("tensor", "shape", "dtype", "parameters"), cells)


def _parts(tensors: list[tuple[str, list[int], str, int]]) -> list[tuple[str, int, int]]:
    """(part, tensors, parameters) of each part of a model; blocks that follow each other and are alike are one line."""
    parts: dict[tuple[str, int], list[tuple[str, list[int], int]]] = {}
    for name, shape, _, count in tensors:
        found = re.match(r"(.*?)\.(\d+)\.(.*)", name)
        key = (found[1], int(found[2])) if found else (name.partition(".")[0], -1)
        parts.setdefault(key, []).append((found[3] if found else name, shape, count))
    rows = []
    for (name, held), alike in groupby(parts, key=lambda key: (key[0], parts[key])):
        numbers = [number for _, number in alike]
        which = "" if numbers[0] < 0 else f".{numbers[0]}" + (f" to {numbers[-1]}, each" if len(numbers) > 1 else "")
        rows.append((name + which, len(held), sum(count for *_, count in held)))
    return rows


@opt.takes_model
def load(
    source: SourceArgument,
    options: ModelOptions,
    out: Annotated[Path | None, Option(help="Write the model as one native .safetensors file.")] = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Load a checkpoint strictly, also a home-made one by --map, and print all that was assumed or changed."""
    if out is not None and out.exists() and not force:
        raise CheckpointError(f"{out} exists already; choose another name, or replace it with --force")
    model = vitkit.load(source, options=options)
    if out is not None:
        vitkit.save(model, out)
    config, count = model.config, sum(tensor.numel() for tensor in model.parameters())
    if as_json:
        about = {"source": source, "kind": config.kind, "parameters": count, "config": config.to_dict()}
        return opt.print_json(about | {"notes": model.load_report, "out": None if out is None else str(out)})
    by = f" by the map {options.map}" if options.map else ""
    echo(f"{source}: {config.kind} of {count:,} parameters, every tensor in its place{by}")
    for line in model.load_report:
        echo(f"note: {line}")
    return echo(f"written to {out}") if out is not None else None


Against = Enum("Against", {"timm": "timm", "hf": "hf"})


@opt.takes_model
def verify(
    source: SourceArgument,
    against: Annotated[Against, Option(help="The library to compare with: timm, or hf (Hugging Face transformers).")],
    options: ModelOptions,
    architecture: Annotated[str, Option(help="The peer's name of the model, for a file without config.json.")] = "",
    tolerance: Annotated[
        float, Option(help="Largest difference in float64, as a part of the range of a layer's values.")
    ] = 1e-5,
    as_json: opt.Json = False,
) -> None:
    """Compare a checkpoint with its own library, layer by layer, at two image sizes; exit code 1 when they differ.

    Both build their model from the same files. --image-size is the second size; default: larger and not square.
    """
    from vitkit.checkpoints.against import verify as compare

    result = compare(source, against.value, options, architecture)
    first = result.first(tolerance)
    rows = [(_times(list(row.size)), row.layer, row.largest, row.range, row.within(tolerance)) for row in result.rows]
    if as_json:
        listed = [dict(zip(("size", "layer", "difference", "range", "equal"), row, strict=True)) for row in rows]
        about = {"source": source, "against": against.value, "tolerance": tolerance, "equal": first is None}
        opt.print_json(about | {"first": first and first.layer, "notes": result.notes, "layers": listed})
    else:
        cells = [
            (size, layer, f"{far:.2e}", f"{wide:.2e}", "yes" if same else "NO") for size, layer, far, wide, same in rows
        ]
        opt.print_table(("size", "layer", "largest difference", "range", "equal"), cells, left=2)
        for line in result.notes:
            echo(f"note: {line}")
        where = f"differs from {against.value} first at {first.layer}, {_times(list(first.size))}" if first else ""
        why = f": {first.problem}" if first and first.problem else ""
        echo(
            f"{source}: {where}{why}"
            if first
            else f"{source}: equal to {against.value} within {tolerance:g} of each range"
        )
    if first:
        raise Exit(1)


@opt.takes_model
def convert(
    source: SourceArgument,
    dest: Annotated[Path, Argument(metavar="DEST", help="The file or folder to write.")],
    to: Annotated[str, Option(help=", ".join(formats()))],
    options: ModelOptions,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Read a checkpoint of any family and write it in another format."""
    from vitkit.checkpoints.load import open_checkpoint, prepare
    from vitkit.checkpoints.writing import check_to, write

    check_to(dest, to)
    if dest.exists() and not force:
        raise CheckpointError(f"{dest} exists already; choose another name, or replace it with --force")
    _, checkpoint = prepare(open_checkpoint(source, options), options)
    notes = [*checkpoint.notes, *write(checkpoint, dest, to)]
    parameters = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    if as_json:
        about = {"source": source, "dest": str(dest), "from": checkpoint.format, "to": to, "notes": notes}
        return opt.print_json(about | {"parameters": parameters})
    for line in notes:
        echo(f"note: {line}", err=True)
    return echo(f"{checkpoint.format} -> {to}: {parameters:,} parameters written to {dest}")


def zeroshot(
    source: Annotated[str, Argument(metavar="CLIP|SIGLIP", help="A folder of Hugging Face, or hf:owner/name.")],
    names: Annotated[list[str], Argument(metavar="LABEL...", help="Names of classes, or a .txt file with one a line.")],
    out: Annotated[Path, Option(help="The run directory, or the .safetensors file, to write.")],
    labels: Annotated[
        list[str], Option(metavar="TEMPLATE", help="What is said of an image, {} for the label; repeat to average.")
    ] = ["a photo of a {}"],  # noqa: B006
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Make a classifier of CLIP or SigLIP and the names of classes; every other command takes it.

    vitkit zeroshot hf:openai/clip-vit-base-patch32 --labels "a photo of a {}" cat dog --out run
    """
    from vitkit.checkpoints.load import prepare
    from vitkit.checkpoints.writing import write
    from vitkit.checkpoints.zeroshot import zeroshot as classifier_of

    dest = out if out.suffix == ".safetensors" else out / "best.safetensors"
    if dest.exists() and not force:
        raise CheckpointError(f"{dest} exists already; choose another name, or replace it with --force")
    listed = [Path(name).read_text().splitlines() if name.endswith(".txt") else [name] for name in names]
    words = [word.strip() for part in listed for word in part if word.strip()]
    _, checkpoint = prepare(classifier_of(source, words, labels), ModelOptions())
    dest.parent.mkdir(parents=True, exist_ok=True)
    notes = [*checkpoint.notes, *write(checkpoint, dest, "native")]
    if as_json:
        return opt.print_json(
            {"source": source, "dest": str(dest), "classes": words, "templates": labels, "notes": notes}
        )
    for line in notes:
        echo(f"note: {line}", err=True)
    return echo(f"{len(words)} classes by {len(labels)} template(s), without training: {out}")


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{k}={v}" for k, v in values.items() if v not in (None, False, 0, 0.0))


def _classes(count: int, names: tuple[str, ...]) -> str:
    if not count or not names:
        return f"{count}, without names" if count else "none: the model returns a representation"
    return f"{count}: {', '.join(names[:10])}" + (f", and {count - 10} more" if count > 10 else "")


def _times(size: list[int]) -> str:
    return f"{size[0]}" if size[0] == size[1] else f"{size[0]}x{size[1]}"
