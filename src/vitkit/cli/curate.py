"""`vitkit index` and `vitkit search`: features of every image of a set, and the images nearest to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.progress import Bar


def index(
    data: opt.Data,
    model: Annotated[
        str | None, Option(help="A checkpoint or a run; default: a descriptor of edges and colours, without weights.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder of the index; default: DATA.index.")] = None,
    batch_size: opt.Batch = None,
    device: opt.Device = None,
    classes_from: opt.ClassesFrom = "auto",
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Compute the features of every image of a set, for `search`, `data clean` and the map.

    Run it again after the set changed, or after a kill: only what is new or changed is computed.
    """
    from vitkit.curation import build_index

    with Bar() as progress:
        made = build_index(
            data, model, out, progress, device=device, classes_from=classes_from, batch_size=batch_size, force=force
        )
    about = made.about
    if as_json:
        return opt.print_json({**about, "out": str(made.path)})
    by = "the descriptor of edges and colours (no weights)" if model is None else f"{about['features']} of {model}"
    echo(f"{len(made):,} images, {about['width']} features each by {by}: {made.path}")
    return opt.print_some(f"{len(about['bad'])} unreadable", [f"{b['path']}: {b['reason']}" for b in about["bad"]])
