"""`vitkit train`, `replay`, and `demo`: from nothing to a trained, measured and explained model in about a minute."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

import vitkit
from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.errors import ConfigError, TrainError, shell_word
from vitkit.progress import Bar
from vitkit.storage import is_url

if TYPE_CHECKING:
    from vitkit.training.result import Result

_DEMO = ".demo"  # marks a run that a later demo may replace


def train(
    context: Context,
    data: Annotated[
        str, Argument(metavar="[DATA]", help=f"{opt.DATA_HELP} May stand in --config; a run to --resume knows it.")
    ] = "",
    config: Annotated[
        str | None, Option(metavar="FILE|RUN", help="Settings from .toml, .json or a run; options win.")
    ] = None,
    model: Annotated[
        str, Option(help="A name of `vitkit zoo`; chosen from the data when left out.", autocompletion=opt.model_names)
    ] = "",
    init: Annotated[str | None, Option(help="Fine-tune this checkpoint, a path or URL.")] = None,
    out: Annotated[str, Option(help="Folder of the run, or a URL; runs/DATA-N when left out.")] = "",
    task: Annotated[str, Option(help="classify, multi-label or regress; by default what the labels ask for.")] = "",
    target: opt.Target = None,
    classes_from: opt.ClassesFrom = "auto",
    epochs: Annotated[float, Option(help="Train for so many passes over the data.")] = 0.0,
    steps: Annotated[int, Option(help="Train for so many steps.")] = 0,
    budget: Annotated[str, Option(help="Train for a time: 90s, 5m, 1h30m, all included.")] = "",
    batch_size: Annotated[int, Option(help="Images per step, over all processes.")] = 0,
    lr: Annotated[float, Option(help="Peak learning rate.")] = 0.0,
    image_size: opt.ImageSize = None,
    heads: opt.Heads = None,
    augment: Annotated[str, Option(help="none, light, medium or strong.")] = "",
    recipe: Annotated[
        str,
        Option(
            help="A published one: paper-pretrain, paper-finetune, deit, deit3, mae-finetune, dinov2-linear.",
            autocompletion=opt.keys_of("vitkit.training.published", "RECIPES"),
        ),
    ] = "",
    show: Annotated[bool, Option("--show", help="Print what --recipe sets, with its source, and stop.")] = False,
    freeze: Annotated[str, Option(help="'backbone' (linear probe) or a number of blocks.")] = "",
    lora: Annotated[int, Option(help="Rank of low-rank updates; all else is frozen.")] = 0,
    shard: Annotated[bool, Option("--shard", help="Share weights among processes (FSDP).")] = False,
    workers: Annotated[int, Option(help="Loading processes.")] = -1,
    cache_dir: opt.CacheDir = None,
    cache: Annotated[bool, Option("--cache", help="Decode images once and keep them.")] = False,
    max_bad: Annotated[str, Option(help="Unreadable files that are tolerated.")] = "5%",
    hang_limit: opt.HangLimit = 600.0,
    seed: Annotated[int, Option(help="Of everything random.")] = 0,
    track: Annotated[
        list[str] | None,
        Option(
            help="Also feed mlflow or wandb; may be repeated. TensorBoard events are always written.",
            autocompletion=opt.keys_of("vitkit.training.trackers", "TRACKERS"),
        ),
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Resume the run in --out.")] = False,
    restart: Annotated[
        bool, Option("--restart", help="Start the run in --out again at step 0; its checkpoints are kept aside.")
    ] = False,
    accept_changed_data: Annotated[
        bool, Option("--accept-changed-data", help="Resume although the data set is not what it was.")
    ] = False,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Any other setting; may be repeated.")
    ] = None,
    engine: opt.Engine = None,
    address: opt.Address = None,
    processes: Annotated[
        int | None, Option(min=1, help="Processes that share every batch: of this machine, or of --engine.")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Train or fine-tune a model on images."""
    started = time.monotonic()
    from vitkit.training.config import assign, free_folder
    from vitkit.training.files import checked, read_settings

    if show:
        from vitkit.training.published import rows

        opt.print_table(("setting", "value", "source"), rows(recipe))
        return
    given = context.get_parameter_source  # what was typed wins over the file, which wins over defaults
    known = {name: context.params[name] for name in context.params if name in vitkit.TrainConfig.__dataclass_fields__}
    known["processes"] = 0 if engine or processes is None else processes
    fields = read_settings(config) if config else {}
    fields |= {k: v for k, v in known.items() if getattr(given(k), "name", "") == "COMMANDLINE" or k not in fields}
    for name, empty in {"target": (), "track": (), "image_size": None, "augment": None, "budget": 0.0}.items():
        fields[name] = fields[name] or empty
    fields["out"] = fields["out"] or free_folder(str(fields["data"]))
    settings = [*([f"model.heads={heads}"] if heads else []), *(settings or [])]
    made = assign(vitkit.TrainConfig(**checked(fields)), settings)  # type: ignore[arg-type]
    if not made.data and not (resume or restart):  # a run knows what it is trained on
        raise ConfigError("name the images to train on: vitkit train DATA, or data = ... in the file of --config")
    if opt.check_engine(engine, processes if engine else None):
        from vitkit.ray.train import run

        how = {"resume": resume, "restart": restart, "accept": accept_changed_data, "quiet": as_json}
        result = run(made, address, processes, **how)
    else:
        result = watch(made, started, as_json, resume, restart, accept_changed_data)
    report(result, made.data or "DATA", as_json, made.out)


