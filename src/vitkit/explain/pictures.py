"""The pictures a report is about, as the model sees them: read, resized and cut by the model's own preprocessing.

A picture that cannot be read is left out and named, with the reason; the others are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitkit.data.decode import BadPicture, decode
from vitkit.data.open import open_data
from vitkit.data.preprocess import normalise, prepare, prepare_pixels, to_tensor
from vitkit.data.source import Source, evaluation_split
from vitkit.errors import DataError
from vitkit.model.config import ViTConfig


@dataclass(frozen=True)
class Pictures:
    names: list[str]
    pixels: Tensor  # uint8 B C H W: what the model sees, before normalising
    images: Tensor  # float B C H W: the model's input
    labels: np.ndarray | None = None  # B: true classes, where known
    skipped: list[tuple[str, str]] = field(default_factory=list)  # name and reason
    class_names: tuple[str, ...] | None = None  # of the set they came from

    def __len__(self) -> int:
        return len(self.names)

    def first(self, count: int) -> Pictures:
        labels = None if self.labels is None else self.labels[:count]
        return replace(
            self, names=self.names[:count], pixels=self.pixels[:count], images=self.images[:count], labels=labels
        )

    def shown(self) -> np.ndarray:
        """B H W 3 uint8, for drawing; grey pictures become RGB, other channels are averaged."""
        pixels = self.pixels if self.pixels.shape[1] == 3 else self.pixels.float().mean(dim=1, keepdim=True)
        return pixels.to(torch.uint8).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()


def load_pictures(paths: Sequence[str | Path], config: ViTConfig) -> Pictures:
    """Read picture files for this model. Folders give the pictures in them; what cannot be read is listed."""
    pre = config.preprocessing
    names, read, skipped = [], [], []
    for path in _files(paths):
        try:
            read.append(to_tensor(prepare(decode(path, config.channels), pre)))
            names.append(path.name)
        except BadPicture as e:
            skipped.append((str(path), e.reason if path.exists() else "there is no such file"))
    if not read:
        first = f": {skipped[0][0]}: {skipped[0][1]}" if skipped else ""
        raise DataError(f"none of the pictures given can be read{first}; give others")
    return _stacked(names, read, None, skipped, config)


def sample_data(data: str, config: ViTConfig, count: int = 200) -> Pictures:
    """Up to `count` pictures of a set's evaluation split, spread over its classes."""
    source = open_data(data, "all")
    split = evaluation_split(source.splits)
    source = open_data(data, split)
    pre = config.preprocessing
    chosen = spread(source, count)
    names, read, skipped, labels = [], [], [], []
    for i in chosen:
        try:
            if source.pixels is not None:
                one = prepare_pixels(source.pixels[i : i + 1], pre)[0]
            else:
                picture, _ = source.read(i)
                one = to_tensor(picture) if isinstance(picture, np.ndarray) else to_tensor(prepare(picture, pre))
        except BadPicture as e:
            skipped.append((source.where(i), e.reason))
            continue
        read.append(to_channels(one, config.channels))
        names.append(Path(source.where(i)).name)
        labels.append(-1 if source.multi_label else int(source.labels[i]))
    if source.multi_label or len(source.classes) != config.classes:  # not labels of this model's classes
        return _stacked(names, read, None, skipped, config)
    return replace(_stacked(names, read, np.array(labels, dtype=int), skipped, config), class_names=source.classes)


def spread(source: Source, count: int) -> list[int]:
    """Sample numbers: one of each class in turn, those of a class evenly over the set."""
    picks = [m[np.linspace(0, len(m) - 1, min(count, len(m))).astype(int)] for m in source.members if len(m)]
    turns = (int(m[turn]) for turn in range(count) for m in picks if turn < len(m))
    return [i for i, _ in zip(turns, range(min(count, len(source))), strict=False)]


def to_channels(pixels: Tensor, channels: int) -> Tensor:
    """C H W with the number of channels the model wants: grey is repeated, colour is averaged."""
    if len(pixels) == channels:
        return pixels
    if len(pixels) == 1:
        return pixels.expand(channels, -1, -1)
    if channels == 1:
        return pixels.float().mean(dim=0, keepdim=True).round().to(torch.uint8)
    raise DataError(f"the pictures have {len(pixels)} channels and the model wants {channels}; convert them first")


def _files(paths: Sequence[str | Path]) -> Iterable[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        else:
            yield path


def _stacked(
    names: list[str],
    read: list[Tensor],
    labels: np.ndarray | None,
    skipped: list[tuple[str, str]],
    config: ViTConfig,
) -> Pictures:
    pixels = torch.stack(read) if read else torch.empty((0, config.channels, *config.image_size), dtype=torch.uint8)
    return Pictures(names, pixels, normalise(pixels, config.preprocessing), labels, skipped)


def nothing(config: ViTConfig) -> Pictures:
    return _stacked([], [], None, [], config)
