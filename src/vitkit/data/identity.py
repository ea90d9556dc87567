"""What a data set consists of, in a few lines that differ once a file or a label is another."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping

import numpy as np

from vitkit.data.dataset import Dataset
from vitkit.data.source import PackedSource, Source
from vitkit.storage import stamp

_SHOWN = 5
_AT_ONCE, _WITH_PIXELS = 1 << 16, 64  # samples that are looked at together


def identity(data: Dataset) -> dict[str, str]:
    """What is looked at -> how it is: the classes, the images of each in each split, and the files that hold many."""
    samples, names = data.samples, data.classes or ("all",)
    found = {"classes": ", ".join(data.classes or data.targets)} | containers(samples)
    for split, rows in data.rows.items():
        for group, (count, digest) in _digests(samples, rows, samples.groups[rows]).items():
            found[f"{split}: {names[group]}"] = f"{count:,} images {digest}"
    return found


def containers(source: Source) -> dict[str, str]:
    files = source.files if isinstance(source, PackedSource) else ()
    return {f"file {os.fsencode(file).decode(errors='backslashreplace')}": stamp(file) for file in files}


def digest(source: Source) -> str:
    """Of all samples, as for each class in `identity`."""
    rows = np.arange(len(source))
    return "".join(found for _, found in _digests(source, rows, np.zeros_like(rows)).values())


def _digests(source: Source, rows: np.ndarray, groups: np.ndarray) -> dict[int, tuple[int, str]]:
    """For each group, the number of its samples and a digest of what they are, one after another in their order.

    A sample is its name, a zero byte and its label, then its pixels where they are in memory, or size and time of its
    file where it has one of its own. Rows in the order of their files are read once.
    """
    names, counts = np.unique(groups, return_counts=True)
    found = {group: hashlib.blake2b(digest_size=8) for group in names.tolist()}
    size = _AT_ONCE if source.pixels is None else _WITH_PIXELS
    for low in range(0, len(rows), size):
        here = groups[low : low + size]
        order = np.argsort(here, kind="stable")
        starts = np.flatnonzero(np.diff(here[order], prepend=-1))
        lines = list(_lines(source, rows[low : low + size]))
        for group, some in zip(here[order][starts].tolist(), np.split(order, starts[1:]), strict=True):
            found[group].update(b"".join([lines[i] for i in some.tolist()]))
    return {g: (count, found[g].hexdigest()) for g, count in zip(found, counts.tolist(), strict=True)}


def _lines(source: Source, rows: np.ndarray) -> Iterator[bytes]:
    labels = np.ascontiguousarray(source.labels[rows])
    width, content = labels[:1].nbytes, labels.tobytes()
    named = (path + b"\0" + content[i * width : i * width + width] for i, path in enumerate(source.paths(rows)))
    if source.pixels is not None:
        images = (source.pixels[row].contiguous().numpy().tobytes() for row in rows.tolist())
        return map(bytes.__add__, named, images)
    if isinstance(source, PackedSource):
        return named
    return (line + stamp(source.names[row]).encode() for line, row in zip(named, rows.tolist(), strict=True))


def key(source: Source, row: int) -> str:
    """Of one sample without its label; another one once its name, its file or its pixels are another."""
    found = hashlib.blake2b(os.fsencode(source.where(row)), digest_size=16)
    if source.pixels is not None:
        found.update(source.pixels[row].contiguous().numpy().data)
    else:
        file = source.file_of(row) if isinstance(source, PackedSource) else source.names[row]
        found.update(stamp(file).encode())
    return found.hexdigest()


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """In words, "" when there is none: "train: cat: 100 images before, 99 now; ..."."""
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    lines = []
    for key in changed[:_SHOWN]:
        old, new = before.get(key, "none"), now.get(key, "none")
        (old_count, *_), (new_count, *_) = old.split(" images"), new.split(" images")
        same = " images" in old and old_count == new_count
        lines.append(f"{key}: {old_count} images, but others" if same else f"{key}: {old} before, {new} now")
    return "; ".join([*lines, *([f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else [])])
