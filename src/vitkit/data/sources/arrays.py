"""`.npz` arrays: images that are numbers already, held in memory as uint8.

Layouts that are recognised, by the names of the arrays: `images` and `labels` (or `x` and `y`);
`x_train y_train x_test y_test` (Keras); `train_images train_labels val_images ...` (MedMNIST).
An optional `classes` names the classes. Images are N H W, N H W C or N C H W with any number of
channels; labels are class numbers, or a matrix of zeros and ones for several labels per image.

Values are 0..255, 0..1 (fractions) or 0..65535, whatever their type: the highest value of the whole set says which.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from vitkit.data.dataset import Dataset, Options, split_name
from vitkit.data.decode import to_8_bits, white_of
from vitkit.data.labels import UNLABELLED
from vitkit.data.source import Names, Source
from vitkit.errors import DataError, as_text, in_words
from vitkit.progress import Progress
from vitkit.storage import is_url, local, suffix

Part = tuple[np.ndarray, np.ndarray]  # images (N, C, H, W) and labels

_PAIRS = {"images": "labels", "x": "y", "data": "target"}
_X = "|".join(_PAIRS)
_INFLATION, _HARMLESS = 64, 1 << 30  # times its own size that a file may grow, where that is more bytes than these
_AT_ONCE = 256  # images that are converted at once


def matches(data: str) -> bool:
    return suffix(data) == ".npz" and (is_url(data) or Path(data).is_file())


def open(data: str, options: Options, progress: Progress) -> Dataset:
    options.allow(data)
    path = local(data)
    with in_words(f"{path} cannot be read as .npz", "write it with numpy.savez"):
        with zipfile.ZipFile(path) as archive:
            _check_size(path, archive)
        with np.load(path, allow_pickle=False) as file:
            found = _find_parts(path, file.files, options.labelled)
            wanted = {key for keys in found.values() for key in keys if key} | ({"classes"} & set(file.files))
            arrays = {key: np.asarray(file[key]) for key in wanted}
    raw = {word: _part(path, arrays, *keys) for word, keys in found.items()}
    notes: list[str] = []
    of_kind: dict[np.dtype, list[np.ndarray]] = {}
    for images, _ in raw.values():
        of_kind.setdefault(images.dtype, []).append(images)
    white = {kind: _white(path, several, notes) for kind, several in of_kind.items()}
    parts = {word: (_to_bytes(images, white[images.dtype]), labels) for word, (images, labels) in raw.items()}
    classes = [as_text(c) for c in arrays["classes"].ravel()] if "classes" in arrays else None
    if not all(y for _, y in found.values()):
        classes = [*UNLABELLED]
    return from_arrays(data, parts, classes, notes=notes)


def _check_size(path: Path, archive: zipfile.ZipFile) -> None:
    """The directory of a .npz says how large it becomes; zipfile holds its members to that."""
    size, total = path.stat().st_size, sum(info.file_size for info in archive.infolist())
    if total > max(_HARMLESS, _INFLATION * size):
        grows = f"{path} has {size:,} bytes and would become {total:,}"
        raise DataError(f"{grows}, which no set of images does; if it is meant so, write it with numpy.savez")


def _white(path: Path, arrays: Sequence[np.ndarray], notes: list[str]) -> float:
    """The value that stands for white in all arrays of one type, told in `notes`."""
    kind = arrays[0].dtype
    if not (np.issubdtype(kind, np.integer) or np.issubdtype(kind, np.floating) or kind == np.bool_):
        raise DataError(f"{path}: images must be numbers, not {kind}; convert them to uint8")
    if kind in (np.uint8, np.bool_):
        return 255.0
    low, high = (float(end([end(a) for a in arrays])) for end in (np.min, np.max))
    white = white_of(kind, high)
    if not np.isfinite((low, high)).all():
        raise DataError(f"{path} holds values that are no finite numbers; replace them, for they would hide the others")
    if white is None or low < -0.5 * white / 255:
        raise DataError(f"{path} holds values from {low:g} to {high:g}; scale them to 0..255, 0..1 or 0..65535")
    notes.append(f"images are {kind} from {low:g} to {high:g}, taken as 0..{white:g}")
    return white


def _to_bytes(images: np.ndarray, white: float) -> np.ndarray:
    parts = [to_8_bits(images[i : i + _AT_ONCE], white) for i in range(0, len(images), _AT_ONCE)]
    return np.ascontiguousarray(images if images.dtype == np.uint8 else np.concatenate(parts))


def from_arrays(
    name: str,
    parts: Mapping[str, Part],
    classes: Sequence[str] | None = None,
    flip_safe: bool = True,
    notes: Sequence[str] = (),
) -> Dataset:
    """Arrays per split ("all": not split yet) -> a set; missing splits are taken out by content."""
    shapes = {x.shape[1:] for x, _ in parts.values()}
    if len(shapes) > 1:
        sizes = " and ".join("x".join(map(str, shape)) for shape in sorted(shapes))
        raise DataError(f"{name}: the images of its splits are of different sizes, {sizes}; make them the same")
    labels = [y for _, y in parts.values()]
    if not classes:
        low, high = min(int(y.min()) for y in labels), max(int(y.max()) for y in labels)
        if low < 0 or high > 100_000:
            raise DataError(f"{name}: labels go from {low} to {high}; number the classes 0, 1, 2, ...")
        classes = [str(i) for i in range(labels[0].shape[1] if labels[0].ndim == 2 else high + 1)]
    if any(y.shape[1] != len(classes) if y.ndim == 2 else y.max(initial=-1) >= len(classes) for y in labels):
        raise DataError(f"{name}: a label is beyond the {len(classes)} class names; give one name per class")
    samples = Source(
        pixels=torch.from_numpy(np.concatenate([x for x, _ in parts.values()])),
        name=name,
        classes=tuple(classes),
        labels=np.concatenate(labels),
        names=Names(f"{name}:{word}[{i}]" for word, (x, _) in parts.items() for i in range(len(x))),
        flip_safe=flip_safe,
    )
    splits = np.repeat([split_name(word) for word in parts], [len(x) for x, _ in parts.values()])
    return Dataset(samples, splits, notes=notes)


def _find_parts(path: Path, arrays: Sequence[str], labelled: bool) -> dict[str, tuple[str, str]]:
    """The names of images and labels, by the word that says their split; without labels "" may stand for theirs."""
    found: dict[str, tuple[str, str]] = {}
    for x, y in _PAIRS.items():
        for key in arrays:
            word = re.fullmatch(rf"({x}_)?(\w+?)(_{x})?", key)
            if key == x and y in arrays:
                found.setdefault("all", (x, y))
            elif word and (word[1] or word[3]):
                other = f"{y}_{word[2]}" if word[1] else f"{word[2]}_{y}"
                if other in arrays:
                    found.setdefault(word[2], (key, other))
    if not found and not labelled:
        words = {key: re.fullmatch(rf"(?:({_X})_)?(\w+?)(?:_({_X}))?", key) for key in arrays if key not in _PAIRS}
        found = {word[2]: (key, "") for key, word in words.items() if word and (word[1] or word[3])}
        for key in set(arrays) & set(_PAIRS):
            found.setdefault("all", (key, ""))
    if found:
        return found
    have = ", ".join(arrays) or "nothing"
    raise DataError(f"{path} holds {have}; name its arrays images and labels, or x_train, y_train, x_test, y_test")


def channels_last(shape: Sequence[int]) -> bool:
    """Whether four axes are N H W C, not N C H W: a square is pixels; else the shorter of the outer two is channels."""
    _, first, middle, last = shape
    return first == middle if (first == middle) != (middle == last) else last < first


def _part(path: Path, arrays: Mapping[str, np.ndarray], x: str, y: str) -> Part:
    """Images N H W, N H W C or N C H W -> N C H W; and their labels."""
    images = arrays[x]
    labels = arrays[y] if y else np.zeros(len(images) if images.ndim else 0, np.int64)
    if labels.ndim == 2 and labels.shape[1] == 1:  # MedMNIST: a column
        labels = labels[:, 0]
    if not images.ndim or not labels.ndim or len(images) != len(labels):
        raise DataError(
            f"{path}: {x} is {images.shape} and {y} is {labels.shape}; their first numbers must be the same"
        )
    if labels.ndim > 2 or not np.issubdtype(labels.dtype, np.integer):
        found = f"{labels.dtype} {labels.shape}"
        raise DataError(f"{path}: {y} must hold whole numbers of shape (N,) or (N, classes), not {found}")
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and channels_last(images.shape):
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or 0 in images.shape:
        raise DataError(f"{path}: {x} must be N H W, N H W C or N C H W, not {images.shape}")
    if labels.ndim == 2 and not np.isin(labels, (0, 1)).all():
        raise DataError(f"{path}: {y} has a column per class and must hold zeros and ones alone")
    return images, labels.astype(np.uint8 if labels.ndim == 2 else np.int64)
