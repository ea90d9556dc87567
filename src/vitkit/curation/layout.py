"""Features -> a place on a map for every image, so that alike images lie together.

`umap` is the package umap-learn (an extra); `tsne` is our own: t-SNE (van der Maaten and Hinton 2008) on the graph of
the nearest neighbours, all with the same weight, which makes nearly the same map as a search for a perplexity. It
starts from the first two principal components. Repulsion is the slope of the potential sum_j 1 / (1 + |y_i - y_j|^2),
which is a convolution: points are laid on a mesh, the mesh goes through an FFT (as in FIt-SNE, Linderman et al. 2019).
So a step costs time in proportion to the points, and memory for the mesh.

Shapes: N images, D features, K neighbours, E edges, G cells along a side of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec

import numpy as np

from vitkit.curation.search import nearest, nearest_others
from vitkit.errors import ConfigError, MissingPackage
from vitkit.progress import SILENT, Progress

NEIGHBOURS = 15
LANDMARKS = 50_000  # more images than this: so many are laid out, the others lie among their nearest ones
EXAGGERATED, STEPS = 250, 500  # steps with stronger attraction, and after them
EXAGGERATION = 12.0
_CELL = 0.35  # of the mesh, where the kernel is 1 wide
_FEW = 300  # so many points are quicker, and exact, pair by pair
_SIDES = (64, 128, 256, 512)  # cells along a side


def layout(
    features: np.ndarray, neighbours: np.ndarray, method: str = "auto", seed: int = 0, progress: Progress = SILENT
) -> np.ndarray:
    """N D features and their N K neighbours -> N 2 positions in 0..1, the same for the same seed."""
    if method not in ("auto", *METHODS):
        raise ConfigError(f"method={method!r} is none of auto, {', '.join(METHODS)}; choose one of them")
    make = METHODS[chosen_method(method)]
    if len(features) <= LANDMARKS:
        return _into_unit(make(features, neighbours, seed, progress))
    marks = np.sort(np.random.default_rng(seed).permutation(len(features))[:LANDMARKS])
    some = np.ascontiguousarray(features[marks])
    placed = make(some, nearest_others(some, neighbours.shape[1], progress)[0], seed, progress)
    found, alike = nearest(some, features, 5, "exact", progress)
    weights = np.maximum(alike, 1e-6) ** 8  # the nearest count most
    return _into_unit((placed[found] * weights[..., None]).sum(axis=1) / weights.sum(axis=1, keepdims=True))


def chosen_method(method: str) -> str:
    return method if method != "auto" else "umap" if find_spec("umap") else "tsne"


def _into_unit(places: np.ndarray) -> np.ndarray:
    """Into 0..1 with the same scale both ways, the middle at 0.5."""
    low, high = places.min(axis=0), places.max(axis=0)
    return ((places - (low + high) / 2) / max(float((high - low).max()), 1e-12) + 0.5).astype(np.float32)


# --- the methods ---------------------------------------------------------------------------------------


def umap(features: np.ndarray, neighbours: np.ndarray, seed: int, progress: Progress) -> np.ndarray:
    try:
        from umap import UMAP
    except ImportError:
        raise MissingPackage("umap-learn", "method umap", "map") from None
    progress.note("laying out by umap-learn")
    made = UMAP(n_neighbors=min(NEIGHBOURS, len(features) - 1), metric="cosine", random_state=seed, n_jobs=1)
    return np.asarray(made.fit_transform(np.asarray(features)), dtype=np.float64)


def tsne(features: np.ndarray, neighbours: np.ndarray, seed: int, progress: Progress) -> np.ndarray:
    count = len(features)
    edges = _edges(neighbours)
    places = principal(features) * 1e-4 + np.random.default_rng(seed).normal(0, 1e-6, (count, 2))
    moved, gains = np.zeros_like(places), np.ones_like(places)
    rate = max(count / EXAGGERATION / 4, 50.0)  # as scikit-learn and openTSNE choose it
    for step in range(EXAGGERATED + STEPS):
        early = step < EXAGGERATED
        apart = _repulsion_of_pairs(places) if count <= _FEW else _repulsion(places)
        slope = 4 * (_attraction(places, *edges) * (EXAGGERATION if early else 1.0) + apart)
        gains = np.maximum(np.where(slope * moved < 0, gains + 0.2, gains * 0.8), 0.01)
        moved = (0.5 if early else 0.8) * moved - rate * gains * slope
        places = places + moved
        places -= places.mean(axis=0)
        progress.update("laying out", step + 1, EXAGGERATED + STEPS)
    return places


METHODS: dict[str, Callable[[np.ndarray, np.ndarray, int, Progress], np.ndarray]] = {"umap": umap, "tsne": tsne}


def principal(features: np.ndarray) -> np.ndarray:
    """N 2: the first two principal components, of standard deviation 1, each with a sign that is always the same."""
    mean = features.mean(axis=0, dtype=np.float64)
    spread = np.zeros((features.shape[1], features.shape[1]))
    for start in range(0, len(features), 8192):
        block = features[start : start + 8192] - mean
        spread += block.T @ block
    axes = np.linalg.eigh(spread)[1][:, ::-1][:, :2]  # D 2
    axes = np.pad(axes, ((0, 0), (0, 2 - axes.shape[1])))
    axes = axes * np.where(axes[np.abs(axes).argmax(axis=0), [0, 1]] < 0, -1, 1)
    found = features @ axes - mean @ axes
    return np.asarray(found / np.maximum(found.std(axis=0), 1e-12))


def _edges(neighbours: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The symmetric graph: from, to, weight (all weights sum to 1), and where the edges of each image begin."""
    count, each = neighbours.shape
    one, other = np.repeat(np.arange(count), each), neighbours.astype(np.int64).ravel()
    keys, times = np.unique(np.concatenate([one * count + other, other * count + one]), return_counts=True)
    start = np.searchsorted(keys, np.arange(count) * count)
    return keys // count, keys % count, times / (2.0 * each * count), start


