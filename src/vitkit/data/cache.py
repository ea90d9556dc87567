"""`--cache`: images decoded and resized once, kept as one file of uint8.

For evaluation it holds the exact input of the model; for random crops the whole image with its shorter side at 8/7
of the input (256 for 224), so that a crop is sharp enough. Its folder gets its name only when all is written: a kill
leaves nothing that could be mistaken for a cache. Ranks that want the same cache wait for the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image
from torch import Tensor

from vitkit.data.augment import Augment, crop_kind
from vitkit.data.decode import BadImage, Needed
from vitkit.data.loader import in_order
from vitkit.data.preprocess import RESAMPLING, prepare, to_tensor
from vitkit.data.source import PackedSource, Source
from vitkit.errors import DataError
from vitkit.io import cache_folder, locked, read_into, read_json, replacing_folder, sha256, write_npy
from vitkit.model.config import Preprocessing
from vitkit.storage import is_url, stamp

_VERSION = 2
_MARGIN = 8 / 7
_LONGEST = 3.0  # a panorama is kept at most this many times as long as high


class CachedSource(Source):
    """The samples of another source with their images from a finished cache."""

    def __init__(self, source: Source, folder: Path, channels: int, prepared: bool) -> None:
        like = {field.name: getattr(source, field.name) for field in fields(Source)}
        super().__init__(**{**like, "channels": channels, "blocks": None})
        self.folder, self.prepared = folder, prepared  # True: images come out resized and cut already
        index = np.load(folder / "index.npy")
        # sizes: (height, width), 0 for a bad file
        self._offsets, self._sizes, self._sums = index[:, 0], index[:, 1:3], index[:, 3]
        self._reasons: dict[str, str] = read_json(folder / "bad.json")
        self._file: BinaryIO | None = None

    def pixels_of(self, index: int, pre: Preprocessing, channels: int) -> Tensor:
        return to_tensor(self.view(index) if self.prepared else prepare(self.image(index, channels), pre))

    def image(self, index: int, channels: int | None = None, needed: Needed | None = None) -> Image.Image:
        return Image.fromarray(self.view(index))

    def view(self, index: int) -> np.ndarray:
        height, width = (int(n) for n in self._sizes[index])
        if not height:
            raise BadImage(self._reasons[str(index)])
        pixels = np.empty((height, width) if self.channels == 1 else (height, width, self.channels), dtype=np.uint8)
        try:
            if self._file is None:
                self._file = open(self.folder / "pixels.bin", "rb", buffering=0)  # noqa: SIM115  # for as long as we live
            read_into(self._file.fileno(), int(self._offsets[index]), pixels.reshape(-1).data)
            if zlib.crc32(pixels.data) != self._sums[index]:
                raise ValueError("other pixels")
        except (OSError, ValueError) as e:
            what = f"the cache {self.folder} is damaged ({e})"
            raise DataError(f"{what}; remove this folder, and it is built again") from e
        return pixels

    def __getstate__(self) -> dict[str, object]:  # every process opens the file itself
        return {**self.__dict__, "_file": None}


def cached(
    source: Source,
    pre: Preprocessing,
    augment: Augment | None = None,
    channels: int | None = None,
    workers: int = 0,
    folder: Path | None = None,
) -> Source:
    """The same source with its images from a cache, built first if need be; sets in memory as they are."""
    if source.pixels is not None:
        return source
    keep = _Keep(source, pre, channels or source.channels, augment is None or crop_kind(augment, pre.size) != "resized")
    place = (folder or cache_folder() / "images") / keep.fingerprint()
    if not _is_whole(place):
        with locked(place.with_suffix(".lock")):  # one process builds; the others wait
            if not _is_whole(place):
                _build(keep, place, workers)
    return CachedSource(source, place, keep.channels, keep.prepared)


def _is_whole(place: Path) -> bool:
    """The index and the list of bad files are as they were written, and the pixels as long; each has its checksum."""
    try:
        index, bad, length = read_json(place / "whole.json")
        same = (index, bad) == (sha256(place / "index.npy"), sha256(place / "bad.json"))
        return same and (place / "pixels.bin").stat().st_size == length
    except (OSError, ValueError, TypeError):
        return False


@dataclass(frozen=True)
class _Keep:
    """keep(index) gives what is kept of a sample: its pixels, or the reason why there are none."""

    source: Source
    pre: Preprocessing
    channels: int
    prepared: bool

    def __call__(self, index: int) -> np.ndarray | str:
        try:
            if self.prepared:
                return np.asarray(prepare(self.source.image(index, self.channels), self.pre))
            shorter = round(max(self.pre.size) * _MARGIN)
            image = self.source.image(index, self.channels, lambda w, h: _kept_size(w, h, 2 * shorter))
        except BadImage as e:
            return e.reason
        size = _kept_size(*image.size, shorter)
        return np.asarray(image if size == image.size else image.resize(size, RESAMPLING[self.pre.interpolation]))

    def fingerprint(self) -> str:
        """Changes when a file is added, removed or written to, or when other pixels are wanted."""
        pre, kept = self.pre, "prepared" if self.prepared else f"whole {_MARGIN} {_LONGEST}"
        recipe = f"{_VERSION} {kept} {self.channels} {pre.size} {pre.crop} {pre.fit} {pre.interpolation}"
        digest = hashlib.blake2b(f"{recipe} {type(self.source).__name__}".encode(), digest_size=16)
        digest.update(os.fsencode(self.source.name))
        containers = self.source.files if isinstance(self.source, PackedSource) else ()
        for name in itertools.chain(self.source.names, containers):
            digest.update(b"\0" + os.fsencode(name) + _stamp(name))
        return digest.hexdigest()


def _stamp(path: str) -> bytes:
    """The size of a file and when it was written to, also by who set the time back; nothing where there is none."""
    if is_url(path):
        return stamp(path).encode()
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(path)
        return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}".encode()
    return b""


def _kept_size(width: int, height: int, shorter: int) -> tuple[int, int]:
    """The image's size with its shorter side at `shorter`; small images are not enlarged."""
    scale, longest = min(1.0, shorter / min(width, height)), round(_LONGEST * shorter)
    return max(1, min(longest, round(width * scale))), max(1, min(longest, round(height * scale)))


def _build(keep: _Keep, place: Path, workers: int) -> None:
    count = len(keep.source)
    index, reasons, end = np.zeros((count, 4), dtype=np.int64), {}, 0
    with replacing_folder(place) as building:
        with open(building / "pixels.bin", "wb") as file:
            for i, result in enumerate(in_order(keep, count, workers, "building the cache")):
                if isinstance(result, str):
                    reasons[str(i)] = result
                    continue
                index[i] = end, *result.shape[:2], zlib.crc32(content := result.tobytes())
                file.write(content)
                end += result.nbytes
            file.flush()
            os.fsync(file.fileno())
        (building / "bad.json").write_text(json.dumps(reasons))
        with open(building / "index.npy", "wb") as file:
            write_npy(file, index)
        sums = sha256(building / "index.npy"), sha256(building / "bad.json")
        (building / "whole.json").write_text(json.dumps((*sums, end)))
