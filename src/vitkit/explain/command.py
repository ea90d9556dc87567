"""From what a user types to a report: load the model and the pictures, then `build_report`.

`python -m vitkit.explain.NAME MODEL [IMAGE ...]` ends up in `main`, which makes the one figure of that name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from vitkit.checkpoints.load import load
from vitkit.errors import InputError, VitkitError
from vitkit.explain.build import Report, Say, build_report, choose, quiet
from vitkit.explain.inside import as_vit
from vitkit.explain.pictures import load_pictures, nothing, sample_data
from vitkit.explain.section import Subject, find_class
from vitkit.model.config import Size, as_size

FRESH = (
    "{} is a name, not a checkpoint: the weights are fresh and random, so the figures show what an untrained model does"
)


def explain(
    source: str, out: str | Path, only: Sequence[str] | None = None, say: Say = quiet, **asked: object
) -> Report:
    """The whole command: `asked` are the arguments of `make_subject`."""
    choose(only)  # a misspelt figure is an error before anything long is done
    return build_report(make_subject(source, **asked), Path(out), only, say)  # type: ignore[arg-type]


def make_subject(
    source: str,
    images: Sequence[str] = (),
    data: str | None = None,
    image_size: str | None = None,
    classes: Sequence[str] = (),
    query: str | None = None,
    run: str | None = None,
    most: int = 8,
    samples: int = 200,
) -> Subject:
    """Load the model and the pictures that a report is about."""
    model, class_names, warnings = load_model(
        source, None if image_size is None else as_size(image_size, "--image-size")
    )
    vit = as_vit(model)
    config = vit.config
    given = load_pictures(images, config) if images else nothing(config)
    sample = sample_data(data, config, samples) if data else given
    class_names = class_names or sample.class_names
    wanted = [find_class(word, class_names, config.classes) for word in classes] or None
    pictures = given if len(given) else replace(sample, skipped=[*given.skipped, *sample.skipped])
    if len(given) > most:
        warnings.append(f"{len(given)} pictures were given: the first {most} are shown, all count in the statistics")
    directory = Path(run) if run else _run_of(source)
    patch = _patch(query, config.grid)
    return Subject(source, vit, pictures.first(most), sample, class_names, wanted, patch, directory, warnings)


def load_model(source: str, size: Size | None) -> tuple[nn.Module, Sequence[str] | None, list[str]]:
    """The model, the names of its classes if it has them, and what a reader of the report must be warned of."""
    model = load(source, image_size=size)
    told = list(getattr(model, "load_report", ()))
    fresh = "fresh weights" in told
    warnings = [FRESH.format(source)] if fresh else [f"{line[:1].upper()}{line[1:].rstrip('.')}" for line in told]
    return model, getattr(model, "class_names", None), warnings


def _run_of(source: str) -> Path | None:
    """The run that a checkpoint belongs to: its own directory, when that has a log."""
    path = Path(source)
    directory = path if path.is_dir() else path.parent
    return directory if path.exists() and (directory / "log.jsonl").is_file() else None


def _patch(query: str | None, grid: Size) -> Size | None:
    if query is None:
        return None
    parts = query.replace("x", ",").split(",")
    if len(parts) != 2 or not all(p.strip().isdigit() for p in parts):
        raise InputError(f"--query {query} is not a patch; write ROW,COLUMN counted from 0, such as 3,5")
    row, column = int(parts[0]), int(parts[1])
    if row >= grid[0] or column >= grid[1]:
        raise InputError(f"--query {query} is outside: rows are 0 to {grid[0] - 1}, columns 0 to {grid[1] - 1}")
    return row, column


def main(name: str, arguments: Sequence[str] | None = None) -> None:
    """`python -m vitkit.explain.NAME MODEL [IMAGE ...]`: one figure."""
    parser = argparse.ArgumentParser(prog=f"python -m vitkit.explain.{name}", description=f"Draw the figure '{name}'.")
    parser.add_argument("model", help="a checkpoint, or a name of `vitkit zoo`")
    parser.add_argument("images", nargs="*", help="picture files")
    parser.add_argument("--data", help="a set of pictures, for statistics")
    parser.add_argument("--run", help="the directory of a training run")
    parser.add_argument("--out", default="explained", help="where the files go (default: explained)")
    asked = vars(parser.parse_args(arguments))
    try:
        report = explain(asked.pop("model"), asked.pop("out"), only=[name], **asked)
    except VitkitError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    for left, reason in report.left_out:
        print(f"{left} was not made: {reason}", file=sys.stderr)
    for section in report.sections:
        print(f"{section.finding}\n  {report.out / 'figures' / section.name}.png")
    if not report.sections:
        raise SystemExit(2)
