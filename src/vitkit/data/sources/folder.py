"""A folder of classes, `class/xxx.jpg`, alone or inside `train/`, `val/` and `test/`.

Classes may be nested: `Fruit/Apple/Golden/xxx.jpg` is of the class Golden when no image lies further up.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from vitkit.data.dataset import SPLITS, Dataset, Options, is_split, split_name
from vitkit.data.decode import SUFFIXES
from vitkit.data.labels import UNLABELLED
from vitkit.data.source import Names, Source
from vitkit.errors import DataError, as_text
from vitkit.progress import Progress
from vitkit.storage import RemoteFolder, join

Root = Path | RemoteFolder
Folder = tuple[str, ...]  # the names of the folders that an image lies in, from the folder of the split on
Found = list[tuple[str, Folder, str]]  # split, folder and path of every image


def matches(data: str) -> bool:
    return os.path.isdir(data)


def open(data: str, options: Options, progress: Progress) -> Dataset:
    """Read the names of all files; the images themselves are read when they are asked for."""
    options.allow(data, "classes_from")
    notes: list[str] = []
    lost: list[str] = []
    root = options.remote or Path(data)
    found, empty = _scan(root, lost)
    loose_in_splits = {folder[0] for _, folder, _ in found if is_split(folder[0])}
    if not options.labelled and (not found or lost or loose_in_splits):  # not every image is in the folder of a class
        return _open_flat(data, root, progress)
    if not found and (loose := _loose(root)):
        raise DataError(
            f"{data} holds {loose} images but no folders of classes; move each image into a folder named "
            f"after its class, or list them in a .csv with the columns path,label"
        )
    if not found:
        raise DataError(f"{data} holds no images; vitkit reads class/xxx.jpg, or train/, val/ and test/ of those")
    class_of = _classes({folder for _, folder, _ in found}, options.classes_from, notes)
    classes = tuple(sorted(set(class_of.values())))
    number = {name: i for i, name in enumerate(classes)}
    splits, folders, paths = zip(*found, strict=True)
    labels = np.array([number[class_of[folder]] for folder in folders], dtype=np.int64)
    samples = Source(name=data, classes=classes, labels=labels, names=Names(paths))
    return Dataset(samples, splits, progress, notes, empty, lost)


def _open_flat(data: str, root: Root, progress: Progress) -> Dataset:
    """Every image below a folder, without labels; only the folders of splits have a meaning."""
    found = [path for _, path in _images(root)]
    if not found:
        raise DataError(f"{data} holds no images; vitkit reads {' '.join(sorted(SUFFIXES))}. Choose another folder")
    tops = [Path(path[len(str(root)) :].lstrip("/\\")).parts for path in found]
    splits = [split_name(parts[0]) if len(parts) > 1 and is_split(parts[0]) else "" for parts in tops]
    splits = splits if "train" in splits else [""] * len(splits)
    samples = Source(name=data, classes=UNLABELLED, labels=np.zeros(len(found), np.int64), names=Names(found))
    return Dataset(samples, splits, progress)


def _scan(folder: Root, lost: list[str]) -> tuple[Found, list[str]]:
    """Every image in a folder of classes, in an order that does not depend on the file system; and empty classes."""
    found: Found = []
    empty: list[str] = []
    for split, root in _split_folders(folder):
        tops = _directories(root)
        images = [(split, inside, path) for top in tops for inside, path in _images(top)]
        loose = _loose(root)
        if loose and (images or split):
            lost.append(f"{loose} images in {root} lie in no folder of a class and are left out")
        filled = {inside[0] for _, inside, _ in images}
        # a folder beside train/ is a split of its own if it holds classes that train/ has too
        if split in ("", *SPLITS) or filled & {inside[0] for _, inside, _ in found}:
            empty += [top.name for top in tops if top.name not in filled]
            found += images
        elif images:
            lost.append(f"{root} is no split: its {len(images)} images are of other classes and are left out")
    return found, sorted(empty)


def _split_folders(folder: Root) -> Sequence[tuple[str, Root]]:
    """The folders of the splits, known ones first; [("", folder)] when there are none."""
    below = _directories(folder)
    known = {split_name(d.name) for d in below if is_split(d.name) and _directories(d)}
    if "train" not in known and len(known) < 2:
        return [("", folder)]
    named = [(split_name(d.name), d) for d in below]
    return sorted(named, key=lambda s: (*SPLITS, s[0]).index(s[0]))


def _directories(folder: Root) -> Sequence[Root]:
    if isinstance(folder, RemoteFolder):
        return [below for name, below in sorted(folder.folders.items()) if not name.startswith(".")]
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(e.path) for e in entries if not e.name.startswith(".") and _is_folder(e))
    except OSError as e:
        raise DataError(f"the folder {folder} cannot be read: {e.strerror}; check its name and permissions") from e


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Also of a link that leads to itself, for which `entry.is_dir()` raises."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _images(top: Root) -> Iterator[tuple[Folder, str]]:
    """The images in a folder of a class and in those inside it."""
    if isinstance(top, RemoteFolder):
        for folder in top.walk():
            inside = (top.name, *filter(None, folder.url.removeprefix(top.url).split("/")))
            yield from ((inside, join(folder.url, file)) for file in sorted(folder.files) if _is_image(file))
        return
    seen = set(map(str, top.resolve().parents))
    for where, below, files in os.walk(top, followlinks=True):
        real = os.path.realpath(where)
        if real in seen:  # a link back up: do not go round
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(d for d in below if not d.startswith("."))
        inside = (top.name, *Path(where).relative_to(top).parts)
        for file in sorted(files):
            if _is_image(file):
                yield inside, os.path.join(where, file)


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")


def _loose(folder: Root) -> int:
    if isinstance(folder, RemoteFolder):
        return sum(map(_is_image, folder.files))
    return sum(_is_image(entry.name) and not _is_folder(entry) for entry in os.scandir(folder))


def _classes(folders: set[Folder], wanted: str, notes: list[str]) -> dict[Folder, str]:
    deepest, tops = max(map(len, folders)), len({folder[0] for folder in folders})
    inside = {folder[:depth] for folder in folders for depth in range(1, len(folder))}
    # auto: images lie in innermost folders only, and a top folder holds more than one of those
    leaves_only = len(folders) > tops and not inside & folders and min(map(len, folders)) > 1
    by_leaf = wanted == "leaf" or (wanted == "auto" and leaves_only)
    level = deepest if by_leaf else 1 if wanted in ("auto", "top") else int(wanted)
    shallow = min(folders, key=len)
    if not by_leaf and len(shallow) < level:
        raise DataError(f"classes_from={level}, but images lie in {'/'.join(shallow)} already; choose a lower level")
    names = _shortest({folder[:level] for folder in folders})
    if deepest > 1 and wanted == "auto":
        understood = f"{len(names)} innermost" if by_leaf else f"{tops} outermost"
        notes.append(
            f"folders of classes are nested; the {understood} folders are taken as classes, such as "
            f"{min(names.values())!r} (--classes-from {'top' if by_leaf else 'leaf'} takes the others)"
        )
    return {folder: as_text(names[folder[:level]]) for folder in folders}


def _shortest(folders: Iterable[Folder]) -> dict[Folder, str]:
    """Every folder by the end of its path that no other has: Golden, or Apple/Golden beside Pear/Golden."""
    names: dict[Folder, str] = {}
    waiting, length = sorted(folders), 1
    while waiting:
        ends = Counter(folder[-length:] for folder in waiting)
        done = [folder for folder in waiting if ends[folder[-length:]] == 1 or length >= len(folder)]
        names |= {folder: "/".join(folder[-length:]) for folder in done}
        waiting, length = [folder for folder in waiting if folder not in names], length + 1
    return names
