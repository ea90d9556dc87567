"""`vitkit predict`: what is on these images; `vitkit embed`: images as vectors, for search or a classifier;
`vitkit serve`: a page where you see what a model sees, and an HTTP API."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from vitkit.checkpoints.options import ModelOptions
from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.errors import ConfigError, MissingPackage
from vitkit.progress import Bar

if TYPE_CHECKING:
    from vitkit.prediction import Done, Opened
    from vitkit.prediction.job import Engine
    from vitkit.prediction.tables import Row
    from vitkit.runtime.base import Runtime
    from vitkit.web.explored import Explored
    from vitkit.world import World

_MODELS = "A checkpoint, a run directory, or a name; two are compared."


@opt.takes_model
def predict(
    model: opt.Model,
    images: opt.Images,
    options: ModelOptions,
    top: Annotated[int, Option(min=1, help="Classes per image.")] = 5,
    runtime: opt.Runtime = "auto",
    merge: opt.Merge = "0",
    out: Annotated[str | None, Option(help="Write .csv, .jsonl, .parquet or a folder of Parquet.")] = None,
    trust: opt.Trust = None,
    split: opt.Split = None,
    batch_size: opt.Batch = None,
    device: opt.Device = None,
    engine: opt.Engine = None,
    address: opt.Address = None,
    processes: opt.Processes = None,
    resume: opt.Resume = False,
    force: opt.Force = False,
    cache_dir: opt.CacheDir = None,
    as_json: opt.Json = False,
) -> None:
    """Name the likeliest classes of images, or predict their values.

    MODEL may also be a file that `vitkit export` has written. With --out, torchrun or --engine ray shares the images
    among processes and machines.
    """
    from vitkit.prediction import open_inputs, open_model, run_job, stream
    from vitkit.world import joined

    with joined(device or "") as world, Bar(shown=world.first) as progress:
        if out is None and world.size > 1:
            raise ConfigError("several processes need --out FILE, where their results meet")
        if out is None and (resume or engine):
            which = "--resume" if resume else "--engine"
            raise ConfigError(f"{which} needs --out FILE: only a job that writes a file can be resumed or shared")
        reader = partial(open_model, model, runtime, merge, device, options, top=top, trust=trust)
        shared = _engine(engine, address, processes, device, world, reader)
        opened = reader(progress=progress)
        source = open_inputs(images, split, progress)
        if out is None:
            _print(stream(opened, source, batch_size), opened.about, as_json)
            return None if as_json else _say_runtime(opened.runtime)
        done = run_job(opened, source, out, batch_size, resume, force, world, progress, shared)
    return _report(done, out, opened.about, as_json) if world.first else None


@opt.takes_model
def embed(
    model: opt.Model,
    images: opt.Images,
    options: ModelOptions,
    out: Annotated[str, Option(help="Write .npz, .parquet, .jsonl, .csv or a folder of Parquet.")],
    features: Annotated[
        str, Option(help="cls, mean, tokens (every patch) or pooled (what the classifier sees); default: by the head.")
    ] = "",
    runtime: opt.Runtime = "auto",
    merge: opt.Merge = "0",
    split: opt.Split = None,
    batch_size: opt.Batch = None,
    device: opt.Device = None,
    engine: opt.Engine = None,
    address: opt.Address = None,
    processes: opt.Processes = None,
    resume: opt.Resume = False,
    force: opt.Force = False,
    cache_dir: opt.CacheDir = None,
    as_json: opt.Json = False,
) -> None:
    """Write the features of images. torchrun or --engine ray shares them among processes and machines."""
    from vitkit.prediction import open_inputs, open_model, run_job
    from vitkit.world import joined

    with joined(device or "") as world, Bar(shown=world.first) as progress:
        reader = partial(open_model, model, runtime, merge, device, options, features=features)
        shared = _engine(engine, address, processes, device, world, reader)
        opened = reader(progress=progress)
        source = open_inputs(images, split, progress)
        done = run_job(opened, source, out, batch_size, resume, force, world, progress, shared)
    return _report(done, out, opened.about, as_json) if world.first else None


def _engine(
    engine: str | None,
    address: str | None,
    processes: int | None,
    device: str | None,
    world: World,
    reader: Callable[[], Opened],
) -> Engine | None:
    if not opt.check_engine(engine, processes):
        return None
    if world.size > 1:
        raise ConfigError("torchrun and --engine ray both share the images; leave one of them out")
    from vitkit.ray.job import engine as ray_engine

    return ray_engine(reader, address, processes, device)


def _report(done: Done, out: str, about: Mapping[str, object], as_json: bool) -> None:
    bad = [{"path": b.path, "reason": b.reason} for b in done.bad]
    if as_json:
        result = {"pictures": done.images, "bad_files": bad, "seconds": round(done.seconds, 3), "out": str(out)}
        return opt.print_json({**about, **result})
    if not done.images:
        return echo(f"{out} is finished already; start again with --force")
    speed = done.images / max(done.seconds, 1e-9)
    echo(f"{done.images:,} images in {done.seconds:.1f} s ({speed:.1f} img/s, {about['runtime']}): {out}")
    lines = [f"{b['path']}: {b['reason']}" for b in bad]
    return opt.print_some(f"{len(lines)} unreadable, with the reason in {out}", lines, f"{out} lists them all")


def _print(rows: Iterable[Row], about: Mapping[str, object], as_json: bool) -> None:
    if as_json:
        return opt.print_json({**about, "predictions": list(rows)})
    for row in rows:
        path, error = opt.one_line(str(row.pop("path"))), row.pop("error")
        if error is not None:
            echo(f"{path}: cannot be read, {opt.one_line(str(error))}", err=True)
        else:
            echo(f"{path}: {_words(row)}")
    return None


def _say_runtime(runtime: Runtime) -> None:
    tuned = "chosen by `vitkit tune`" if runtime.batch_size is not None else "faster ones: `vitkit tune`"
    exported = bool(runtime.metadata) and runtime.batch_size is None
    echo(f"runtime: {runtime.name}" + ("" if exported else f" ({tuned})"), err=True)


def _words(row: Row) -> str:
    """ "cat 93.1%, dog 4.0%" or "age 41.3, height 1.82" """
    if "probability" not in row:
        return ", ".join(f"{opt.one_line(name)} {value:g}" for name, value in row.items())
    values = list(row.values())
    return ", ".join(f"{opt.one_line(str(w))} {s:.1%}" for w, s in zip(values[::2], values[1::2], strict=True))


@opt.takes_model
def serve(
    models: Annotated[
        list[str] | None, Argument(metavar="[MODEL [MODEL]]", help=_MODELS, autocompletion=opt.model_names)
    ] = None,
    options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
    index: Annotated[Path | None, Option(help="Also serve a map of the images of this index.")] = None,
    data: Annotated[str | None, Option(help="Where the images of --index are now; alone: DATA.index is taken.")] = None,
    issues: Annotated[Path | None, Option(help="Fixes to accept or reject: issues.csv of `vitkit data clean`.")] = None,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes any free one.")] = 8000,
    runtime: opt.Runtime = "auto",
    device: opt.Device = None,
    open_page: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
    token: Annotated[
        str | None, Option(help="Ask for this token everywhere but for health; or set VITKIT_TOKEN.")
    ] = None,
    cors: Annotated[
        list[str] | None, Option(help="Let pages of this origin call the API; may be repeated. Default: none.")
    ] = None,
    max_batch: Annotated[int, Option(min=1, help="Images computed at once, at most.")] = 16,
    max_wait: Annotated[float, Option(min=0, help="Milliseconds a batch waits for more images.")] = 5,
    queue: Annotated[int, Option(min=1, help="Images that may wait; more are refused with 503.")] = 32,
    timeout: Annotated[float, Option(min=0.1, help="Seconds until a request is given up.")] = 30,
    max_megabytes: Annotated[float, Option(min=0.001, help="Of one request.")] = 16,
    max_megapixels: Annotated[float, Option(min=0.001, help="Of all images of one request.")] = 200,
    max_connections: Annotated[int, Option(min=1, help="At once; half of them from one address.")] = 1000,
) -> None:
    """Serve a model: a page that shows what it sees, and an HTTP API that batches requests.

    With --index, also a data set: a map of its images, and fixes to review; MODEL may then be left out.
    Listens on this machine alone unless --host says otherwise. SIGTERM answers what was accepted, then ends.
    """
    for package in ("fastapi", "uvicorn", "python_multipart", "prometheus_client"):
        try:
            __import__(package)
        except ImportError:
            raise MissingPackage(package.replace("_", "-"), "serving", "serve") from None
    from vitkit.web.server import serve as run
    from vitkit.web.settings import ServeSettings

    token = token or os.environ.get("VITKIT_TOKEN") or None
    place = (host, port, runtime, device, options, token, tuple(cors or ()))
    limits = (max_batch, max_wait / 1000, queue, timeout, round(max_megabytes * 2**20))
    pixels, each = round(max_megapixels * 1e6), (max_connections + 1) // 2
    settings = ServeSettings(
        *place,
        *limits,
        max_request_pixels=pixels,
        max_total_pixels=2 * pixels,
        max_connections=max_connections,
        max_per_address=each,
    )
    with Bar() as progress:
        run(models or [], settings, open_page, progress, _set_to_serve(index, data, issues, progress))


def _set_to_serve(
    index: Path | None, data: str | None, issues: Path | None, progress: Bar
) -> Callable[[], Explored] | None:
    if index is None and data is None:
        if issues is not None:
            raise ConfigError("--issues needs --index INDEX: the images that the issues are about")
        return None
    from vitkit.curation.index import default_place
    from vitkit.web.explored import open_explored

    return partial(open_explored, index or default_place(str(data)), data, issues, progress)
