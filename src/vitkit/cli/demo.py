"""`vitkit demo`: from nothing to a trained, measured and explained model in about a minute."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from vitkit.cli.train import watch


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run; it is made anew.")] = Path("runs/demo"),
    epochs: Annotated[float, typer.Option(help="Passes over the handwritten digits.")] = 60,
) -> None:
    """Train on handwritten digits, evaluate, and draw what was learned."""
    import shutil

    from vitkit.explain.command import explain
    from vitkit.train.config import TrainConfig

    if (out / "config.json").exists():  # only a folder that holds a run is ever removed
        shutil.rmtree(out)
    result = watch(TrainConfig(data="digits", out=str(out), epochs=epochs), False, time.monotonic(), quiet=False)
    explain(str(out), out / "explained", data="digits", say=lambda line: typer.echo(f"drawing: {line}", err=True))
    typer.echo(
        f"Reached {result.test['top1']:.1%} on {out}'s held-out digits in {result.seconds:.0f} seconds.\n"
        f"Look inside: {out / 'explained' / 'report.html'}\n"
        f"Next: vitkit serve {out}, or vitkit train your-folder/"
    )
