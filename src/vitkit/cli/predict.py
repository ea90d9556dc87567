"""`vitkit predict`: what is on these pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.output import JsonOption, best_device, one_line, print_json, print_some, progress_bar

if TYPE_CHECKING:
    from torch import nn

    from vitkit.model.config import AnyConfig
    from vitkit.predict import Done
    from vitkit.predict.job import Work
    from vitkit.runtime import Runtime


ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint, a run's folder, hf:owner/name or timm:name.")
]
ImagesArgument = Annotated[
    list[str], typer.Argument(metavar="IMAGE|FOLDER|DATA...", help="Pictures, folders of pictures, or sets.")
]
RuntimeOption = Annotated[str, typer.Option(help="auto, eager, compiled, onnx or openvino.")]
MergeOption = Annotated[int, typer.Option(min=0, help="Merge so many patches per block: faster, less exact.")]
SplitOption = Annotated[str | None, typer.Option(help="Of a set: train, val or test; by default all of it.")]
SizeOption = Annotated[str | None, typer.Option(help="384, or 224x448 (height x width).")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Pictures at once; by default what suits their size.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or mps; by default the best there is.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with a job that was stopped.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Begin anew; replace --out if it exists.")]


def predict(
    model: ModelArgument,
    images: ImagesArgument,
    top: Annotated[int, typer.Option(min=1, help="Classes per picture.")] = 5,
    runtime: RuntimeOption = "auto",
    merge: MergeOption = 0,
    out: Annotated[Path | None, typer.Option(help="Write .csv, .jsonl or .parquet instead of printing.")] = None,
    split: SplitOption = None,
    image_size: SizeOption = None,
    batch_size: BatchOption = None,
    device: DeviceOption = None,
    resume: ResumeOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Name the likeliest classes of pictures; MODEL may also be a file that `vitkit export` has written.

    With --out, torchrun shares the pictures among processes and machines.
    """
    from vitkit.predict import Classify, open_inputs
    from vitkit.ranks import joined

    with joined() as (rank, world_size):
        if out is None:
            check_alone(world_size, resume)
        loaded, config, names = open_model(model, image_size, device, runtime)
        source = open_inputs(images, split)
        opened = loaded if not hasattr(loaded, "parameters") else open_it(loaded, runtime, model, merge, rank)
        work = Classify(opened, config.classes, names, top)
        about = {"command": "predict", "model": identity(loaded, model), "top": top, "runtime": opened.name}
        share = {"batch_size": batch_size or getattr(opened, "batch_size", None)}
        if out is None:
            return _print(work, source, config, about | share, as_json)
        done = run(work, source, config, out, about, resume, force, rank, world_size, **share)
        if rank == 0:
            report(done, out, about, as_json)
    return None


# --- shared with `vitkit embed` ----------------------------------------------------------------------


def check_alone(world_size: int, resume: bool) -> None:
    from vitkit.errors import ConfigError

    if world_size > 1:
        raise ConfigError("several processes need --out FILE, where their results meet")
    if resume:
        raise ConfigError("--resume needs --out FILE: only a job that writes a file can be resumed")


def open_model(
    model: str, image_size: str | None, device: str | None, runtime: str
) -> tuple[Any, AnyConfig, tuple[str, ...] | None]:
    """A model, or a runtime when MODEL is an exported file; its configuration; the names of its classes."""
    from vitkit.checkpoints.load import load
    from vitkit.errors import ConfigError
    from vitkit.runtime.export import SUFFIXES, open_exported

    if Path(model).suffix in SUFFIXES and Path(model).is_file():
        if image_size is not None or runtime not in ("auto", SUFFIXES[Path(model).suffix]):
            raise ConfigError(f"{model} is exported: its size and its runtime are fixed; leave the options out")
        opened, about = open_exported(model)
        if about.raw:
            raise ConfigError(f"{model} was exported with --raw, for programs; use the one without, or the checkpoint")
        return opened, about.config, about.class_names
    loaded: Any = load(model, image_size=image_size)
    if "fresh weights" in loaded.load_report:
        typer.echo(f"note: {model} is a name of the zoo, so its weights are fresh and not trained", err=True)
    where = "cpu" if runtime in ("onnx", "openvino") else best_device(device)
    return loaded.to(where), loaded.config, loaded.class_names


def open_it(loaded: nn.Module, runtime: str, model: str, merge: int, rank: int) -> Runtime:
    from vitkit.runtime import open_runtime
    from vitkit.runtime.tuned import find

    if runtime == "auto" and not merge and rank == 0 and (why := find(loaded, model)[1]):
        typer.echo(f"note: {why}", err=True)
    return open_runtime(loaded, runtime, source=model, merge=merge)


def identity(loaded: Any, model: str) -> str:
    """What the result depends on: the weights, or the exported file."""
    from vitkit.data.fetch import sha256
    from vitkit.runtime.tuned import fingerprint

    return fingerprint(loaded) if hasattr(loaded, "parameters") else sha256(Path(model))


def run(
    work: Work,
    source: Any,
    config: AnyConfig,
    out: Path,
    about: dict[str, Any],
    resume: bool,
    force: bool,
    rank: int,
    world_size: int,
    batch_size: int | None,
) -> Done:
    from vitkit.predict import run_job

    how: dict[str, Any] = {"batch_size": batch_size, "resume": resume, "force": force}
    with progress_bar(f"{about['command']} {source.name}", shown=rank == 0) as on_batch:
        return run_job(work, source, config, out, about, rank=rank, world_size=world_size, on_batch=on_batch, **how)


def report(done: Done, out: Path, about: dict[str, Any], as_json: bool) -> None:
    bad = [{"path": b.path, "reason": b.reason} for b in done.bad]
    if as_json:
        told = {"pictures": done.pictures, "bad_files": bad, "seconds": round(done.seconds, 3), "out": str(out)}
        return print_json({**about, **told})
    if not done.pictures:
        return typer.echo(f"{out} is finished already; begin anew with --force")
    speed = done.pictures / max(done.seconds, 1e-9)
    typer.echo(f"{done.pictures:,} pictures in {done.seconds:.1f} s ({speed:.1f}/s, {about['runtime']}): {out}")
    lines = [f"{b['path']}: {b['reason']}" for b in bad]
    return print_some(f"{len(lines)} unreadable, with the reason in {out}", lines, f"{out} lists them all")


def _print(work: Work, source: Any, config: AnyConfig, about: dict[str, Any], as_json: bool) -> None:
    from vitkit.predict import stream

    rows = stream(work, source, config, about.pop("batch_size"))
    if as_json:
        return print_json({**about, "predictions": list(rows)})
    for row in rows:
        if row["error"] is not None:
            typer.echo(f"{one_line(row['path'])}: cannot be read, {one_line(row['error'])}", err=True)
            continue
        words = [v for k, v in row.items() if k.startswith("class")]
        shares = [v for k, v in row.items() if k.startswith("probability")]
        told = ", ".join(f"{one_line(w)} {s:.1%}" for w, s in zip(words, shares, strict=True))
        typer.echo(f"{one_line(row['path'])}: {told}")
    return None
