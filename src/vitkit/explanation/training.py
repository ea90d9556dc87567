"""The curves of a training run.

A run's directory holds `log.jsonl`, one JSON object per line; whatever numbers are in it are read, lines
that are not JSON (a run that was cut short) are skipped.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from vitkit.errors import DataError
from vitkit.explanation.subject import LeftOut, Section, Subject
from vitkit.figures.panels import baseline
from vitkit.figures.style import COLOURS, Figure, new_figure
from vitkit.io import parse_json, read_regular
from vitkit.tasks import TASKS

Curves = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> (steps, values)
SCORES = {f"val_{task.score.key}": task.score for task in TASKS.values()}
WORDS = {name: f"validation {score.words}" for name, score in SCORES.items()}
WORDS |= {"lr": "learning rate", "val_top5": "validation top-5 accuracy", "val_loss": "validation loss"}
HEALTH = ("val_rank", "val_spread", "val_code_information", "val_projection_std", "val_retrieval")  # of pre-training
WORDS |= {"val_rank": "effective rank of the features", "val_spread": "spread of the features"}
FIRST = ("loss", *SCORES, *HEALTH, "val_loss", "train_top1", "lr")  # panels; others follow by name


def read_log(run: str | Path) -> Curves:
    """Every number in the run's log by step (or epoch, or line)."""
    path = Path(run) / "log.jsonl" if Path(run).is_dir() else Path(run)
    try:
        lines = read_regular(path).decode(errors="replace").splitlines()
    except OSError as e:
        raise DataError(f"{path} cannot be read ({e.strerror}); give the directory of a run of `vitkit train`") from e
    found: dict[str, list[tuple[float, float]]] = {}
    for number, line in enumerate(lines):
        try:
            entry = parse_json(line)
        except ValueError:
            continue
        entries = entry.items() if isinstance(entry, dict) else ()
        numbers = {k: float(v) for k, v in entries if type(v) in (int, float) and math.isfinite(v)}
        epoch = numbers.pop("epoch", number)
        step = numbers.pop("step", epoch)
        for name, value in numbers.items():
            found.setdefault(name, []).append((step, value))
    if not found:
        raise DataError(f"{path} holds no numbers; each line of a log is JSON, such as {{'step': 1, 'loss': 2.3}}")
    return {name: tuple(np.array(points).T) for name, points in found.items()}


def in_words(name: str) -> str:
    """What the log calls by a short name."""
    return WORDS.get(name, name.replace("val_", "validation ").replace("_", " "))


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The running mean over the last `window` values (fewer at the beginning)."""
    total, end = np.cumsum([0.0, *values]), np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    return (total[end] - total[start]) / (end - start)


def noisy(values: np.ndarray) -> bool:
    """A curve that goes up and down a lot, which is drawn pale, under its running mean."""
    return len(values) > 60 and float(np.abs(np.diff(values)).sum()) > 4 * float(np.ptp(values))


def make(subject: Subject) -> Section:
    if subject.run is None:
        raise LeftOut("it needs the directory of a run: explain the run itself, or give --run")
    return curves_of(read_log(subject.run))


def curves_of(curves: Curves) -> Section:
    name = "loss" if "loss" in curves else next(iter(curves))
    finding = f"{in_words(name).capitalize()} went from {curves[name][1][0]:.3g} to {curves[name][1][-1]:.3g}"
    scores = [name for name in curves if name in SCORES or "top1" in name or "accuracy" in name]
    if scores:
        (_, values), words = curves[scores[0]], in_words(scores[0])
        most = values.min() if scores[0] in SCORES and not SCORES[scores[0]].higher else values.max()
        text = SCORES[scores[0]].text if scores[0] in SCORES else "{:.4g}".format
        best = "its best" if values[-1] == most else f"its best was {text(most)}"
        finding = f"{words[0].upper()}{words[1:]} ends at {text(values[-1])}, {best}"
    pale = any(noisy(curves[name][1]) for name in shown_curves(curves))
    return Section(
        heading="Training",
        finding=finding,
        alt=f"Curves over training of {', '.join(in_words(n) for n in shown_curves(curves))}.",
        how="Pale lines are the values as logged, strong lines their running mean." if pale else "Values as logged.",
        arrays={f"{n}_{part}": v[i] for n, v in curves.items() for i, part in enumerate(("step", "value"))},
        draw=lambda: draw(curves),
    )


def shown_curves(curves: Curves) -> list[str]:
    """Those with a panel, in order."""
    shown = [n for n, (_, v) in curves.items() if not ("top5" in n and v.min() >= 1 - 1e-9)]  # of few classes always 1
    shown = [n for n in shown if not n.startswith(("val_pixel_", "val_images"))]  # raw pixels: a line to compare with
    return sorted(shown, key=lambda n: (FIRST.index(n) if n in FIRST else len(FIRST), n))[:8]


def draw(curves: Curves) -> Figure:
    """One panel per quantity of the log, over steps."""
    names = shown_curves(curves)
    down, odd = -(-len(names) // 2), len(names) % 2  # of an odd number the first one is as wide as the figure
    figure = new_figure(1.8 * down + 0.3)
    grid = figure.add_gridspec(down, 2)
    first, last = min(s.min() for s, _ in curves.values()), max(s.max() for s, _ in curves.values())
    for i, name in enumerate(names):
        row, column = divmod(i + odd, 2) if i or not odd else (0, slice(None))
        axes, (steps, values) = figure.add_subplot(grid[row, column]), curves[name]
        pale = noisy(values)
        axes.grid()
        axes.plot(steps, values, color=COLOURS[0], linewidth=0.8 if pale else 1.7, alpha=0.35 if pale else 1)
        if pale:
            axes.plot(steps, smooth(values, len(values) // 25), color=COLOURS[0], linewidth=1.7)
        axes.set_title(in_words(name), loc="left")
        if (pixels := name.replace("val_", "val_pixel_")) in curves and pixels != name:
            baseline(axes, float(curves[pixels][1][-1]), "raw pixels")
        if first < last:
            axes.set_xlim(first, last)
        axes.set_xlabel("step" if row == down - 1 else "")
    return figure
