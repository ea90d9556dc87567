"""Prepared batches, read ahead: while one batch is computed, threads decode the next ones."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from vitkit.data import BadPicture, Source, normalise, prepare, to_tensor
from vitkit.data.samples import Samples
from vitkit.model.config import AnyConfig

_AHEAD = 2  # batches that are read while one is computed


@dataclass(frozen=True)
class Batch:
    """Pictures that could be read, with their numbers, and those that could not, with the reason."""

    images: Tensor  # float B C H W, normalised
    indices: list[int]
    bad: dict[int, str]


class Reader:
    """Gives batches of a source in the order they are asked for; memory is that of a few batches."""

    def __init__(self, source: Source, config: AnyConfig, threads: int | None = None) -> None:
        self.source, self.config = source, config
        self.threads = threads or min(8, os.cpu_count() or 1)
        in_memory = source.pixels is not None
        self.pixels = Samples(source, config.preprocessing, channels=config.channels).pixels if in_memory else None

    def batches(self, wanted: Iterable[range]) -> Iterator[Batch]:
        pool = ThreadPoolExecutor(self.threads)
        waiting: deque[tuple[range, list[Future[Tensor | str]]]] = deque()
        try:
            for numbers in wanted:
                waiting.append((numbers, [pool.submit(self._read, i) for i in numbers]))
                if len(waiting) > _AHEAD:
                    yield self._assemble(*waiting.popleft())
            while waiting:
                yield self._assemble(*waiting.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, index: int) -> Tensor | str:
        """uint8 C H W, or why not."""
        if self.pixels is not None:
            return self.pixels[index]
        try:
            picture = self.source.picture(index, self.config.channels)
            return to_tensor(picture if self.source.prepared else prepare(picture, self.config.preprocessing))
        except BadPicture as e:
            return e.reason

    def _assemble(self, numbers: range, reads: list[Future[Tensor | str]]) -> Batch:
        results = dict(zip(numbers, (f.result() for f in reads), strict=True))
        good = {i: r for i, r in results.items() if isinstance(r, Tensor)}
        bad = {i: r for i, r in results.items() if isinstance(r, str)}
        pre = self.config.preprocessing
        empty = torch.empty(0, self.config.channels, *pre.size, dtype=torch.uint8)
        images = torch.stack(list(good.values())) if good else empty
        return Batch(normalise(images, pre), list(good), bad)
