"""What every set of pictures looks like to the rest of vitkit.

A `Source` is one split of a set: numbered samples, each with a picture, a label and a printable name.
Pictures are either encoded (files, rows of Parquet, members of a tar: `encoded(i)` gives bytes or a
path) or already pixels in memory (`pixels`, one uint8 tensor N C H W). Readers (`folder`, `manifest`,
`arrays`, `parquet`, `shards`, `named`) only fill in these few fields.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitkit.data.decode import BadPicture, Needed, decode, to_channels
from vitkit.data.packed import Names
from vitkit.errors import DataError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

SPLITS = ("train", "val", "test")
_CARVED = 0.1  # the share of a set that becomes `val`, and again `test`, when it comes without


class Source:
    """One split of a set of pictures.

    name      what the user called the set
    split     "train", "val", "test", or several joined with "+"
    splits    samples in every split the set has
    classes   names of the classes, in the order of the labels
    labels    (N,) class numbers, or (N, classes) zeros and ones when a picture may have several
    channels  1 when the pictures seem to be grey, 3 for colour, any number for arrays
    mirrors   False when a mirror image means something else, as with digits
    prepared  True when pictures come out resized and cut already, as a cache holds them
    blocks    (N,) the block of neighbouring samples that each is read fastest with, or None
    """

    mirrors = True
    prepared = False

    def __init__(
        self,
        name: str,
        split: str,
        splits: Mapping[str, int],
        classes: Sequence[str],
        labels: np.ndarray,
        names: Names,
        channels: int = 3,
        blocks: np.ndarray | None = None,
    ) -> None:
        self.name, self.split, self.splits = name, split, dict(splits)
        self.classes, self.labels, self.names = tuple(classes), labels, names
        self.channels, self.blocks = channels, blocks

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, split={self.split!r}, {len(self)} samples)"

    @property
    def multi_label(self) -> bool:
        return self.labels.ndim == 2

    @property
    def pixels(self) -> Tensor | None:
        """All pictures as one uint8 tensor (N, C, H, W) when they are in memory, else None."""
        return None

    def encoded(self, index: int) -> bytes | str | Path:
        """The encoded picture: bytes, or the path of its file."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """A printable name of the sample: its path, or where it is inside a larger file."""
        return self.names[index]

    def picture(self, index: int, channels: int, needed: Needed | None = None) -> Image.Image:
        """The picture, decoded and upright; `needed` as in `decode`. Raises `BadPicture`."""
        return decode(self.encoded(index), channels, needed)

    def view(self, index: int) -> np.ndarray | None:
        """The decoded pixels (H, W) or (H, W, C) where they are mapped from a cache, else None."""
        return None

    def read(self, index: int) -> tuple[Image.Image | np.ndarray, int | np.ndarray]:
        """The picture and its label. Raises `BadPicture` when the picture cannot be read."""
        label = self.labels[index]
        return self.picture(index, self.channels), label if self.multi_label else int(label)

    def label_name(self, index: int) -> str:
        """The class of a sample in words; several are joined with "|"."""
        label = self.labels[index]
        return "|".join(self.classes[i] for i in np.flatnonzero(label)) if self.multi_label else self.classes[label]

    @cached_property
    def counts(self) -> np.ndarray:
        """Samples of every class."""
        if self.multi_label:
            return self.labels.sum(axis=0).astype(np.int64)
        return np.bincount(self.labels, minlength=len(self.classes))

    @cached_property
    def members(self) -> list[np.ndarray]:
        """The samples of every class; with several labels, of every combination's first class."""
        first = self.labels.argmax(axis=1) if self.multi_label else self.labels
        order = np.argsort(first, kind="stable")
        return np.split(order, np.cumsum(np.bincount(first, minlength=len(self.classes)))[:-1])

    def kin(self, index: int) -> np.ndarray:
        """The samples of the same class, itself included: where a replacement is looked for."""
        label = self.labels[index]
        return self.members[int(label.argmax()) if self.multi_label else int(label)]


