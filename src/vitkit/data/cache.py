"""`--cache`: pictures decoded and resized once, kept as one memory map of uint8.

For evaluation the cache holds the exact input of the model. For random crops it holds the whole picture
with its shorter side at 8/7 of the input (256 for 224), so that a crop is as sharp as it needs to be.
It is built in a folder of its own that gets its name only when all is written: a kill while it is built
leaves nothing that could be mistaken for a cache. Ranks that want the same cache wait for the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitkit.data.augment import Augment, crop_kind
from vitkit.data.decode import BadPicture, Needed
from vitkit.data.fetch import cache_folder
from vitkit.data.parallel import in_order
from vitkit.data.preprocess import RESAMPLING, prepare
from vitkit.data.progress import Track, quiet
from vitkit.data.source import Source
from vitkit.model.config import Preprocessing

_VERSION = 1
_MARGIN = 8 / 7
_LONGEST = 3.0  # a panorama is kept at most this many times as long as high


class CachedSource(Source):
    """The samples of another source with their pictures from a finished cache."""

    def __init__(self, source: Source, folder: Path, channels: int, prepared: bool) -> None:
        super().__init__(
            source.name, source.split, source.splits, source.classes, source.labels, source.names, channels
        )
        self.folder, self.prepared, self.mirrors = folder, prepared, source.mirrors
        index = np.load(folder / "index.npy")
        self._offsets, self._sizes = index[:, 0], index[:, 1:]  # sizes: (height, width), 0 for a bad file
        self._reasons: dict[str, str] = json.loads((folder / "bad.json").read_text())
        self._map: np.ndarray | None = None

    def picture(self, index: int, channels: int, needed: Needed | None = None) -> Image.Image:
        return Image.fromarray(self.view(index))

    def view(self, index: int) -> np.ndarray:
        height, width = (int(n) for n in self._sizes[index])
        if not height:
            raise BadPicture(self._reasons[str(index)])
        if self._map is None:
            mapped = np.memmap(self.folder / "pixels.bin", dtype=np.uint8, mode="c")
            self._map = np.asarray(mapped)  # the same memory without memmap's slow slicing
        start = int(self._offsets[index])
        pixels = self._map[start : start + height * width * self.channels]
        shape = (height, width) if self.channels == 1 else (height, width, self.channels)
        return pixels.reshape(shape)

    def __getstate__(self) -> dict[str, Any]:  # every process opens the map itself
        return {**self.__dict__, "_map": None}


def cached(
    source: Source,
    pre: Preprocessing,
    augment: Augment | None = None,
    channels: int | None = None,
    workers: int = 0,
    folder: Path | None = None,
    track: Track = quiet,
) -> Source:
    """The same source with its pictures from a cache, which is built first if need be.

    Sets in memory are returned as they are. Unreadable files stay unreadable, with their reasons.
    """
    if source.pixels is not None:
        return source
    channels = channels or source.channels
    prepared = augment is None or crop_kind(augment, pre.size) != "resized"
    recipe = _Recipe(pre, channels, prepared)
    place = (folder or cache_folder() / "pictures") / _fingerprint(source, recipe)
    if not (place / "index.npy").exists():
        with _lock(place):
            if not (place / "index.npy").exists():
                _build(source, recipe, place, workers, track)
    return CachedSource(source, place, channels, prepared)


class _Recipe:
    """What is done to a picture before it is kept."""

    def __init__(self, pre: Preprocessing, channels: int, prepared: bool) -> None:
        self.pre, self.channels, self.prepared = pre, channels, prepared

    def __str__(self) -> str:
        kept = "prepared" if self.prepared else f"whole {_MARGIN} {_LONGEST}"
        return (
            f"{_VERSION} {kept} {self.channels} {self.pre.size} {self.pre.crop} {self.pre.fit} {self.pre.interpolation}"
        )

    def apply(self, source: Source, index: int) -> np.ndarray:
        if self.prepared:
            return np.asarray(prepare(source.picture(index, self.channels), self.pre))
        shorter = round(max(self.pre.size) * _MARGIN)
        picture = source.picture(index, self.channels, lambda w, h: _kept_size(w, h, 2 * shorter))
        size = _kept_size(*picture.size, shorter)
        return np.asarray(picture if size == picture.size else picture.resize(size, RESAMPLING[self.pre.interpolation]))


def _kept_size(width: int, height: int, shorter: int) -> tuple[int, int]:
    """The picture's size with its shorter side at `shorter`; small pictures are not enlarged."""
    scale = min(1.0, shorter / min(width, height))
    longest = round(_LONGEST * shorter)
    return max(1, min(longest, round(width * scale))), max(1, min(longest, round(height * scale)))


def _fingerprint(source: Source, recipe: _Recipe) -> str:
    """Changes when a file is added, removed or written to, or when other pixels are wanted."""
    digest = hashlib.blake2b(str(recipe).encode(), digest_size=16)
    digest.update(type(source).__name__.encode() + source.name.encode(errors="surrogateescape"))
    for name in source.names:
        digest.update(b"\0" + os.fsencode(name))
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(name)
            digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    with contextlib.suppress(OSError):  # Parquet and shards: the file that holds them all
        status = os.stat(source.name)
        digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _lock(place: Path) -> Iterator[None]:
    """One process builds; the others wait. The system lets go of the lock when a process is killed."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as file:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(source: Source, recipe: _Recipe, place: Path, workers: int, track: Track) -> None:
    building = place.with_suffix(".building")
    shutil.rmtree(building, ignore_errors=True)  # what a killed build left behind: the lock is ours
    building.mkdir()
    index, reasons, end = np.zeros((len(source), 3), dtype=np.int64), {}, 0
    with open(building / "pixels.bin", "wb") as file:
        results = in_order(_Decode(source, recipe), len(source), workers, "building the cache", track)
        for i, result in enumerate(results):
            if isinstance(result, str):
                reasons[str(i)] = result
                continue
            index[i] = end, *result.shape[:2]
            file.write(result.tobytes())
            end += result.nbytes
        if not end:
            file.write(b"\0")  # an empty file cannot be mapped
        file.flush()
        os.fsync(file.fileno())
    (building / "bad.json").write_text(json.dumps(reasons))
    np.save(building / "index.npy", index)
    shutil.rmtree(place, ignore_errors=True)
    os.replace(building, place)


class _Decode:
    """The kept pixels of a sample, or the reason why there are none."""

    def __init__(self, source: Source, recipe: _Recipe) -> None:
        self.source, self.recipe = source, recipe

    def __call__(self, index: int) -> np.ndarray | str:
        try:
            return self.recipe.apply(self.source, index)
        except BadPicture as e:
            return e.reason
