"""`vitkit pretrain`: learn from images without labels."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

import vitkit
from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.cli.train import place_of, watch
from vitkit.errors import ConfigError, shell_word

if TYPE_CHECKING:
    from vitkit.training.result import Result


def pretrain(
    context: Context,
    data: Annotated[str, Argument(metavar="[DATA]", help=f"{opt.DATA_HELP} A run to --resume knows it.")] = "",
    method: Annotated[
        str,
        Option(help="mae, masked-patch, dino or lejepa.", autocompletion=opt.keys_of("vitkit.tasks.table", "METHODS")),
    ] = "mae",
    model: Annotated[
        str, Option(help="A name of `vitkit zoo`; chosen from the data when left out.", autocompletion=opt.model_names)
    ] = "",
    init: Annotated[str | None, Option(help="Continue from this checkpoint.")] = None,
    out: Annotated[str, Option(help="Folder of the run, or a URL; runs/DATA-METHOD-N when left out.")] = "",
    epochs: Annotated[float, Option(help="Train for so many passes over the data.")] = 0.0,
    steps: Annotated[int, Option(help="Train for so many steps.")] = 0,
    budget: Annotated[str, Option(help="Train for a time: 90s, 5m, 1h30m, all included.")] = "",
    batch_size: Annotated[int, Option(help="Images per step, over all processes.")] = 0,
    lr: Annotated[float, Option(help="Peak learning rate.")] = 0.0,
    image_size: opt.ImageSize = None,
    heads: opt.Heads = None,
    workers: Annotated[int, Option(help="Loading processes.")] = -1,
    cache_dir: opt.CacheDir = None,
    cache: Annotated[bool, Option("--cache", help="Decode images once and keep them.")] = False,
    max_bad: Annotated[str, Option(help="Unreadable files that are tolerated.")] = "5%",
    hang_limit: opt.HangLimit = 600.0,
    seed: Annotated[int, Option(help="Of everything random.")] = 0,
    resume: Annotated[bool, Option("--resume", help="Resume the run in --out.")] = False,
    restart: Annotated[
        bool, Option("--restart", help="Start the run in --out again at step 0; its checkpoints are kept aside.")
    ] = False,
    accept_changed_data: Annotated[
        bool, Option("--accept-changed-data", help="Resume although the data set is not what it was.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Any other setting, such as task.masking=0.6; may be repeated."),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Learn from images without labels, and say whether it works.

    DATA needs no labels: a flat folder is enough. Labels, where there are any, are used only to report. The result is
    a checkpoint without a classifier, for `train --init`, `evaluate --probe`, `embed` and `explain`.
    """
    started = time.monotonic()
    from vitkit.tasks.table import check_method
    from vitkit.training.config import assign, free_folder, parse_duration

    check_method(method)
    if not data and not (resume or restart):
        raise ConfigError("name the images to learn from: vitkit pretrain DATA")
    fields = {name: value for name, value in context.params.items() if name in vitkit.TrainConfig.__dataclass_fields__}
    fields |= {"task": method, "image_size": image_size or None}
    fields |= {"out": out or free_folder(f"{data}-{method}"), "budget": parse_duration(budget) if budget else 0.0}
    config = assign(vitkit.TrainConfig(**fields), [*([f"model.heads={heads}"] if heads else []), *(settings or [])])
    result = watch(config, started, as_json, resume, restart, accept_changed_data)
    report(result, data or "DATA", as_json, config.out)


def report(result: Result, data: str, as_json: bool, out: str) -> None:
    from vitkit.tasks.pretraining.method import LINEAR
    from vitkit.world import is_first

    if not is_first():
        return None
    place = place_of(result, out)
    if as_json:
        return opt.print_json({**result.to_dict(), "out": place})
    now, start, rows = result.validation, result.start, []
    for metric in (m for m in (result.score, LINEAR) if m.key in now):
        rows.append((metric.words, metric.text(now[metric.key])))
        rows.append(("  before the first step", metric.text(start.get(metric.key, 0.0))))
        rows.append(("  of raw pixels", metric.text(now.get(f"pixel_{metric.key}", 0.0))))
    rows += [
        ("effective rank of the features", f"{now['rank']:.1f}"),
        ("time", f"{result.seconds:.0f} s, {result.steps:,} steps, {result.epochs:.1f} epochs"),
        ("model", f"{place}/best.safetensors"),
    ]
    if result.bad_files:
        rows.append(("unreadable files", f"{result.bad_files}, listed in {place}/bad-files.csv"))
    opt.print_table(("metric", "value"), rows)
    echo(f"Verdict: {result.verdict}")
    run = shell_word(place)
    return echo(f"Next: vitkit train LABELLED --init {run}, or vitkit embed {run} {shell_word(data)}")
