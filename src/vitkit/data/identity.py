"""What a data set consists of, in a few lines that differ once a file or a label is another."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping

import numpy as np

from vitkit.data.dataset import Dataset
from vitkit.data.source import PackedSource, Source
from vitkit.storage import stamp

_SHOWN = 5


def identity(data: Dataset) -> dict[str, str]:
    """What is looked at -> how it is: the classes, the images of each in each split, and the files that hold many."""
    samples, names = data.samples, data.classes or ("all",)
    found = {"classes": ", ".join(data.classes or data.targets)} | containers(samples)
    for split, rows in data.rows.items():
        groups = samples.groups[rows]
        for group in np.unique(groups).tolist():
            mine = rows[groups == group]
            found[f"{split}: {names[group]}"] = f"{len(mine):,} images {digest(samples, mine.tolist())}"
    return found


def containers(source: Source) -> dict[str, str]:
    files = source.files if isinstance(source, PackedSource) else ()
    return {f"file {os.fsencode(file).decode(errors='backslashreplace')}": stamp(file) for file in files}


def digest(source: Source, rows: Iterable[int]) -> str:
    """Of names, sizes, times and labels of the samples; of the pixels where they are in memory."""
    found = hashlib.blake2b(digest_size=8)
    for row in rows:
        found.update(os.fsencode(source.where(row)) + b"\0" + source.labels[row].tobytes())
        if source.pixels is not None:
            found.update(source.pixels[row].contiguous().numpy().data)
        elif not isinstance(source, PackedSource):
            found.update(stamp(source.names[row]).encode())
    return found.hexdigest()


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
