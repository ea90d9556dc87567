"""What to label next: typical and diverse images first (TypiClust, Hacohen et al. 2022), uncertain ones with a model.

As many clusters as images are wanted; of each, the image whose neighbours are nearest. With a model the clusters are
those of the images that it is least sure of, and of each the least sure one is taken.
"""

from __future__ import annotations

import numpy as np

from vitkit.curation.search import nearest
from vitkit.data import Source
from vitkit.errors import ConfigError
from vitkit.prediction import open_model, stream
from vitkit.prediction.opened import Loadable
from vitkit.progress import SILENT, Progress

_ROUNDS = 20
_NEIGHBOURS = 20
_POOL = 5  # times as many uncertain images as are wanted are looked at


def margins(model: Loadable, source: Source, device: str | None = None, progress: Progress = SILENT) -> np.ndarray:
    """(N,) the probability of the likeliest class less that of the next, by a classifier; 0: it cannot decide."""
    opened = open_model(model, device=device, progress=progress, top=2)
    if opened.outputs.kind != "classes" or opened.config.classes < 2:
        raise ConfigError(f"{model} is no classifier of two classes or more; leave --model out for typical images")
    found = np.ones(len(source), dtype=np.float32)  # what cannot be read is not suggested first
    for n, row in enumerate(stream(opened, source)):
        if row["error"] is None:
            found[n] = float(str(row["probability"])) - float(str(row["probability_2"]))
        progress.update("asking the model", n + 1, len(source))
    return found


def suggest_uncertain(features: np.ndarray, margin: np.ndarray, count: int, progress: Progress = SILENT) -> np.ndarray:
    """Rows to label first: of the images with the smallest margin, one of each cluster; the least sure first."""
    _check(count, len(features))
    pool = np.argsort(margin, kind="stable")[: max(count, min(len(features), _POOL * count))]
    cluster = k_means(np.asarray(features[np.sort(pool)]), count, progress)
    rows = np.sort(pool)
    first = [int(mine[margin[mine].argmin()]) for c in range(count) if len(mine := rows[cluster == c])]
    rest = [int(row) for row in pool if row not in set(first)]  # of clusters that are empty
    chosen = np.array([*first, *rest[: count - len(first)]], dtype=np.int64)
    return chosen[np.argsort(margin[chosen], kind="stable")]


def _check(count: int, images: int) -> None:
    if not 1 <= count <= images:
        raise ConfigError(f"--count {count} must be from 1 to the {images:,} images there are")


def suggest(features: np.ndarray, count: int, progress: Progress = SILENT, seed: int = 0) -> np.ndarray:
    """Rows to label first, the largest cluster first."""
    _check(count, len(features))
    cluster = k_means(features, count, progress, seed)
    _, scores = nearest(features, np.asarray(features), min(_NEIGHBOURS + 1, len(features)))
    typical = scores[:, 1:].mean(axis=1) if scores.shape[1] > 1 else np.zeros(len(features))
    sizes = np.bincount(cluster, minlength=count)
    chosen = [
        int(m[typical[m].argmax()]) for c in np.argsort(-sizes, kind="stable") if len(m := np.flatnonzero(cluster == c))
    ]
    rest = np.setdiff1d(np.argsort(-typical, kind="stable"), chosen, assume_unique=True)  # of clusters that are empty
    return np.array([*chosen, *rest[: count - len(chosen)]], dtype=np.int64)


def k_means(features: np.ndarray, count: int, progress: Progress = SILENT, seed: int = 0) -> np.ndarray:
    """The cluster of every row, by direction; the first centres are far from each other (k-centre)."""
    first = int(np.random.default_rng(seed).integers(len(features)))
    chosen, best = [first], np.asarray(features @ features[first])
    while len(chosen) < count:
        chosen.append(int(best.argmin()))
        best = np.maximum(best, features @ features[chosen[-1]])
        progress.update("choosing centres", len(chosen), count)
    centres, cluster = np.array(features[chosen]), np.zeros(len(features), dtype=np.int64)
    for _ in range(_ROUNDS):
        before, cluster = cluster, nearest(centres, np.asarray(features), 1, "exact")[0][:, 0]
        if (before == cluster).all():
            break
        for c in np.unique(cluster).tolist():
            mean = features[cluster == c].mean(axis=0)
            centres[c] = mean / max(float(np.linalg.norm(mean)), 1e-12)
    return cluster
