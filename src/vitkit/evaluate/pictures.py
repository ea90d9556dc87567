"""An evaluation drawn: what is taken for what, how far its claims can be trusted, and its worst mistakes.

Each title states the finding.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitkit.data import Source
from vitkit.data.sheet import Row, Tile, draw
from vitkit.errors import DataError, MissingPackage
from vitkit.evaluate.metrics import Bins
from vitkit.evaluate.result import Evaluation, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL import Image

INK, GREY, LINE, PALE = "#1b1f27", "#667080", "#d3d8e0", "#dbe6f2"
BLUE, LIGHT_BLUE, ORANGE = "#2f7fc1", "#9cc6e8", "#d9622b"
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}
_NUMBERED = 20  # up to so many classes every cell holds its number
_SMALLEST = 6.5  # points; where names would be smaller, every second or third is left out
_PAIRS = 12  # confusions listed by name beside a large matrix
_FEW = 10  # a bar for fewer answers than that says little, and is drawn pale
_SHEET_ROWS, _SHEET_COLUMNS = 12, 8


def write_pictures(evaluation: Evaluation, source: Source, folder: Path) -> list[Path]:
    """confusion.png (one class per picture only), reliability.png and worst.png (when there are mistakes)."""
    drawers: dict[str, Callable[[], bytes | None]] = {
        "confusion.png": lambda: confusion_png(evaluation),
        "reliability.png": lambda: reliability_png(evaluation),
        "worst.png": lambda: _png(worst_sheet(evaluation, source)),
    }
    written = []
    for name, drawn in drawers.items():
        if (content := drawn()) is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        except OSError as e:
            raise DataError(f"{folder / name} cannot be written: {e.strerror}; give --out another folder") from e
        written.append(folder / name)
    return written


# --- confusion ---------------------------------------------------------------------------------------


def confusion_png(evaluation: Evaluation) -> bytes | None:
    """Rows are true classes and sum to 100%. Only mistakes are coloured, so that the many hits do not drown them."""
    if evaluation.confusion is None:
        return None
    count = len(evaluation.classes)
    large = count > _NUMBERED
    side = 2.4 + (0.42 * count if not large else min(8.0, 4.5 + 0.05 * count))
    with _styled():
        figure = _figure(side + (4.2 if large else 0.6), side)
        axes = figure.subplots(1, 2 if large else 1, width_ratios=[side, 3.6] if large else None, squeeze=False)[0]
        _draw_matrix(figure, axes[0], evaluation, 72 * (side - 2.4) / count)
        if large:
            _draw_pairs(axes[1], evaluation)
        _title(figure, _confusion_finding(evaluation))
        return _saved(figure)


def _draw_matrix(figure: Figure, axes: Axes, evaluation: Evaluation, cell: float) -> None:
    """`cell` is the height of a row in points."""
    matrix = evaluation.confusion
    assert matrix is not None
    count = len(matrix)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    mistakes = np.where(np.eye(count, dtype=bool), 0, shares)
    top = max(0.05, float(mistakes.max()))  # a rare mistake shall not look grave
    axes.imshow(np.where(np.eye(count, dtype=bool), 1.0, np.nan), cmap=_only(PALE), vmin=0, vmax=1)
    shown = axes.imshow(np.where(mistakes, mistakes, np.nan), cmap=_light_to_dark(), vmin=0, vmax=top)
    for spine in axes.spines.values():
        spine.set(visible=True, color=LINE)
    if count <= _NUMBERED:
        _write_numbers(axes, matrix, shares, top)
    step = max(1, int(np.ceil(_SMALLEST / (0.8 * cell))))
    size = min(9.0, 0.8 * cell * step)
    names = [_short(n, 16) for n in evaluation.classes]
    axes.set_yticks(range(0, count, step), names[::step], fontsize=size)
    flat = count <= _NUMBERED and max(map(len, names)) <= 4
    axes.set_xticks(range(0, count, step), names[::step], fontsize=size, rotation=0 if flat else 90)
    axes.tick_params(length=0, pad=3)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    bar = figure.colorbar(shown, ax=axes, shrink=0.5, aspect=28, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    bar.set_label("share of the true class", fontsize=9)


def _write_numbers(axes: Axes, matrix: np.ndarray, shares: np.ndarray, top: float) -> None:
    size = 8.5 if len(matrix) <= 12 else 7
    for r, c in np.argwhere(matrix):
        colour = INK if r == c or shares[r, c] < 0.55 * top else "white"
        weight = "bold" if r == c else "normal"
        axes.text(c, r, f"{matrix[r, c]}", ha="center", va="center", fontsize=size, color=colour, fontweight=weight)


def _pairs(evaluation: Evaluation) -> list[tuple[int, str, str]]:
    """How often one class is taken for another, the most frequent first."""
    matrix = evaluation.confusion
    assert matrix is not None
    mistakes = np.where(np.eye(len(matrix), dtype=bool), 0, matrix)
    order = np.argsort(-mistakes, axis=None, kind="stable")[:_PAIRS]
    rows, columns = np.unravel_index(order, mistakes.shape)
    names = evaluation.classes
    return [(int(mistakes[r, c]), names[r], names[c]) for r, c in zip(rows, columns, strict=True) if mistakes[r, c]]


def _draw_pairs(axes: Axes, evaluation: Evaluation) -> None:
    """The most frequent mistakes by name, for a matrix too large to read them off."""
    pairs = _pairs(evaluation)
    axes.set_title("taken for another most often", fontsize=10, loc="left", color=GREY)
    axes.barh(range(len(pairs)), [n for n, _, _ in pairs], height=0.28, color=ORANGE)
    for row, (n, true, said) in enumerate(pairs):
        axes.text(0, row - 0.3, f"{_short(true, 18)} as {_short(said, 18)}: {n}", fontsize=8.5, va="bottom")
    axes.set_ylim(_PAIRS - 0.4, -0.9)
    axes.set_xlim(0, max([n for n, _, _ in pairs], default=1) * 1.35)
    axes.axis("off")


def _confusion_finding(evaluation: Evaluation) -> str:
    assert evaluation.top1 is not None
    right = f"{_percent(evaluation.top1)} of {evaluation.samples:,} are right"
    pairs = _pairs(evaluation)
    if not pairs:
        return f"{right}: no class is taken for another"
    n, true, said = pairs[0]
    return f"{right}; most often {_short(true)} is taken for {_short(said)} ({n}\u00a0{'times' if n > 1 else 'time'})"


# --- reliability -------------------------------------------------------------------------------------


def reliability_png(evaluation: Evaluation) -> bytes:
    """Above: what was true of each claim. Below: how many claims there were."""
    bins = evaluation.reliability
    with _styled():
        figure = _figure(5.6, 6.4)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
        _draw_claims(upper, bins)
        shares = bins.count / max(1, bins.count.sum())
        lower.bar(bins.edges[:-1], shares, 0.92 * bins.edges[1], align="edge", color=GREY)
        lower.set(ylabel="share of\nanswers", xlabel="probability the model gave its answer")
        for axes in (upper, lower):
            axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
            axes.grid(axis="y", color=LINE, linewidth=0.7)
            axes.set_axisbelow(True)
        _title(figure, _reliability_finding(evaluation))
        return _saved(figure)


def _draw_claims(axes: Axes, bins: Bins) -> None:
    """Bars as high as what was true; what was claimed beyond that, or not claimed of it, is set apart."""
    for few in (False, True):
        chosen = (bins.count > 0) & ((bins.count < _FEW) == few)
        x, claimed, true = bins.edges[:-1][chosen], bins.confidence[chosen], bins.accuracy[chosen]
        look: dict[str, Any] = {"width": 0.92 * bins.edges[1], "align": "edge", "alpha": 0.3 if few else 1.0}
        words = ["_"] * 3 if few else ["claimed and true", "claimed, but not true", "true, but not claimed"]
        both = np.minimum(claimed, true)
        axes.bar(x, both, color=BLUE, label=words[0], **look)
        axes.bar(x, np.maximum(claimed - true, 0), bottom=both, color=ORANGE, label=words[1], **look)
        axes.bar(x, np.maximum(true - claimed, 0), bottom=both, color=LIGHT_BLUE, label=words[2], **look)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)), label="perfect calibration")
    axes.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="how often that was true")
    note = f"pale: fewer than {_FEW} answers" if ((bins.count > 0) & (bins.count < _FEW)).any() else None
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, fontsize=9, title=note, alignment="left")


def _reliability_finding(evaluation: Evaluation) -> str:
    bins = evaluation.reliability
    total = max(1, bins.count.sum())
    claimed, true = (float((bins.count * v).sum() / total) for v in (bins.confidence, bins.accuracy))
    error = f"calibration error {_percent(evaluation.ece)}"
    if evaluation.ece < 0.01:
        return f"Its probabilities can be trusted: {error}"
    if abs(claimed - true) < 0.5 * evaluation.ece:
        return f"Sometimes too sure, sometimes not sure enough: {error}"
    word = "Too sure" if claimed > true else "Not sure enough"
    return f"{word}: it claims {_percent(claimed)} and {_percent(true)} is true; {error}"


# --- the worst mistakes ------------------------------------------------------------------------------


def worst_sheet(evaluation: Evaluation, source: Source) -> Image.Image | None:
    """A row per true class with its worst mistakes, the classes with the most mistakes first.

    With several labels there are too many combinations for that: then simply the worst, row by row.
    """
    wrong = evaluation.records.wrong
    if not len(wrong):
        return None
    total = f"{len(wrong):,} of {evaluation.samples:,} are wrong ({_percent(len(wrong) / evaluation.samples)})"
    if source.multi_label:
        lines = [wrong[i : i + _SHEET_COLUMNS].tolist() for i in range(0, len(wrong), _SHEET_COLUMNS)][
            : _SHEET_ROWS // 2
        ]
        rows = [Row("", "", [_tile(evaluation, source, r) for r in line]) for line in lines]
        about = "the worst first: labels that the model missed, and labels that it added"
        return draw(rows, total, about, _SHEET_COLUMNS)
    of_class: dict[int, list[int]] = {}
    for row in wrong.tolist():
        of_class.setdefault(int(evaluation.records.labels[row]), []).append(row)
    shown = sorted(of_class.items(), key=lambda item: -len(item[1]))[:_SHEET_ROWS]
    about = "each row: pictures of one class, and what the model took them for, worst first"
    if len(shown) < len(of_class):
        about += f"; the {len(shown)} classes with the most mistakes of {len(of_class)}"
    rows = []
    for label, found in shown:
        tiles = [_tile(evaluation, source, row) for row in found[:_SHEET_COLUMNS]]
        rows.append(Row(f"{_short(source.classes[label], 18)}: {len(found):,} wrong", "", tiles))
    return draw(rows, total, about, max(5, *(len(r.tiles) for r in rows)))


def _tile(evaluation: Evaluation, source: Source, row: int) -> Tile:
    from PIL import Image

    records, index = evaluation.records, int(evaluation.records.indices[row])
    picture, _ = source.read(index)
    if not isinstance(picture, Image.Image):  # neither grey nor colour: the first channel
        picture = Image.fromarray(np.ascontiguousarray(picture[..., 0]))
    if records.predicted is not None and records.probability is not None:
        said = evaluation.classes[records.predicted[row]]
        return Tile(picture, f"as {_short(said, 12)}, {100 * records.probability[row]:.0f}%")
    assert records.scores is not None
    said, true = records.scores[row] > 0, records.labels[row] > 0
    told = [("missed", true & ~said), ("added", said & ~true)]
    words = [f"{word} {_short(evaluation.classes[c], 12)}" for word, which in told for c in np.flatnonzero(which)]
    return Tile(picture, ", ".join(words))


# --- the look ----------------------------------------------------------------------------------------


def _styled() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingPackage("matplotlib", "drawing an evaluation", "explain") from None
    return mpl.rc_context(STYLE)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _light_to_dark() -> Any:
    """matplotlib's magma, perceptually uniform, from light to dark and without its ends; none is transparent."""
    import matplotlib as mpl
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("mistakes", mpl.colormaps["magma_r"](np.linspace(0.06, 0.85, 256)))


def _only(colour: str) -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap([colour])


def _title(figure: Figure, text: str) -> None:
    width = int(figure.get_figwidth() * 10.5)
    wrapped = "\n".join(textwrap.wrap(printable(text), width))
    figure.suptitle(wrapped, x=0.015, ha="left", fontsize=12, fontweight="bold")


def _saved(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():  # names of classes may be in letters that the font lacks
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(buffer, format="png", dpi=150, bbox_inches="tight", pad_inches=0.15)
    return buffer.getvalue()


def _png(picture: Image.Image | None) -> bytes | None:
    if picture is None:
        return None
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _short(text: str, limit: int = 24) -> str:
    text = " ".join(printable(text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
