"""What to label next: typical and diverse images first (TypiClust, Hacohen et al. 2022).

As many clusters as images are wanted; of each, the image whose neighbours are nearest.
"""

from __future__ import annotations

import numpy as np

from vitkit.curation.search import nearest
from vitkit.errors import ConfigError
from vitkit.progress import SILENT, Progress

_ROUNDS = 20
_NEIGHBOURS = 20


def suggest(features: np.ndarray, count: int, progress: Progress = SILENT, seed: int = 0) -> np.ndarray:
    """Rows to label first, the largest cluster first."""
    if not 1 <= count <= len(features):
        raise ConfigError(f"--count {count} must be from 1 to the {len(features):,} images there are")
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
