"""What every set of images looks like to the rest of vitkit.

A `Source` is one split of a set: numbered samples, each with an image, a label and a printable name.
Images are either encoded (`encoded(i)` gives the path of a file, or the bytes out of Parquet or a tar)
or already pixels in memory (`pixels`, one uint8 tensor N C H W).
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor

from vitkit.data.decode import BadImage, Needed, decode, header, to_channels
from vitkit.data.labels import UNLABELLED
from vitkit.data.preprocess import read_image, read_pixels
from vitkit.errors import DataError, did_you_mean
from vitkit.model.config import Preprocessing
from vitkit.progress import Progress
from vitkit.storage import file_size, open_regular

if TYPE_CHECKING:
    from typing_extensions import Self

Rows = TypeVar("Rows", np.ndarray, Tensor)
LabelKind = Literal["classes", "labels", "values"]
_AT_ONCE = 1 << 16  # names that are gathered at once


class Names:
    """A read-only sequence of strings (file names with any bytes in them included) in two arrays.

    Worker processes share memory until somebody writes to it, and in Python even reading a list of strings writes
    (reference counts). Ten million paths in two numpy arrays stay shared; of a list every worker would get a copy.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._ends = np.cumsum([len(e) for e in encoded], dtype=np.int64)
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    @classmethod
    def joined(cls, content: bytes | bytearray, ends: np.ndarray) -> Names:
        """Of names one after another, and where each ends."""
        names = cls()
        names._ends, names._bytes = ends, np.frombuffer(content, dtype=np.uint8)
        return names

    @property
    def ends(self) -> np.ndarray:
        return self._ends

    @property
    def content(self) -> bytes:
        return self._bytes.tobytes()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]  # counts from the end where it is negative
        start = int(self._ends[index - 1]) if index else 0
        return os.fsdecode(self._bytes[start : int(self._ends[index])].tobytes())

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def take(self, rows: np.ndarray) -> Names:
        lengths = np.diff(self._ends, prepend=0)
        taken, pieces = Names(), []
        taken._ends = np.cumsum(lengths[rows], dtype=np.int64)
        for some in np.split(rows, range(_AT_ONCE, len(rows), _AT_ONCE)):
            moved = self._ends[some] - np.cumsum(lengths[some])  # how far each name lies from its new place
            pieces.append(self._bytes[np.arange(lengths[some].sum()) + np.repeat(moved, lengths[some])])
        taken._bytes = np.concatenate(pieces)
        return taken


@dataclass(frozen=True)
class Runs:
    """Samples file by file: file k has `sizes[k]` of them, which are numbered from `starts[k]` on."""

    starts: np.ndarray
    sizes: np.ndarray
    sorted: np.ndarray | None  # the samples by file, where those of one do not have neighbouring numbers

    @classmethod
    def of(cls, files: np.ndarray) -> Runs:
        """`files`: the number of the file of every sample."""
        order, starts = None, _changes(files)
        if len(np.unique(files[starts])) < len(starts):
            order = np.argsort(files, kind="stable")
            starts = _changes(files[order])
        return cls(starts, np.diff(starts, append=len(files)), order)


def _changes(values: np.ndarray) -> np.ndarray:
    """Where a value differs from the one before it; 0 is such a place."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))


def _picked(whole: Rows, rows: np.ndarray) -> Rows:
    """whole[rows]; neighbours are not copied."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (rows[1:] > rows[:-1]).all():
        return whole[int(rows[0]) : int(rows[-1]) + 1]
    picked: Rows = whole[rows]
    return picked


