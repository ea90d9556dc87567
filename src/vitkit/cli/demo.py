"""`vitkit demo`: from nothing to a trained, measured and explained model in about a minute."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from vitkit.cli.train import watch

MARK = ".demo"  # what a later demo may replace


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run; an earlier demo is replaced.")] = Path("runs/demo"),
    epochs: Annotated[float, typer.Option(help="Passes over the handwritten digits.")] = 60,
) -> None:
    """Train on handwritten digits, evaluate, and draw what was learned."""
    import shutil

    from vitkit.errors import TrainError
    from vitkit.explain.command import explain
    from vitkit.train.config import TrainConfig

    if (out / "config.json").exists():
        if not (out / MARK).exists():
            raise TrainError(f"{out} holds another run; choose another folder with --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()
    result = watch(TrainConfig(data="digits", out=str(out), epochs=epochs), False, time.monotonic(), quiet=False)
    explain(str(out), out / "explained", data="digits", say=lambda line: typer.echo(f"drawing: {line}", err=True))
    vitkit = "vitkit" if shutil.which("vitkit") else sys.argv[0]  # `make demo` calls it by its path
    typer.echo(
        f"Reached {result.test['top1']:.1%} on held-out digits in {result.seconds:.0f} seconds.\n"
        f"Look inside: {out / 'explained' / 'report.html'}\n"
        f"Next: {vitkit} serve {out}, or {vitkit} train your-folder/"
    )