def watch(
    config: vitkit.TrainConfig,
    started: float,
    quiet: bool,
    resume: bool = False,
    restart: bool = False,
    accept: bool = False,
) -> Result:
    from vitkit.training.live import PlainView, View, view_here
    from vitkit.training.run import train as run

    view = View() if quiet else view_here(otherwise=PlainView)
    with view.shown:
        return run(config, resume=resume, restart=restart, accept_changed_data=accept, watcher=view, started=started)


def place_of(result: Result, out: str) -> str:
    """The run as a user names it: its URL where it has one, not the folder in which it was made."""
    return out if is_url(out) else str(result.out)


def report(result: Result, data: str, as_json: bool, out: str = "") -> None:
    from vitkit.world import is_first

    if not is_first():
        return None
    place = place_of(result, out)
    if as_json:
        return opt.print_json({**result.to_dict(), "out": place})
    count, there = result.images.get("test", (0, 0))
    opt.print_table(("metric", "value"), [*result.rows(), ("model", f"{place}/best.safetensors")])
    for n, remedy in enumerate(result.advice):
        echo(f"{'Also' if n else 'What would help most'}: {remedy}")
    run, images = shell_word(place), shell_word(data)
    if count < there:
        echo(f"The test accuracy is of {count:,} of {there:,} images: vitkit evaluate {run} {images} takes all of them")
    return echo(f"Next: vitkit evaluate {run} {images}, or vitkit explain {run} --data {images}")


def replay(
    folder: Annotated[Path, Argument(metavar="DIR", help="The folder `replay` of a run.")], as_json: opt.Json = False
) -> None:
    """Run a step again whose loss was not finite, and name the first layer that went wrong."""
    from vitkit.training.run import replay as again

    lines = again(folder)
    opt.print_json({"found": lines}) if as_json else echo("\n".join(lines))


def demo(
    out: Annotated[Path, Option(help="Folder of the run; an earlier demo is replaced.")] = Path("runs/demo"),
    epochs: Annotated[float, Option(help="Passes over the handwritten digits.")] = 60,
) -> None:
    """Train on handwritten digits, evaluate, and draw what was learned."""
    if (out / "config.json").exists():
        if not (out / _DEMO).exists():
            raise TrainError(f"{out} holds another run; choose another folder with --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / _DEMO).touch()
    result = watch(vitkit.TrainConfig(data="digits", out=str(out), epochs=epochs), time.monotonic(), quiet=False)
    with Bar() as progress:
        vitkit.explain(out, data="digits", out=out / "explained", progress=progress)
    started = "python -m vitkit" if Path(sys.argv[0]).name == "__main__.py" else sys.argv[0]
    command = "vitkit" if shutil.which("vitkit") else started  # `make demo` calls it by its path
    echo(
        f"Accuracy {result.test['top1']:.1%} on held-out digits in {result.seconds:.0f} seconds.\n"
        f"Look inside: {out / 'explained' / 'report.html'}\n"
        f"Next: {command} serve {out}, or {command} train your-folder/"
    )
