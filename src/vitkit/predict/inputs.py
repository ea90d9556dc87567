"""What a user names - pictures, folders of pictures, sets - as one numbered source."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitkit.data import Source, open_data
from vitkit.data.decode import SUFFIXES, Needed
from vitkit.data.packed import Names
from vitkit.data.progress import Track, quiet
from vitkit.data.source import FileSource
from vitkit.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image


def open_inputs(given: Sequence[str], split: str | None = None, track: Track = quiet) -> Source:
    """Pictures and folders as they are, whatever folder a picture is in; anything else is a set, as in training.

    A set is taken whole, or its `split`. The order is that of the arguments; within a folder, of the names.
    """
    if not given:
        raise ConfigError("no pictures were named; give files, folders or a set such as digits")
    parts: list[Source] = []
    for loose, several in groupby(map(_meaning, given, [split] * len(given)), key=lambda m: isinstance(m, list)):
        if loose:
            parts.append(_files([path for paths in several for path in paths]))
        else:
            parts += [open_data(str(name), split or "all", track) for name in several]
    return parts[0] if len(parts) == 1 else Joined(parts)


def _meaning(text: str, split: str | None) -> list[str] | str:
    """The paths of pictures, or the name of a set."""
    path = Path(text).expanduser()
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return [str(path)]
    if path.is_dir() and split is None:
        return list(_pictures(path)) or text
    return text


def _pictures(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in SUFFIXES and not hidden and path.is_file():
            yield str(path)


def _files(paths: Sequence[str]) -> Source:
    labels = np.zeros(len(paths), dtype=np.int64)
    named = paths[0] if len(paths) == 1 else f"{len(paths):,} pictures"
    return FileSource(named, "all", {"all": len(paths)}, ("",), labels, Names(paths))


class Joined(Source):
    """Several sources, one after the other."""

    def __init__(self, parts: Sequence[Source]) -> None:
        count = sum(map(len, parts))
        name = ", ".join(p.name for p in parts)
        super().__init__(name, "all", {"all": count}, ("",), np.zeros(count, dtype=np.int64), Names())
        self.parts = parts
        self.starts = np.cumsum([0, *map(len, parts)]).tolist()

    def _find(self, index: int) -> tuple[Source, int]:
        part = bisect_right(self.starts, index) - 1
        return self.parts[part], index - self.starts[part]

    def where(self, index: int) -> str:
        source, own = self._find(index)
        return source.where(own)

    def picture(self, index: int, channels: int, needed: Needed | None = None) -> Image.Image:
        source, own = self._find(index)
        return source.picture(own, channels, needed)
