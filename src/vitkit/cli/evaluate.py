"""`vitkit evaluate`: how good is a model on a set of pictures."""

from __future__ import annotations

import json
import os
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.output import JsonOption, best_device, one_line, open_table, print_json, print_some, progress_bar

if TYPE_CHECKING:
    from vitkit.data import Source
    from vitkit.evaluate import Evaluation, Probe


class Kind(str, Enum):
    knn = "knn"
    fewshot = "fewshot"


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint, a run's folder, hf:owner/name or timm:name.")
    ],
    data: Annotated[str, typer.Argument(metavar="DATA", help="A set of pictures, as for `vitkit train`.")],
    split: Annotated[
        str | None, typer.Option(help="train, val or test; by default test if there is one, else val.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Pictures at once; by default what suits their size.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that decode; by default one per core for files.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps; by default the best there is.")] = None,
    probe: Annotated[
        Kind | None,
        typer.Option(help="Judge the representation, not the classifier: nearest neighbours or least squares."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write evaluation.json and pictures into this folder.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a model: accuracy, per class, calibration, and what it gets wrong.

    With --probe it learns from the split train in closed form and is judged on the other split.
    """
    from vitkit.checkpoints.load import load
    from vitkit.ranks import joined

    if out is not None:
        _check_folder(out)
    with joined() as (rank, world_size):
        loaded = load(model).to(best_device(device))
        if rank == 0 and "fresh weights" in loaded.load_report:  # type: ignore[operator]
            typer.echo(f"note: {model} is a name of the zoo, so its weights are fresh and not trained", err=True)
        source = open_evaluation(data, split)
        how: dict[str, Any] = {
            "batch_size": batch_size,
            "workers": _workers(source, workers),
            "rank": rank,
            "world_size": world_size,
        }
        result: Evaluation | Probe
        if probe is None:
            from vitkit.evaluate.run import evaluate as judge

            with progress_bar(f"evaluating {source.name}", shown=rank == 0) as on_batch:
                result = judge(loaded, source, on_batch=on_batch, **how)
        else:
            result = _probe(probe, loaded, data, source, how)
        if rank == 0:
            _report(result, source, model, out, as_json)


def _report(result: Any, source: Source, model: str, out: Path | None, as_json: bool) -> None:
    from vitkit.evaluate import Probe

    about = {"model": model, **result.to_dict()}
    written = _write(result, source, about, out) if out is not None else []
    if as_json:
        return print_json(about)
    _print_probe(result) if isinstance(result, Probe) else _print_evaluation(result)
    _print_bad(result)
    for path in written:
        typer.echo(f"written: {path}")
    return None


# --- what is judged ----------------------------------------------------------------------------------


def open_evaluation(data: str, split: str | None = None) -> Source:
    """The split that was asked for; otherwise test, or where there is none, val."""
    from vitkit.data import evaluation_split, open_data
    from vitkit.data.progress import bar
    from vitkit.errors import DataError

    if split is not None:
        return open_data(data, split, bar)
    try:
        return open_data(data, "test", bar)
    except DataError:
        whole = open_data(data, "all", bar)
        best = evaluation_split(whole.splits)
        return whole if list(whole.splits) == [best] else open_data(data, best, bar)


def _probe(kind: Kind, model: Any, data: str, source: Source, how: dict[str, Any]) -> Probe:
    from vitkit.data import open_data
    from vitkit.data.progress import bar
    from vitkit.errors import ConfigError
    from vitkit.evaluate import fewshot, knn

    if "train" in source.split.split("+") or source.split == "all":
        raise ConfigError(f"a probe learns from the split train, so it cannot be judged on {source.split!r}; use test")
    train = open_data(data, "train", bar)
    judge = knn if kind is Kind.knn else fewshot
    with progress_bar(f"representing {source.name}", shown=how["rank"] == 0) as on_batch:
        return judge(model, train, source, on_batch=on_batch, **how)


def _workers(source: Source, wanted: int | None) -> int:
    """Sets in memory and small sets of files are not worth starting processes for."""
    if wanted is not None:
        return wanted
    return 0 if source.pixels is not None or len(source) < 1000 else os.cpu_count() or 1


# --- what is told ------------------------------------------------------------------------------------


def _print_evaluation(result: Evaluation) -> None:
    rates = result.per_class
    ap = [] if rates.ap is None else [rates.ap]
    print_, table = open_table("class", "precision", "recall", "F1", *(["AP"] if ap else []), "pictures")
    columns = (rates.precision, rates.recall, rates.f1, *ap)
    for i, name in enumerate(result.classes):
        table.add_row(one_line(name), *(_percent(c[i]) for c in columns), f"{rates.support[i]:,}")
    print_(table)
    pictures = f"{result.samples:,} pictures of {result.name}, split {result.split}"
    if result.top1 is not None and result.top5 is not None:
        found = f"top-1 {_percent(result.top1)}   top-5 {_percent(result.top5)}"
    else:
        found = f"mAP {_percent(result.map)}"
    typer.echo(f"{found}   loss {result.loss:.4f}   calibration error {_percent(result.ece)}   ({pictures})")
    if result.not_finite:
        typer.echo(f"warning: the model's answer is no finite number for {result.not_finite:,} pictures")


def _print_probe(result: Probe) -> None:
    fewshot = result.probe == "fewshot"
    for tried, share in result.accuracy.items():
        typer.echo(f"{f'{tried} per class' if fewshot else tried}: {_percent(share)}")
    how = ", ".join(f"{k} {v}" for k, v in result.settings.items() if k != "shots")
    typer.echo(
        f"{result.probe} ({how}): learned from {result.learned_from:,} pictures of train, "
        f"judged on {result.samples:,} of {result.split} of {result.data}"
    )


def _print_bad(result: Evaluation | Probe) -> None:
    lines = [f"{bad.path}: {bad.reason}" for bad in result.bad_files]
    print_some(f"{len(lines)} unreadable and not counted", lines)


def _check_folder(out: Path) -> None:
    """Before the work, not after it."""
    from vitkit.errors import DataError

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DataError(f"--out {out} cannot be made a folder ({e.strerror}); give another one") from e
    if not os.access(out, os.W_OK):
        raise DataError(f"--out {out} cannot be written to; give another folder")


def _write(result: Any, source: Source, about: dict[str, Any], out: Path) -> list[Path]:
    from vitkit.errors import DataError
    from vitkit.evaluate import Evaluation

    path = out / "evaluation.json"
    try:
        path.write_text(json.dumps(about, indent=2, ensure_ascii=False), encoding="utf-8")
    except OSError as e:
        raise DataError(f"{path} cannot be written ({e.strerror}); give --out another folder") from e
    if not isinstance(result, Evaluation):
        return [path]
    from vitkit.evaluate.pictures import write_pictures

    return [path, *write_pictures(result, source, out)]


def _percent(share: float | None) -> str:
    return "-" if share is None or share != share else f"{100 * share:.2f}%"