def _attraction(
    places: np.ndarray, one: np.ndarray, other: np.ndarray, weight: np.ndarray, start: np.ndarray
) -> np.ndarray:
    away = places[one] - places[other]  # E 2
    away *= (weight / (1 + np.einsum("ij,ij->i", away, away)))[:, None]
    return np.add.reduceat(away, start, axis=0)


def _repulsion_of_pairs(places: np.ndarray) -> np.ndarray:
    away = places[:, None] - places[None]  # N N 2
    q = 1 / (1 + np.einsum("ijk,ijk->ij", away, away))
    return -np.einsum("ij,ijk->ik", q * q, away) / max(float(q.sum()) - len(places), 1e-12)


def _repulsion(places: np.ndarray) -> np.ndarray:
    """-sum_j q_ij^2 (y_i - y_j) / sum q, by the mesh: half the slope of the potential over its sum."""
    low, wide = places.min(axis=0), max(float(np.ptp(places, axis=0).max()), 1e-9)
    side = next((s for s in _SIDES if (s - 4) * _CELL >= wide), _SIDES[-1])
    cell = 2.0 ** np.ceil(np.log2(max(wide / (side - 4), 1e-12) / _CELL)) * _CELL  # few values: kernels are kept
    at = (places - low) / cell + 1.5
    corner = np.floor(at).astype(np.int64)
    part = at - corner
    shares = [(dx, dy, np.abs(1 - dx - part[:, 0]) * np.abs(1 - dy - part[:, 1])) for dx in (0, 1) for dy in (0, 1)]
    flat = [(corner[:, 0] + dx) * side + corner[:, 1] + dy for dx, dy, _ in shares]
    mass = np.bincount(np.concatenate(flat), np.concatenate([s for _, _, s in shares]), minlength=side * side)
    field = np.fft.irfft2(np.fft.rfft2(mass.reshape(side, side), (2 * side, 2 * side)) * _kernel(side, cell))
    field = field[:side, :side]
    fields = (field, np.gradient(field, cell, axis=0), np.gradient(field, cell, axis=1))
    potential, across, down = (sum(f.ravel()[k] * s for k, (_, _, s) in zip(flat, shares, strict=True)) for f in fields)
    total = max(float((potential - _own([s for _, _, s in shares], cell)).sum()), 1e-12)
    return np.stack([across, down], axis=1) * (0.5 / total)


def _own(shares: list[np.ndarray], cell: float) -> np.ndarray:
    """What every point adds to the potential at its own place, by way of the four corners it is laid on."""
    a, b, c, d = shares  # corners (0, 0), (0, 1), (1, 0), (1, 1)
    beside, across = 1 / (1 + cell**2), 1 / (1 + 2 * cell**2)
    same = a * a + b * b + c * c + d * d
    return np.asarray(same + 2 * beside * (a * b + a * c + b * d + c * d) + 2 * across * (a * d + b * c))


@lru_cache(4)
def _kernel(side: int, cell: float) -> np.ndarray:
    """1 / (1 + r^2) over twice the mesh, around its corner, transformed."""
    steps = np.minimum(np.arange(2 * side), 2 * side - np.arange(2 * side)) * cell
    return np.fft.rfft2(1 / (1 + steps[:, None] ** 2 + steps[None, :] ** 2))