class PixelSource(Source):
    """Pictures that are in memory as one uint8 array (N, C, H, W)."""

    def __init__(self, pixels: np.ndarray, **fields: object) -> None:
        super().__init__(channels=pixels.shape[1], **fields)  # type: ignore[arg-type]
        self._pixels = pixels

    @cached_property
    def pixels(self) -> Tensor:
        import torch

        return torch.from_numpy(np.require(self._pixels, requirements=["C", "W"]))

    def picture(self, index: int, channels: int, needed: Needed | None = None) -> Image.Image:
        """For 1 and 3 channels only: Pillow knows no others."""
        found = as_picture(self._pixels[index])
        if isinstance(found, np.ndarray):
            raise DataError(f"{self.where(index)} has {found.shape[2]} channels and cannot be drawn; use `pixels`")
        return to_channels(found, channels)

    def read(self, index: int) -> tuple[Image.Image | np.ndarray, int | np.ndarray]:
        """A Pillow image for 1 and 3 channels, otherwise the array (H, W, C), and the label."""
        label = self.labels[index]
        return as_picture(self._pixels[index]), label if self.multi_label else int(label)


class FileSource(Source):
    """Pictures that are files of their own; `names` holds their paths."""

    def encoded(self, index: int) -> str:
        return self.names[index]


def as_picture(pixels: np.ndarray) -> Image.Image | np.ndarray:
    """(C, H, W) uint8 -> a Pillow image for 1 and 3 channels, otherwise an array (H, W, C)."""
    from PIL import Image

    if pixels.shape[0] == 1:
        return Image.fromarray(np.ascontiguousarray(pixels[0]))
    rows = np.ascontiguousarray(pixels.transpose(1, 2, 0))
    return Image.fromarray(rows) if pixels.shape[0] == 3 else rows


# --- splits ----------------------------------------------------------------------------------------


def content_share(content: bytes) -> float:
    """A number in [0, 1) that depends on the content only: the same for equal files, wherever they are."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64


def file_share(path: str) -> float:
    """`content_share` of a file's length, beginning and end: enough to tell pictures apart."""
    try:
        with open(path, "rb") as file:
            head = file.read(1 << 16)
            size = file.seek(0, 2)
            file.seek(max(len(head), size - (1 << 12)))
            return content_share(size.to_bytes(8, "big") + head + file.read())
    except OSError:  # it will be met again, and named, when it is decoded
        return content_share(path.encode(errors="surrogateescape"))


def carve(shares: np.ndarray, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """Numbers in [0, 1) -> positions per split: a tenth to each of val and test if wanted, the rest to train."""
    result, low = {}, 0.0
    for split in ("val", "test"):
        if split in wanted:
            result[split] = np.flatnonzero((shares >= low) & (shares < low + _CARVED))
            low += _CARVED
    return {"train": np.flatnonzero(shares >= low), **result}


def complete_splits(
    parts: Mapping[str, np.ndarray], shares_of: Callable[[np.ndarray], np.ndarray]
) -> dict[str, np.ndarray]:
    """Rows per split, with the missing ones carved out by content.

    Rows called "all" are not split yet: they give train, val and test. A set that has train but no
    val gives a tenth of train to val. `shares_of(rows)` is called only when it is needed.
    """
    origin = "all" if "all" in parts else "train"
    wanted = [s for s in (("val", "test") if origin == "all" else ("val",)) if s not in parts]
    found = dict(parts)
    if origin in parts and wanted:
        rows = found.pop(origin)
        found.update((s, rows[r]) for s, r in carve(shares_of(rows), wanted).items())
    return {s: found[s] for s in SPLITS if s in found}


def choose_split(name: str, split: str, splits: Mapping[str, object]) -> list[str]:
    """ "train", "train+val" or "all" -> the names of splits; an error when the set has no such split."""
    wanted = list(splits) if split == "all" else split.split("+")
    for part in wanted:
        if part not in splits:
            have = ", ".join(s for s in SPLITS if s in splits)
            raise DataError(f"{name} has no split {part!r}; it has {have}. Choose one, or join them with + (train+val)")
    return wanted


def evaluation_split(splits: Mapping[str, int]) -> str:
    """The split that a finished model is judged on: test if there is one, else val, else what there is."""
    return next((s for s in ("test", "val", "train") if splits.get(s)), "train")


__all__ = ["BadPicture", "FileSource", "PixelSource", "Source", "evaluation_split"]
