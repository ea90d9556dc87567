"""A long list of names in two arrays.

Worker processes share the memory of the process that started them until somebody writes to it, and
in Python even reading a list of strings writes (reference counts). Ten million paths in two numpy
arrays stay shared; in a list they would be copied, page by page, into every worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import numpy as np


class Names:
    """A read-only sequence of strings (file names with any bytes in them included)."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._ends = np.cumsum([len(e) for e in encoded], dtype=np.int64)
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        start = int(self._ends[index - 1]) if index else 0
        return os.fsdecode(self._bytes[start : int(self._ends[index])].tobytes())

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def take(self, indices: Iterable[int]) -> Names:
        return Names(self[int(i)] for i in indices)
