"""A folder of classes, `class/xxx.jpg`, alone or inside `train/`, `val/` and `test/`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vitkit.data.decode import SUFFIXES, sniff_channels
from vitkit.data.packed import Names
from vitkit.data.progress import Track, quiet
from vitkit.data.source import FileSource, choose_split, complete_splits, file_share
from vitkit.errors import DataError

_SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}


def open_folder(folder: Path, split: str, track: Track = quiet) -> FileSource:
    """Read the names of all files; the pictures themselves are read when they are asked for."""
    name = str(folder)
    found = {s: list(_samples(path)) for s, path in _split_folders(folder).items()}
    samples = [sample for part in found.values() for sample in part]
    if not samples:
        raise DataError(_nothing_found(folder))
    classes = sorted({label for label, _ in samples})
    number = {label: i for i, label in enumerate(classes)}
    ends = np.cumsum([len(part) for part in found.values()])
    parts = {s: np.arange(end - len(found[s]), end) for s, end in zip(found, ends, strict=True)}
    parts = complete_splits(parts, lambda rows: _shares(samples, rows, track))
    chosen = [samples[i] for s in choose_split(name, split, parts) for i in parts[s]]
    return FileSource(
        name=name,
        split=split,
        splits={s: len(rows) for s, rows in parts.items()},
        classes=classes,
        labels=np.array([number[label] for label, _ in chosen], dtype=np.int64),
        names=Names(path for _, path in chosen),
        channels=sniff_channels([path for _, path in chosen]),
    )


def empty_classes(folder: Path) -> list[str]:
    """Folders that look like classes but hold no picture."""
    return sorted(
        entry.name
        for parent in _split_folders(folder).values()
        for entry in _directories(parent)
        if next(_pictures(Path(entry.path), entry.name), None) is None
    )


def _split_folders(folder: Path) -> dict[str, Path]:
    """The folders of the splits, or {"all": folder} when there are none."""
    by_name = {entry.name.lower(): Path(entry.path) for entry in _directories(folder)}
    found = {s: by_name[n] for s, names in _SPLIT_FOLDERS.items() for n in reversed(names) if n in by_name}
    return found if "train" in found or len(found) > 1 else {"all": folder}


def _directories(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not e.name.startswith(".") and _is_dir(e)), key=lambda e: e.name)
    except OSError as e:
        raise DataError(f"the folder {folder} cannot be read: {e.strerror}; check its name and permissions") from e


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _samples(folder: Path) -> Iterator[tuple[str, str]]:
    """(class, path) of every picture, in an order that does not depend on the file system."""
    for entry in _directories(folder):
        yield from _pictures(Path(entry.path), entry.name)


def _pictures(folder: Path, label: str) -> Iterator[tuple[str, str]]:
    seen = {_identity(parent) for parent in folder.resolve().parents}
    for where, below, files in os.walk(folder, followlinks=True):
        if _identity(where) in seen:  # a link back up: do not go round
            below.clear()
            continue
        seen.add(_identity(where))
        below[:] = sorted(d for d in below if not d.startswith("."))
        for file in sorted(files):
            if os.path.splitext(file)[1].lower() in SUFFIXES and not file.startswith("."):
                yield label, os.path.join(where, file)


def _identity(folder: str | Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _shares(samples: list[tuple[str, str]], rows: np.ndarray, track: Track) -> np.ndarray:
    return np.array([file_share(samples[i][1]) for i in track(rows.tolist(), "splitting by content")])


def _nothing_found(folder: Path) -> str:
    loose = sum(1 for e in os.scandir(folder) if os.path.splitext(e.name)[1].lower() in SUFFIXES)
    if loose:
        return (
            f"{folder} holds {loose} pictures but no folders of classes; move each picture into a folder named "
            f"after its class, or list them in a .csv with the columns path,label"
        )
    return f"{folder} holds no pictures; vitkit reads class/xxx.jpg, or train/, val/ and test/ of those"
