"""Nearest rows of a matrix, exactly: blocked products, so that memory does not grow with the number of rows.

Shapes: N rows of the index, M queries, D width, K neighbours.
"""

from __future__ import annotations

import numpy as np

from vitkit.errors import ConfigError, DataError, MissingPackage
from vitkit.progress import SILENT, Progress

_ROWS, _QUERIES = 1 << 15, 256  # per block: 32 MB of scores
FAISS_FROM = 1_000_000  # rows from which faiss is used where it is installed
ENGINES = ("auto", "exact", "faiss")

Found = tuple[np.ndarray, np.ndarray]  # rows and scores, both M x K, best first


def nearest(
    base: np.ndarray, queries: np.ndarray, top: int, engine: str = "auto", progress: Progress = SILENT
) -> Found:
    """The rows of `base` with the highest dot product with each query; of equal ones the first."""
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine} must be one of {', '.join(ENGINES)}")
    top = max(1, min(top, len(base)))
    if engine == "faiss" or (engine == "auto" and len(base) > FAISS_FROM and _faiss(optional=True)):
        return _by_faiss(base, queries, top)
    parts = []
    for low in range(0, len(queries), _QUERIES):
        parts.append(_nearest(base, queries[low : low + _QUERIES], top))
        progress.update("finding neighbours", low + len(parts[-1][0]), len(queries))
    rows, scores = zip(*parts, strict=True) if parts else ([np.zeros((0, top), np.int64)], [np.zeros((0, top))])
    return np.concatenate(rows), np.concatenate(scores).astype(np.float32)


def nearest_others(base: np.ndarray, top: int, progress: Progress = SILENT) -> Found:
    """Of each row the nearest rows but itself, exactly."""
    if len(base) < 2:
        raise DataError("neighbours need at least two images; index a larger set")
    found = nearest(base, base, top + 1, "exact", progress)
    others = found[0] != np.arange(len(base))[:, None]
    others[others.all(axis=1), -1] = False  # so many are equal to it that it is not among them
    rows, scores = (x[others].reshape(len(base), -1) for x in found)
    return rows, scores


def _nearest(base: np.ndarray, queries: np.ndarray, top: int) -> Found:
    rows, scores = np.zeros((len(queries), 0), np.int64), np.zeros((len(queries), 0), np.float32)
    for low in range(0, len(base), _ROWS):
        block = queries @ np.asarray(base[low : low + _ROWS]).T  # M n
        few = min(top, block.shape[1])
        every = np.broadcast_to(np.arange(block.shape[1]), block.shape)
        best = np.argpartition(-block, few - 1, axis=1)[:, :few] if few < block.shape[1] else every
        rows = np.concatenate([rows, best + low], axis=1)
        scores = np.concatenate([scores, np.take_along_axis(block, best, axis=1)], axis=1)
        order = np.lexsort((rows, -scores), axis=1)[:, :top]
        rows, scores = np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1)
    return rows, scores


def _faiss(optional: bool = False) -> bool:
    try:
        import faiss  # noqa: F401
    except ImportError:
        if optional:
            return False
        raise MissingPackage("faiss-cpu", "--engine faiss", "search") from None
    return True


def _by_faiss(base: np.ndarray, queries: np.ndarray, top: int) -> Found:
    """Flat inner products: exact up to rounding."""
    _faiss()
    import faiss

    flat = faiss.IndexFlatIP(base.shape[1])
    for low in range(0, len(base), _ROWS):
        flat.add(np.ascontiguousarray(base[low : low + _ROWS], dtype=np.float32))
    scores, rows = flat.search(np.ascontiguousarray(queries, dtype=np.float32), top)
    return rows.astype(np.int64), scores
