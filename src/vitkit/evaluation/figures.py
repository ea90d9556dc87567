"""An evaluation drawn: confusion, reliability, predicted values, the worst mistakes. Each title states the finding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitkit.data import Source
from vitkit.data.sheet import Row, Tile, draw
from vitkit.figures import evaluation as drawing
from vitkit.figures.style import save_png, short, styled
from vitkit.io import replacing
from vitkit.tasks.classified import ClassEvaluation, wrong
from vitkit.tasks.regress import ValueEvaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL import Image

    Drawn = tuple[str, Figure, str, str]  # file name, figure, finding, description

_ROWS, _COLUMNS = 12, 8  # of a sheet


def write_images(evaluation: object, source: Source, folder: Path) -> list[Path]:
    """The figures of its kind of evaluation, and worst.png with the worst mistakes when there are any."""
    written: list[Path] = []
    if isinstance(evaluation, ClassEvaluation):
        figures, sheet = class_figures(evaluation), worst_sheet(evaluation, source)
    elif isinstance(evaluation, ValueEvaluation):
        figures, sheet = value_figures(evaluation), misses_sheet(evaluation, source)
    else:
        return written
    with styled():
        for name, figure, finding, alt in figures:
            written.append(folder / name)
            save_png(figure, written[-1], finding, alt)
    if sheet is not None:
        written.append(folder / "worst.png")
        with replacing(written[-1]) as file:
            sheet.save(file, format="PNG")
    return written


def class_figures(evaluation: ClassEvaluation) -> Iterator[Drawn]:
    """The confusion matrix (one class per image only) and the reliability diagram."""
    matrix, names, bins = evaluation.confusion, evaluation.classes, evaluation.reliability
    if matrix is not None:
        alt = f"A matrix of {len(names)} by {len(names)} classes, true down and predicted across."
        yield "confusion.png", drawing.draw_confusion(matrix, names), drawing.confusion_finding(matrix, names), alt
    alt = "Bars of accuracy by confidence against the diagonal, above the share of predictions in each bin."
    yield "reliability.png", drawing.draw_reliability(bins), drawing.reliability_finding(bins), alt


def value_figures(evaluation: ValueEvaluation) -> Iterator[Drawn]:
    figure = drawing.draw_values(evaluation.records["labels"], evaluation.records["values"], list(evaluation.targets))
    alt = "Points of predicted over true values around the diagonal, and a histogram of the residuals."
    yield "predicted.png", figure, drawing.values_finding(evaluation.targets), alt


def _row_by_row(tiles: list[Tile]) -> list[Row]:
    return [Row("", "", tiles[i : i + _COLUMNS]) for i in range(0, len(tiles), _COLUMNS)]


def misses_sheet(evaluation: ValueEvaluation, source: Source) -> Image.Image:
    """The largest errors first, row by row."""
    tiles = []
    for miss in evaluation.worst[: _ROWS // 2 * _COLUMNS]:
        errors = [f"{value:.3g}, true {miss.label[name]:.3g}" for name, value in miss.predicted.items()]
        tiles.append(Tile(source.image(miss.index), errors[0] if len(errors) == 1 else short("; ".join(errors), 36)))
    title = f"{evaluation.samples:,} images of {evaluation.name}, the largest errors first"
    about = f"predicted and true {', '.join(evaluation.targets)}"
    return draw(_row_by_row(tiles), title, about, min(_COLUMNS, max(5, len(tiles))))


def worst_sheet(evaluation: ClassEvaluation, source: Source) -> Image.Image | None:
    """A row per true class with its worst mistakes, the classes with the most mistakes first.

    With several labels there are too many combinations for that: then simply the worst, row by row.
    """
    mistakes = wrong(evaluation.records)
    if not len(mistakes):
        return None
    total = f"{len(mistakes):,} of {evaluation.samples:,} are wrong ({100 * len(mistakes) / evaluation.samples:.1f}%)"
    if source.multi_label:
        tiles = [_tile(evaluation, source, row) for row in mistakes[: _ROWS // 2 * _COLUMNS]]
        about = "the worst first: labels that the model missed, and labels that it added"
        return draw(_row_by_row(tiles), total, about, _COLUMNS)
    of_class: dict[int, list[int]] = {}
    for row in mistakes.tolist():
        of_class.setdefault(int(evaluation.records["labels"][row]), []).append(row)
    shown = sorted(of_class.items(), key=lambda item: -len(item[1]))[:_ROWS]
    about = "each row: images of one class and what they were predicted as, worst first"
    if len(shown) < len(of_class):
        about += f"; the {len(shown)} classes with the most mistakes of {len(of_class)}"
    rows = []
    for label, found in shown:
        tiles = [_tile(evaluation, source, row) for row in found[:_COLUMNS]]
        rows.append(Row(f"{short(source.classes[label], 18)}: {len(found):,} wrong", "", tiles))
    return draw(rows, total, about, max(5, *(len(r.tiles) for r in rows)))


def _tile(evaluation: ClassEvaluation, source: Source, row: int) -> Tile:
    records = evaluation.records
    image = source.image(int(records.indices[row]))
    if "predicted" in records.columns:
        said = evaluation.classes[records["predicted"][row]]
        return Tile(image, f"as {short(said, 12)}, {100 * records['probability'][row]:.0f}%")
    said, true = records["scores"][row] > 0, records["labels"][row] > 0
    wrong = [("missed", true & ~said), ("added", said & ~true)]
    words = [f"{word} {short(evaluation.classes[c], 12)}" for word, which in wrong for c in np.flatnonzero(which)]
    return Tile(image, ", ".join(words))
