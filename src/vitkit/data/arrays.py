"""`.npz` arrays: pictures that are numbers already, held in memory as uint8.

Layouts that are recognised, by the names of the arrays: `images` and `labels` (or `x` and `y`);
`x_train y_train x_test y_test` (Keras); `train_images train_labels val_images ...` (MedMNIST).
An optional `classes` names the classes. Pictures are N H W, N H W C or N C H W with any number of
channels; labels are class numbers, or a matrix of zeros and ones for several labels per picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vitkit.data.decode import to_8_bits
from vitkit.data.packed import Names
from vitkit.data.source import PixelSource, choose_split, complete_splits, content_share
from vitkit.errors import DataError

Part = tuple[np.ndarray, np.ndarray]  # pictures (N, C, H, W) and labels

_PAIRS = (("images", "labels"), ("x", "y"), ("data", "target"))


def open_npz(path: Path, split: str) -> PixelSource:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, KeyError) as e:
        raise DataError(f"{path} cannot be read as .npz: {e}; write it with numpy.savez") from e
    parts = {s: _part(path, arrays, *keys) for s, keys in _find_parts(path, arrays).items()}
    classes = [str(c) for c in arrays["classes"]] if "classes" in arrays else None
    return from_arrays(str(path), parts, split, classes)


def from_arrays(name: str, parts: Mapping[str, Part], split: str, classes: list[str] | None = None) -> PixelSource:
    """Arrays per split ("all": not split yet) -> a source; missing splits are carved out by content."""
    labels = [y for _, y in parts.values()]
    classes = classes or _class_names(name, labels)
    _check_labels(name, labels, len(classes))
    rows = _split_rows(parts)
    chosen = choose_split(name, split, rows)
    names = [f"{name}:{origin}[{i}]" for s in chosen for origin, i in _places(rows[s])]
    return PixelSource(
        pixels=np.concatenate([parts[rows[s][0]][0][rows[s][1]] for s in chosen]),
        name=name,
        split=split,
        splits={s: len(rows[s][1]) for s in ("train", "val", "test") if s in rows},
        classes=classes,
        labels=np.concatenate([parts[rows[s][0]][1][rows[s][1]] for s in chosen]),
        names=Names(names),
    )


def _split_rows(parts: Mapping[str, Part]) -> dict[str, tuple[str, np.ndarray]]:
    """split -> (the part it comes from, rows of that part)."""
    rows = {s: np.arange(len(x)) for s, (x, _) in parts.items()}
    origin = "all" if "all" in parts else "train"

    def shares_of(chosen: np.ndarray) -> np.ndarray:
        return np.array([content_share(x.tobytes()) for x in parts[origin][0][chosen]])

    complete = complete_splits(rows, shares_of)
    return {s: (s if s in parts and s != "train" else origin, r) for s, r in complete.items()}


def _places(rows: tuple[str, np.ndarray]) -> list[tuple[str, int]]:
    return [(rows[0], int(i)) for i in rows[1]]


def _find_parts(path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for split, words in {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}.items():
        for word in words:
            for x, y in _PAIRS:
                for pair in ((f"{x}_{word}", f"{y}_{word}"), (f"{word}_{x}", f"{word}_{y}")):
                    if pair[0] in arrays and pair[1] in arrays:
                        found.setdefault(split, pair)
    if found:
        return found
    for pair in _PAIRS:
        if pair[0] in arrays and pair[1] in arrays:
            return {"all": pair}
    have = ", ".join(arrays) or "nothing"
    raise DataError(f"{path} holds {have}; name its arrays images and labels, or x_train, y_train, x_test, y_test")


def _part(path: Path, arrays: Mapping[str, np.ndarray], x: str, y: str) -> Part:
    images, labels = arrays[x], arrays[y]
    if labels.ndim == 2 and labels.shape[1] == 1:  # MedMNIST: a column
        labels = labels[:, 0]
    if len(images) != len(labels):
        raise DataError(f"{path}: {x} has {len(images)} rows and {y} has {len(labels)}; they must be the same")
    if labels.ndim > 2 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"{path}: {y} must hold whole numbers of shape (N,) or (N, classes), not {labels.dtype} {labels.shape}"
        )
    labels = labels.astype(np.uint8 if labels.ndim == 2 else np.int64)
    return as_pixels(f"{path}: {x}", images), labels


def as_pixels(what: str, images: np.ndarray) -> np.ndarray:
    """N H W, N H W C or N C H W of any number type -> uint8 N C H W."""
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[-1] <= 4 < images.shape[1]:
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or 0 in images.shape:
        raise DataError(f"{what} must be N H W, N H W C or N C H W, not {images.shape}")
    return np.ascontiguousarray(to_8_bits(images))


def _class_names(name: str, labels: list[np.ndarray]) -> list[str]:
    if labels[0].ndim == 2:
        return [str(i) for i in range(labels[0].shape[1])]
    low, high = min(int(y.min()) for y in labels), max(int(y.max()) for y in labels)
    if low < 0 or high > 100_000:
        raise DataError(f"{name}: labels go from {low} to {high}; number the classes 0, 1, 2, ...")
    return [str(i) for i in range(high + 1)]


def _check_labels(name: str, labels: list[np.ndarray], classes: int) -> None:
    for y in labels:
        if (y.ndim == 2 and y.shape[1] != classes) or (y.ndim == 1 and len(y) and int(y.max()) >= classes):
            raise DataError(f"{name}: a label is beyond the {classes} class names; give one name per class")
