"""`vitkit profile`: where the time of a model goes on this machine, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from vitkit.checkpoints.options import ModelOptions
from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.progress import Bar

if TYPE_CHECKING:
    from vitkit.runtime.profile import Line, Profile

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
    from vitkit.runtime.profile import profile as measure

    with Bar(shown=not as_json) as progress:
        loaded = load_for(model, "eager", device, options, progress)
        name = Path(model).name if Path(model).exists() else model
        found = measure(loaded, batch, name, seconds, progress=progress)
    if out is not None:
        _draw(found, out)
    if as_json:
        return opt.print_json(found.to_dict())
    size, limits = f"{found.size[0]}x{found.size[1]}", found.limits
    speed = f"{1e3 * found.seconds:.1f} ms, {found.batch / found.seconds:.1f} img/s"
    echo(f"{name}, batch {found.batch} of {size}, {found.threads} threads: {speed}")
    peak, memory = f"{limits.flops / 1e9:.0f} GFLOP/s", f"{limits.bandwidth / 1e9:.1f} GB/s"
    echo(f"this machine: {peak} in matrix products, {memory} of memory")
    for title, lines in (("kind of work", found.by_kind), ("layer", found.by_layer)):
        shown = [line for line in lines if line.share >= _SHOWN]
        opt.print_table((title, "ms", "share", "GFLOP", "of the limit"), map(_cells, shown))
    for words in found.advice():
        echo(words)
    return None


def _cells(line: Line) -> tuple[str, ...]:
    flops = f"{line.flops / 1e9:.2f}" if line.flops else ""
    reached = "" if line.reached is None else f"{min(1.0, line.reached):.0%}"
    return line.name, f"{1e3 * line.seconds:.2f}", f"{line.share:.1%}", flops, reached


def _draw(found: Profile, out: Path) -> None:
    from vitkit.figures.profile import Slice, draw_icicle
    from vitkit.figures.style import save_png, styled

    slices = [Slice(cell.path, cell.kind, cell.seconds) for cell in found.cells]
    first = found.by_kind[0]
    title = f"{found.name}, batch {found.batch}: {1e3 * found.seconds:.1f} ms, {first.share:.0%} {first.name}"
    with styled():
        figure = draw_icicle(slices, found.name)
        save_png(
            figure, out, title, f"The time of a batch by layer, part and kind of work; {first.name} take the most."
        )
