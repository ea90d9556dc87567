"""`vitkit export`: a model as a file that runs without vitkit; `vitkit tune`: its fastest accurate configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from vitkit.checkpoints.options import ModelOptions
from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.errors import ConfigError, DataError
from vitkit.progress import Bar, Progress
from vitkit.runtime.table import FORMATS, RUNTIMES, find, one_of

if TYPE_CHECKING:
    from vitkit.data import Source
    from vitkit.model.base import VisionModel
    from vitkit.runtime.base import Calibration
    from vitkit.runtime.tune import Tuned

_TO_EXPORT, _TO_TUNE = 128, 64  # images to calibrate with


@opt.takes_model
def export(
    model: opt.Model,
    options: ModelOptions,
    to: Annotated[str, Option(help=f"{one_of(FORMATS)}.")],
    out: Annotated[Path, Option(help=f"The file to write: {one_of(row.suffix for row in FORMATS.values())}.")],
    int8: Annotated[bool, Option("--int8", help="8-bit matrix products; no data is needed.")] = False,
    calibrate: Annotated[
        str | None, Option(metavar="DATA", help="int8 with ranges from the split train of this data set.")
    ] = None,
    data: Annotated[str | None, Option(help="Compare on this data set, and report the accuracy.")] = None,
    merge: opt.Merge = "0",
    raw: Annotated[bool, Option("--raw", help="Resize, crop and normalise inside the file: raw pixels in.")] = False,
    dynamic_size: Annotated[
        bool, Option("--dynamic-size", help="Images of any size that the patches divide; onnx and torch-export.")
    ] = False,
    top: Annotated[
        int, Option(metavar="K", min=0, help="Also give the K most probable classes, with their probabilities.")
    ] = 0,
    device: opt.Device = None,
    as_json: opt.Json = False,
) -> None:
    """Write a model for ONNX Runtime, OpenVINO or PyTorch without its code, after comparing both."""
    from vitkit.prediction.opened import load_for
    from vitkit.runtime.export import check_target
    from vitkit.runtime.export import export as write
    from vitkit.runtime.verify import calibration_of
    from vitkit.tasks import open_data_for

    int8 = int8 or calibrate is not None
    check_target(to, out, int8)
    if calibrate is not None and raw:
        raise ConfigError("--raw takes images of any size, and calibrating needs one; leave out --raw or --calibrate")
    with Bar() as progress:
        loaded = load_for(model, "auto", device, options, progress)
        chosen, ranges = data or calibrate, None
        compared = open_data_for(loaded, chosen, progress).evaluation() if chosen else None
        if calibrate is not None:
            train = open_data_for(loaded, calibrate, progress).split("train")
            ranges = calibration_of(loaded, train, _TO_EXPORT)
        found = write(loaded, to, out, compared, int8, merge, raw, ranges, progress, dynamic_size, top)
    if as_json:
        return opt.print_json(
            {"out": str(found.path), "bytes": found.bytes, "sha256": found.sha256, "check": found.check.to_dict()}
        )
    echo(f"{found.path}: {found.bytes / 2**20:.1f} MB")
    if FORMATS[to].runs_code:
        echo(f"opening such a file may run code; `vitkit predict` asks for --trust {found.sha256}")
    return echo(found.check.summary())


@opt.takes_model
def tune(
    model: opt.Model,
    options: ModelOptions,
    data: Annotated[
        str | None, Argument(metavar="[DATA]", help="Images like those to come, with labels or without.")
    ] = None,
    max_drop: Annotated[
        str, Option(help="What may be lost of the accuracy (without labels: of the agreement).")
    ] = "0.5%",
    latency: Annotated[bool, Option("--latency/--throughput", help="One image at a time, or many per second.")] = False,
    runtimes: Annotated[str | None, Option(help="Only these: eager,onnx.")] = None,
    images: Annotated[int, Option(min=8, help="Images of DATA that are used, at most.")] = 500,
    seconds: Annotated[float, Option(min=0.0, help="Time spent on measuring each configuration.")] = 1.0,
    budget: Annotated[str, Option(help="Time for all of it: 90s, 5m. What does not fit is left out.")] = "",
    device: opt.Device = None,
    out: Annotated[
        Path | None, Option(help="Draw speed and accuracy of all configurations into this .png or .svg.")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Measure every runtime, precision and reduction on this machine; keep the fastest that is accurate enough.

    Reductions are merged or dropped tokens, smaller images, and smaller images for the easy ones alone. With 60
    images or more, every third is held out to confirm the choice. It is stored beside the model: `predict` and
    `serve` then use it by themselves. What was measured is kept: after a kill, the same command continues.
    """
    from vitkit.prediction.opened import load_for
    from vitkit.runtime.confirm import hold_out
    from vitkit.runtime.tune import FEWEST
    from vitkit.runtime.tune import tune as search
    from vitkit.runtime.tuned import kept_file, store
    from vitkit.runtime.verify import images_of
    from vitkit.training.config import parse_duration

    if not re.fullmatch(r"\d*\.?\d+%", max_drop.strip()):
        raise ConfigError(f"--max-drop {max_drop} must be a share such as 0.5%")
    drop, kinds = float(max_drop.strip().removesuffix("%")) / 100, None if runtimes is None else runtimes.split(",")
    for kind in kinds or ():
        find("runtime", kind, RUNTIMES)
    with Bar(shown=not as_json) as progress:
        loaded = load_for(model, "auto", device, options, progress)
        source, calibration = _images(data, loaded, progress)
        compared, held = hold_out(images_of(loaded, source, 64 if source is None else images), FEWEST)
        if source is None:
            echo("note: no DATA was given: agreement is measured on made-up images; yours tell more", err=True)
        elif source.labelled and compared.labels is None:
            echo(f"note: the labels of {data} are not the model's: agreement is measured, not accuracy", err=True)
        limit = parse_duration(budget) if budget else None
        keeping = (limit, kept_file(model), out is not None, held if source is not None else None)
        found = search(loaded, compared, drop, latency, kinds, calibration, seconds, progress, *keeping)
    folder = store(model, loaded, found, calibration)
    if out is not None:
        _draw(found, out, model)
    if as_json:
        return opt.print_json({"winner": found.winner.cells(), **found.report(), "stored": folder and str(folder)})
    _print(found)
    if folder is None:
        return echo(f"{model} is a name of the zoo: its weights are new every time, so nothing was stored")
    return echo(f"stored in {folder}; `vitkit predict` and `vitkit serve` use it from now on")


