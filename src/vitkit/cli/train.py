"""`vitkit train`: the command, its live view on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.completion import model_names
from vitkit.cli.output import JsonOption, open_table, print_json

if TYPE_CHECKING:
    from vitkit.train.config import TrainConfig
    from vitkit.train.loop import Result


def train(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A name (digits, mnist, ...), a folder, a manifest, ...")],
    model: Annotated[
        str,
        typer.Option(help="A name of `vitkit zoo`; chosen from the data when left out.", autocompletion=model_names),
    ] = "",
    init: Annotated[str | None, typer.Option(help="Fine-tune this checkpoint.")] = None,
    out: Annotated[str, typer.Option(help="Folder of the run; runs/DATA-N when left out.")] = "",
    epochs: Annotated[float, typer.Option(help="Train for so many passes over the data.")] = 0.0,
    steps: Annotated[int, typer.Option(help="Train for so many steps.")] = 0,
    budget: Annotated[str, typer.Option(help="Train for a time: 90s, 5m, 1h30m, all included.")] = "",
    batch_size: Annotated[int, typer.Option(help="Pictures per step, over all processes.")] = 0,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 0.0,
    image_size: Annotated[str, typer.Option(help="224, or 224x448 (height x width).")] = "",
    augment: Annotated[str, typer.Option(help="none, light, medium or strong.")] = "",
    freeze: Annotated[str, typer.Option(help="'backbone' (linear probe) or a number of blocks.")] = "",
    lora: Annotated[int, typer.Option(help="Rank of low-rank updates; all else is frozen.")] = 0,
    shard: Annotated[bool, typer.Option("--shard", help="Share weights among processes (FSDP).")] = False,
    workers: Annotated[int, typer.Option(help="Loading processes.")] = -1,
    cache: Annotated[bool, typer.Option("--cache", help="Decode pictures once and keep them.")] = False,
    max_bad: Annotated[str, typer.Option(help="Unreadable files that are tolerated.")] = "5%",
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train or fine-tune a model on pictures."""
    started = time.monotonic()
    from vitkit.train.config import TrainConfig, assign, parse_duration

    given: dict[str, Any] = {"model": model, "init": init, "epochs": epochs, "steps": steps, "batch_size": batch_size}
    given |= {"lr": lr, "freeze": freeze, "lora": lora, "shard": shard, "workers": workers, "cache": cache}
    given |= {"max_bad": max_bad, "seed": seed, "image_size": image_size or None, "augment": augment or None}
    config = TrainConfig(
        data=data, out=out or free_folder(data), budget=parse_duration(budget) if budget else 0.0, **given
    )
    result = watch(assign(config, settings or []), resume, started, quiet=as_json)
    report(result, data, as_json)


def free_folder(data: str) -> str:
    """runs/DATA-1, or the first number that is free."""
    name = Path(data).stem or "run"
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return str(folder)


def watch(config: TrainConfig, resume: bool, started: float, quiet: bool) -> Result:
    from vitkit.cli.live import LiveView, PlainView
    from vitkit.train.loop import Watcher
    from vitkit.train.run import train as run

    if quiet:
        return run(config, resume=resume, watcher=Watcher(), started=started)
    from rich.console import Console

    console = Console(stderr=True)
    view = LiveView(console) if console.is_terminal else PlainView()
    with view:
        return run(config, resume=resume, watcher=view, started=started)


def report(result: Result, data: str, as_json: bool) -> None:
    from vitkit.ranks import is_first

    if not is_first():
        return None
    if as_json:
        return print_json({**vars(result), "out": str(result.out)})
    print_, table = open_table("what", "reached", left=1)
    splits = json.loads((result.out / "config.json").read_text(encoding="utf-8"))["splits"]
    counts = {"test": splits.get("test", 0), "validation": splits.get("val") or splits.get("test", 0)}
    for name, scores in (("validation", result.validation), ("best", result.best), ("test", result.test)):
        if "top1" in scores:
            judged = f" ({counts[name]:,} pictures)" if name in counts else ""
            table.add_row(f"{name} accuracy{judged}", f"{scores['top1']:.2%}")
        elif "map" in scores:
            table.add_row(f"{name} mean average precision", f"{scores['map']:.2%}")
    table.add_row("time", f"{result.seconds:.0f} s, {result.steps:,} steps, {result.epochs:.1f} epochs")
    if result.bad_files:
        table.add_row("unreadable files", f"{result.bad_files}, listed in {result.out / 'bad-files.csv'}")
    if result.skipped:
        table.add_row("steps left out", f"{result.skipped}: their loss was not finite")
    table.add_row("model", str(result.out / "best.safetensors"))
    print_(table)
    return print_(f"Next: vitkit evaluate {result.out} {data}, or vitkit explain {result.out} --data {data}")


def replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder `replay` of a run.")],
    as_json: JsonOption = False,
) -> None:
    """Run a step again whose loss was not finite, and name the first layer that went wrong."""
    from vitkit.train.replay import replay as again

    lines = again(folder)
    print_json({"found": lines}) if as_json else typer.echo("\n".join(lines))
