"""`vitkit profile`: where the time of a model goes on this machine, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from vitkit.checkpoints.options import ModelOptions
from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.progress import Bar

_SHOWN = 0.001  # of the time: what takes less has no row


@opt.takes_model
def profile(
    model: opt.Model,
    options: ModelOptions,
    batch: Annotated[int, Option(min=1, help="Images in a batch.")] = 8,
    seconds: Annotated[float, Option(min=0.0, help="Time spent on measuring without the profiler.")] = 2.0,
    out: Annotated[Path | None, Option(help="Draw it as an icicle into this .png or .svg.")] = None,
    device: opt.Device = None,
    as_json: opt.Json = False,
) -> None:
    """Show where the time of a model goes in PyTorch, by layer and kind of work, and what would help.

    The limit of an operation is what this machine's fastest matrix product and its memory bandwidth allow; both are
    measured first.
    """
    from vitkit.prediction.opened import load_for
    from vitkit.runtime.profile import COLUMNS, name_of
    from vitkit.runtime.profile import profile as measure

    with Bar(shown=not as_json) as progress:
        loaded = load_for(model, "eager", device, options, progress)
        found = measure(loaded, batch, name_of(model), seconds, progress=progress)
    if out is not None:
        found.draw(out)
    if as_json:
        return opt.print_json(found.to_dict())
    size, limits = f"{found.size[0]}x{found.size[1]}", found.limits
    speed = f"{1e3 * found.seconds:.1f} ms, {found.batch / found.seconds:.1f} img/s"
    echo(f"{found.name}, batch {found.batch} of {size}, {found.threads} threads: {speed}")
    peak, memory = f"{limits.flops / 1e9:.0f} GFLOP/s", f"{limits.bandwidth / 1e9:.1f} GB/s"
    echo(f"this machine: {peak} in matrix products, {memory} of memory")
    for title, lines in ((COLUMNS[0], found.by_kind), ("layer", found.by_layer)):
        shown = [line.cells() for line in lines if line.share >= _SHOWN]
        opt.print_table((title, *COLUMNS[1:]), shown)
    for words in found.advice():
        echo(words)
    return None
