"""`vitkit evaluate`: the metrics of a model on a set of images; `vitkit explain`: what it has learned, in images."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import vitkit
from vitkit.checkpoints.options import ModelOptions
from vitkit.cli import options as opt
from vitkit.cli.options import echo
from vitkit.errors import ConfigError, DataError
from vitkit.explanation.table import FIGURES, choose
from vitkit.io import adding_to_folder, write_json
from vitkit.progress import Bar

if TYPE_CHECKING:
    from vitkit.data import Dataset, Source
    from vitkit.evaluation import Evaluation, Probe
    from vitkit.evaluation.leaks import WithoutLeaks

_FIGURES = ", ".join(row.name for row in FIGURES)
Kind = Enum("Kind", {"knn": "knn", "fewshot": "fewshot", "linear": "linear"})


@opt.takes_model
def evaluate(
    model: opt.Model,
    data: opt.Data,
    options: ModelOptions,
    split: opt.Split = None,
    batch_size: opt.Batch = None,
    workers: opt.Workers = None,
    device: opt.Device = None,
    probe: Annotated[
        Kind | None,
        Option(help="Evaluate the features, not the head: nearest neighbours, least squares, logistic regression."),
    ] = None,
    views: Annotated[
        int, Option(help="Also ask about so many views of every image (mirrored, moved) and average the outputs.")
    ] = 1,
    out: Annotated[Path | None, Option(help="Write evaluation.json and images into this folder.")] = None,
    classes_from: opt.ClassesFrom = "auto",
    class_map: opt.Map = None,
    cache_dir: opt.CacheDir = None,
    as_json: opt.Json = False,
) -> None:
    """Measure a model: accuracy, per class, calibration, and what it gets wrong; for values R2 and errors.

    The split is test if there is one, else val, unless --split says otherwise.
    With --probe a new head learns from the split train in seconds and is evaluated on the other split.
    """
    from vitkit.evaluation.leaks import without_leaks
    from vitkit.evaluation.probes import PROBES
    from vitkit.evaluation.run import How
    from vitkit.evaluation.run import evaluate as run
    from vitkit.prediction.opened import load_for
    from vitkit.tasks.match import map_classes, parse_map
    from vitkit.training.runs import looks_at
    from vitkit.world import joined

    if out is not None:  # before the work, not after it
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise DataError(f"--out {out} cannot be made a folder ({e.strerror}); give another one") from e
        if not os.access(out, os.W_OK):
            raise DataError(f"--out {out} cannot be written to; give another folder")
    with joined(device or "") as world, Bar(shown=world.first) as progress:
        loaded = load_for(model, "eager", device, options, progress)
        values = loaded.outputs.names if loaded.outputs.kind == "values" and not probe else ()
        dataset = vitkit.open_data(data, progress, target=values, classes_from=classes_from)
        source = dataset.split(split) if split else dataset.evaluation()
        how: How = {"batch_size": batch_size, "workers": opt.workers_for(source, workers)}
        how |= {"rank": world.rank, "world_size": world.size}
        result: Evaluation | Probe
        clean: WithoutLeaks | None = None
        several: Evaluation | None = None  # over several views of every image
        if probe is None:
            source = map_classes(loaded, source, parse_map(class_map or []))
            if views != 1:  # first: it may be refused
                several = run(loaded, source, progress=progress, views=views, **how)
            result = run(loaded, source, progress=progress, **how)
            clean = without_leaks(loaded, result, source, _leaked(dataset, data)) if world.first else None
        elif views != 1:
            raise ConfigError("--views is for the model's own answers; leave out --probe or --views")
        elif "train" in source.split.split("+") or source.split == "all":
            raise ConfigError(f"a probe learns from the split train; evaluate it on test, not on {source.split!r}")
        else:
            result = PROBES[probe.value](loaded, dataset.split("train"), source, progress=progress, **how)
        if world.first:
            looks = 0 if probe else looks_at(model, dataset, source.split)
            averaged = None if several is None else {"views": views, **several.metrics}
            _report(result, source, model, out, as_json, clean, looks, averaged)


def _leaked(dataset: Dataset, data: str) -> list[str]:
    """Images outside train that are in train too: byte for byte, or as an index that was cleaned knows."""
    from vitkit.curation.index import default_place
    from vitkit.curation.leaks import leaked
    from vitkit.data.check import leaked_images

    return [*leaked_images(dataset), *(leaked(default_place(data)) or [])]


def _report(
    result: Evaluation | Probe,
    source: Source,
    model: str,
    out: Path | None,
    as_json: bool,
    clean: WithoutLeaks | None = None,
    looks: int = 0,
    averaged: Mapping[str, float] | None = None,  # the metrics over several views, and how many
) -> None:
    from vitkit.evaluation.figures import write_images

    about = {"model": model, **result.to_dict()}
    if clean is not None:
        about["without_leaks"] = clean.to_dict()
    if looks:
        about["selected_among"] = looks
    if averaged:
        about["averaged"] = dict(averaged)
    written = []
    if out is not None:
        with adding_to_folder(out) as new:
            write_json(new / "evaluation.json", about)
            written = [out / path.name for path in (new / "evaluation.json", *write_images(result, source, new))]
    if as_json:
        return opt.print_json(about)
    if table := result.table():
        opt.print_table(table[0], [[opt.one_line(row[0]), *row[1:]] for row in table[1:]])
    echo(result.summary())
    if clean is not None:
        echo(clean.summary())
    if averaged:
        words = "   ".join(f"{key} {value:.4g}" for key, value in averaged.items() if key != "views")
        echo(f"mean over {averaged['views']} views of every image: {words}")
    if looks:
        echo(f"these weights were selected by this split, as the best of {looks} evaluations: expect less elsewhere")
    if result.not_finite:
        echo(f"warning: the model's output is no finite number for {result.not_finite:,} images")
    lines = [f"{bad.path}: {bad.reason}" for bad in result.bad_files]
    opt.print_some(f"{len(lines)} unreadable and not counted", lines)
    for path in written:
        echo(f"written: {path}")
    return None


@opt.takes_model
def explain(
    model: opt.Model,
    options: ModelOptions,
    images: Annotated[list[str] | None, Argument(metavar="[IMAGE]...", help="Images, or folders.")] = None,
    data: Annotated[str | None, Option(help="A set of images, for statistics, accuracy and mistakes.")] = None,
    out: Annotated[Path, Option(help="Where report.html, figures/ and arrays/ go.")] = Path("explained"),
    only: Annotated[list[str] | None, Option(help=f"Only this figure; may be repeated. One of {_FIGURES}.")] = None,
    wanted: Annotated[
        list[str] | None,
        Option("--class", help="Explain this class (name, else index); repeatable. Default: the likeliest two."),
    ] = None,
    query: Annotated[str | None, Option(help="The patch to ask: ROW,COLUMN, counted from 0.")] = None,
    run: Annotated[str | None, Option(help="The folder of a training run, for its curves.")] = None,
    most: Annotated[
        int, Option("--images", "--pictures", min=1, help="Images that are shown one by one, at most.")
    ] = 8,
    samples: Annotated[int, Option(min=1, help="Images of DATA that are used, at most.")] = 200,
    device: opt.Device = None,
    class_map: opt.Map = None,
    as_json: opt.Json = False,
) -> None:
    """Draw what a Vision Transformer has learned: one page, its figures and their arrays."""
    from vitkit.explanation.build import build_report, make_subject
    from vitkit.tasks.match import parse_map

    choose(only)  # a misspelt figure is an error before anything long is done
    asked = images or [], data, wanted or [], query, run, options, most, samples, device, parse_map(class_map or [])
    with Bar() as progress:
        subject = make_subject(model, *asked)
        report = build_report(subject, out, only, progress)
    if as_json:
        return opt.print_json(report.as_json())
    for note in subject.warnings:  # what follows from what was asked for: no surprise
        echo(f"note: {note}", err=True)
    for name, why in subject.skipped:
        echo(f"warning: {name} was skipped: {why}", err=True)
    for section in report.sections:
        echo(f"{section.heading}: {section.finding}")
    for reason, names in report.reasons().items():
        echo(f"not made: {', '.join(names)}: {reason}")
    return echo(f"open {report.page}")
