"""How a model was trained and how it does: curves of a run, confusion, calibration and its worst mistakes.

A run's directory holds `log.jsonl`, one JSON object per line; whatever numbers are in it are read, lines
that are not JSON (a run that was cut short) are skipped. The rest needs only the model and labelled pictures.

Shapes: B pictures, C classes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitkit.errors import DataError
from vitkit.evaluate.metrics import Bins, confusion, reliability

Curves = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> (steps, values)
WORDS = {
    "lr": "learning rate",
    "val_top1": "validation accuracy",
    "val_top5": "validation accuracy, best of five",
    "val_loss": "validation loss",
}


@dataclass(frozen=True)
class Judgement:
    confusion: np.ndarray  # C C: true class down, predicted across
    accuracy: float
    calibration: Bins  # by confidence
    worst: np.ndarray  # pictures with the least probability for their own class, worst first


def read_log(run: str | Path) -> Curves:
    """Every number in the run's log by step (or epoch, or line)."""
    path = Path(run)
    path = path / "log.jsonl" if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as e:
        raise DataError(f"{path} cannot be read ({e.strerror}); give the directory of a run of `vitkit train`") from e
    found: dict[str, list[tuple[float, float]]] = {}
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict):
            continue
        step = next((entry[k] for k in ("step", "epoch") if is_number(entry.get(k))), number)
        for name, value in entry.items():
            if name not in ("step", "epoch") and is_number(value):
                found.setdefault(name, []).append((float(step), float(value)))
    if not found:
        raise DataError(
            f"{path} holds no numbers; a log has one JSON object per line, such as {{'step': 1, 'loss': 2.3}}"
        )
    return {name: tuple(np.array(points).T) for name, points in found.items()}


def in_words(name: str) -> str:
    """What the log calls by a short name."""
    return WORDS.get(name, name.replace("_", " "))


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The running mean over the last `window` values (fewer at the beginning)."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    return (total[end] - total[start]) / (end - start)


def judge(probability: np.ndarray, labels: np.ndarray, bins: int = 10, worst: int = 8) -> Judgement:
    """Probabilities (B C) and true classes (B) -> confusion, calibration, and the worst pictures."""
    predicted = probability.argmax(axis=1)
    right = predicted == labels
    own = probability[np.arange(len(labels)), labels]
    return Judgement(
        confusion=confusion(labels, predicted, probability.shape[1]),
        accuracy=float(right.mean()),
        calibration=reliability(probability.max(axis=1), right, bins),
        worst=np.argsort(own, kind="stable")[:worst],
    )


if __name__ == "__main__":
    from vitkit.explain.command import main

    main("training")