@dataclass(eq=False, repr=False)
class Source:
    """One split of a set of images."""

    name: str  # what the user called the set
    split: str = "all"  # "train", "val", "test", another that the set has, several joined with "+", or "all"
    splits: dict[str, int] = field(default_factory=dict)  # samples in every split the set has
    classes: tuple[str, ...] = ()  # names of the classes, in the order of the labels; none for values
    # (N,) class numbers; (N, classes) zeros and ones when an image may have several; (N, T) values to be predicted
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    names: Names = field(default_factory=Names)
    channels: int = 3  # 1 when the images seem to be grey, 3 for colour, any number for arrays
    blocks: np.ndarray | None = None  # (N,) the block of neighbouring samples that each is read fastest with
    targets: tuple[str, ...] = ()  # names of the values
    flip_safe: bool = True  # False when a mirror image means something else, as with digits
    pixels: Tensor | None = None  # all images, uint8 (N, C, H, W), when they are in memory

    per_sample: ClassVar[tuple[str, ...]] = ("labels", "names", "blocks", "pixels")  # with an entry for each

    def __post_init__(self) -> None:
        if self.pixels is not None:
            self.channels = self.pixels.shape[1]

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, split={self.split!r}, {len(self)} samples)"

    def take(self, rows: np.ndarray, split: str | None = None, splits: dict[str, int] | None = None) -> Self:
        part = copy.copy(self)
        for cached in ("counts", "members", "groups", "runs"):
            part.__dict__.pop(cached, None)
        for key in self.per_sample:
            whole = getattr(self, key)
            if whole is not None:
                setattr(part, key, whole.take(rows) if isinstance(whole, Names) else _picked(whole, rows))
        part.split, part.splits = split or self.split, splits or self.splits
        return part

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same samples with other names for some of the classes: old -> new."""
        for name in names.keys() - set(self.classes):
            raise DataError(f"{self.name} has no class {name!r} to be mapped.{did_you_mean(name, self.classes)}")
        part = copy.copy(self)
        part.classes = tuple(names.get(name, name) for name in self.classes)
        if twice := next((name for name in part.classes if part.classes.count(name) > 1), None):
            both = ", ".join(old for old, new in zip(self.classes, part.classes, strict=True) if new == twice)
            raise DataError(f"{both} of {self.name} would all be called {twice!r}; map each class to one of its own")
        return part

    @property
    def label_kind(self) -> LabelKind:
        if np.issubdtype(self.labels.dtype, np.floating):
            return "values"
        return "labels" if self.labels.ndim == 2 else "classes"

    @property
    def spread_out(self) -> bool:
        """True where all images are read equally fast, wherever they are."""
        return self.blocks is None

    @property
    def labelled(self) -> bool:
        return self.classes != UNLABELLED and bool(self.classes or self.targets)

    def split_of(self, index: int) -> str:
        """The split of a sample; those of several splits stand one after the other."""
        names = list(self.splits) if self.split == "all" else self.split.split("+")
        for name in names if len(names) > 1 else ():
            if index < (count := self.splits.get(name, 0)):
                return name
            index -= count
        return names[0] if names else self.split

    @property
    def multi_label(self) -> bool:
        return self.label_kind == "labels"

    def encoded(self, index: int) -> bytes | str | Path:
        return self.names[index]

    def soon(self, rows: np.ndarray) -> None:
        """These will be read in a moment: whoever reads from far away may begin to fetch them."""

    def where(self, index: int) -> str:
        """A printable name of the sample: its path, or where it is inside a larger file."""
        return self.names[index]

    def paths(self, rows: np.ndarray) -> list[bytes]:
        """`where` of many samples."""
        return [os.fsencode(self.where(row)) for row in rows.tolist()]

    def pixels_of(self, index: int, pre: Preprocessing, channels: int) -> Tensor:
        """The image as a model wants it: uint8 (C, H, W) of `pre.size`. Raises `BadImage`."""
        if self.pixels is not None:
            return read_pixels(self.pixels[index : index + 1], pre, channels)[0]
        return read_image(self.encoded(index), pre, channels)

    def image(self, index: int, channels: int | None = None, needed: Needed | None = None) -> Image.Image:
        """The image, decoded and upright; `needed` as in `decode`. Raises `BadImage`."""
        if self.pixels is None:
            return decode(self.encoded(index), channels or self.channels, needed)
        image = pillow(self.pixels[index])
        return image if channels is None else to_channels(image, channels)

    def view(self, index: int) -> np.ndarray | None:
        """The decoded pixels (H, W) or (H, W, C) where they are mapped from a cache, else None."""
        return None

    def sniffed_channels(self) -> int:
        """1 when a few images spread over the set are all grey, otherwise 3. Only headers are looked at."""
        if self.pixels is not None:
            return self.channels
        modes = set()
        spread = range(0, len(self), max(1, len(self) // 16))
        for index in spread if self.spread_out else range(min(4, len(self))):  # of blocks, one is read
            with suppress(BadImage):  # it will be met again, and named, when it is decoded
                modes.add(header(self.encoded(index)).mode)
        return 1 if modes and all(m in ("1", "L", "LA", "F") or m.startswith("I") for m in modes) else 3

    @cached_property
    def runs(self) -> Runs | None:
        """The samples by file, where many are in one and each is a read of its own; else None."""
        return None

    def label_name(self, index: int) -> str:
        """The label of a sample in words: its class; several joined with "|"; or its values."""
        label = self.labels[index]
        if self.label_kind == "values":
            return ", ".join(f"{name} {value:g}" for name, value in zip(self.targets, label, strict=True))
        return "|".join(self.classes[i] for i in np.flatnonzero(label)) if self.multi_label else self.classes[label]

    @cached_property
    def counts(self) -> np.ndarray:
        """Samples of every class."""
        if self.label_kind == "values":
            raise DataError(f"{self.name} has values ({', '.join(self.targets)}), not classes that could be counted")
        if self.multi_label:
            return np.asarray(self.labels.sum(axis=0, dtype=np.int64))
        return np.bincount(self.labels, minlength=len(self.classes))

    @cached_property
    def groups(self) -> np.ndarray:
        """The class of every sample; with several labels, the first of them; with values, 0."""
        if self.label_kind == "values":
            return np.zeros(len(self), dtype=np.int64)
        return self.labels.argmax(axis=1) if self.multi_label else self.labels

    @cached_property
    def members(self) -> list[np.ndarray]:
        """The samples of every class; with values, all together."""
        sizes = np.bincount(self.groups, minlength=len(self.classes))
        return np.split(np.argsort(self.groups, kind="stable"), np.cumsum(sizes)[:-1])

    def length(self, index: int) -> int:
        """Of the encoded image in bytes; 0 where it takes reading to know."""
        return 0 if self.pixels is not None else file_size(self.names[index])

    def share(self, index: int) -> float:
        """A number in [0, 1) by the content of the image, for splits that have to be made."""
        content = self.pixels[index].numpy().tobytes() if self.pixels is not None else self.encoded(index)
        return content_number(content if isinstance(content, bytes) else _ends_of(content)) / 2**64

    def shares(self, rows: np.ndarray, progress: Progress) -> np.ndarray:
        """`share` of many samples."""
        return np.array([self.share(row) for row in progress.track(rows.tolist(), "splitting by content")])


@dataclass(eq=False, repr=False)
class PackedSource(Source):
    """Encoded images inside larger files."""

    files: tuple[str, ...] = ()
    places: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))  # file, and where it is in it

    per_sample = (*Source.per_sample, "places")

    def file_of(self, index: int) -> str:
        return self.files[int(self.places[index, 0])]


def pillow(pixels: Tensor) -> Image.Image:
    """uint8 (C, H, W) -> an image; of other than one or three channels the first is shown."""
    rows = pixels.permute(1, 2, 0).contiguous().numpy()  # H W C
    return Image.fromarray(rows if rows.shape[2] == 3 else rows[:, :, 0])


def content_number(content: bytes) -> int:
    """64 bits that depend on the content only: the same for equal files, wherever they are."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def _ends_of(path: str | Path) -> bytes:
    """A file's length, beginning and end: enough to tell images apart."""
    try:
        with open(open_regular(path), "rb") as file:
            head = file.read(1 << 16)
            size = file.seek(0, 2)
            file.seek(max(len(head), size - (1 << 12)))
            return size.to_bytes(8, "big") + head + file.read()
    except (OSError, ValueError):  # it will be met again, and named, when it is decoded
        return os.fsencode(path)