def _images(data: str | None, model: VisionModel, progress: Progress) -> tuple[Source | None, Calibration | None]:
    """The images to compare on, and batches of the split train for calibrating, where there is one."""
    from vitkit.prediction import open_inputs
    from vitkit.runtime.verify import calibration_of
    from vitkit.tasks import open_data_for

    if data is None:
        return None, None
    try:
        opened = open_data_for(model, data, progress)
        trained = opened.splits.get("train")
        return opened.evaluation(), calibration_of(model, opened.split("train"), _TO_TUNE) if trained else None
    except (ConfigError, DataError):
        if not Path(data).is_dir():
            raise
        return open_inputs([data], None, progress), None  # images without labels


def _print(found: Tuned) -> None:
    score = found.score_words.removesuffix(" with the model")
    columns = ("configuration", "batch", "threads", "img/s", "speedup", score)
    opt.print_table(columns, (row.cells().values() for row in found.rows))
    winner, check = found.winner.cells(), found.winner.check
    if found.confirmed is not None:
        echo(f"confirmed: {found.confirmed.words()}")
    before = f" ({check.text(check.accuracy_before)} before)" if check and check.accuracy_before is not None else ""
    echo(
        f"best: {winner['way']}, batch {winner['batch']}, {winner['images_per_second']} img/s, "
        f"{found.score_words} {winner['right']}{before} on {found.images}"
    )


def _draw(found: Tuned, out: Path, model: str) -> None:
    from vitkit.figures.style import save_png, styled
    from vitkit.figures.tuning import Candidate, draw_tuning

    measured = [row for row in found.rows if row.ratio is not None]
    shown = [
        Candidate(
            row.choice.name,
            row.choice.runtime,
            row.ratio or 0,
            None if row.check is None else row.check.score,
            row.choice.precision,
            row.choice.reduced,
            row.choice.name == found.winner.choice.name,
        )
        for row in measured
    ]
    check = found.winner.check
    before = 1.0 if check is None or check.accuracy_before is None else check.accuracy_before
    best = next(one for one in shown if one.chosen)
    title = f"{Path(model).name}: {best.name} has {best.speedup:.1f}x the speed of PyTorch, {found.score_words} "
    with styled():
        figure = draw_tuning(shown, found.score_words, before, found.max_drop)
        alt = f"{len(shown)} configurations by speed and {found.score_words}."
        save_png(figure, out, f"{title}{found.winner.cells()['right']} on {found.count} images", alt)
