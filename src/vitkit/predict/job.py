"""A long job in pieces that are done or not done: streamed, resumable, shared among processes.

The pictures are cut into pieces of a few batches, whatever the number of processes. Each finished piece is a
file of its own in OUT.parts, put there whole: `000017.jsonl`, with `000017.npy` beside it for features. When all
are there they become OUT, which appears whole or not at all. A job that was killed finds its pieces again; the
same pictures meet in the same batches, so the result is the same to the last digit.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from vitkit.checkpoints.write import canonical, replacing
from vitkit.data import BadFile, Source
from vitkit.errors import DataError
from vitkit.model.config import AnyConfig
from vitkit.predict.reading import Batch, Reader
from vitkit.predict.tables import check_format, write_table
from vitkit.ranks import gather

_BATCHES = 4  # per piece: what a kill may cost
_PIXELS_AT_ONCE = 1 << 20  # per batch, counting one channel

Row = dict[str, Any]
OnBatch = Callable[[int, int], None]  # pictures done, and pictures in all, of this process


@dataclass(frozen=True)
class Part:
    """What was found out about some pictures: a row for each, and their features if that is what was asked for."""

    rows: list[Row]
    features: np.ndarray | None = None


class Work(Protocol):
    columns: dict[str, type]  # of a row, in order

    def __call__(self, images: Tensor) -> Part: ...


@dataclass(frozen=True)
class Done:
    pictures: int
    bad: list[BadFile]
    seconds: float


def default_batch(config: AnyConfig) -> int:
    size = config.preprocessing.size
    return min(256, max(8, _PIXELS_AT_ONCE // (size[0] * size[1])))


def stream(work: Work, source: Source, config: AnyConfig, batch_size: int | None = None) -> Iterator[Row]:
    """The rows of a source one after the other, for whoever wants no file."""
    size = batch_size or default_batch(config)
    for batch in Reader(source, config).batches(_cut(range(len(source)), size)):
        yield from _finish(work, source, batch).rows


def run_job(
    work: Work,
    source: Source,
    config: AnyConfig,
    out: Path,
    about: dict[str, Any],
    batch_size: int | None = None,
    resume: bool = False,
    force: bool = False,
    rank: int = 0,
    world_size: int = 1,
    on_batch: OnBatch | None = None,
) -> Done:
    """Work through a source and write OUT (.csv, .jsonl, .parquet; .npz for features).

    about    what the result depends on; a job is resumed only when it is the same
    resume   go on with the pieces of a job that was stopped
    force    begin anew, whatever is there
    rank     does its share of the pieces of `world_size`; then the first process puts all together
    """
    start = time.monotonic()
    size = batch_size or default_batch(config)
    check_format(out, features="features" in work.columns)
    parts = _Parts(out, {**about, "batch_size": size, "pictures": len(source), "names": _digest(source)})
    finished = gather(parts.begin(resume, force) if rank == 0 else False, world_size)[0]
    if not parts.folder.is_dir() and not finished:
        raise DataError(f"{parts.folder} is not there for process {rank}; all machines must share the folder of {out}")
    if finished:
        return Done(0, [], 0.0)
    pieces = list(_cut(range(len(source)), _BATCHES * size))
    mine = [(n, piece) for n, piece in enumerate(pieces) if n % world_size == rank]
    todo = [(n, piece) for n, piece in mine if not parts.has(n)]
    total, done = sum(len(p) for _, p in mine), sum(len(p) for n, p in mine if parts.has(n))
    reader = Reader(source, config)
    batches = reader.batches(batch for _, piece in todo for batch in _cut(piece, size))
    for n, piece in todo:
        found: list[Part] = []
        for _ in _cut(piece, size):
            batch = next(batches)
            found.append(_finish(work, source, batch))
            done += len(batch.indices) + len(batch.bad)
            if on_batch is not None:
                on_batch(done, total)
        parts.write(n, found)
    gather(None, world_size)  # everybody is done
    bad = parts.put_together(len(pieces), work.columns) if rank == 0 else []
    bad = gather(bad, world_size)[0]
    return Done(len(source), bad, time.monotonic() - start)


def _cut(numbers: range, size: int) -> Iterator[range]:
    for low in range(0, len(numbers), size):
        yield numbers[low : low + size]


def _finish(work: Work, source: Source, batch: Batch) -> Part:
    """Rows of a batch in the order of the source, with those that could not be read in their places."""
    part = work(batch.images) if batch.indices else Part([])
    rows = dict(zip(batch.indices, part.rows, strict=True))
    rows |= {i: {"error": reason} for i, reason in batch.bad.items()}
    empty = dict.fromkeys(name for name in work.columns if name != "features")
    named = [{**empty, "path": _printable(source.where(i)), **rows[i]} for i in sorted(rows)]
    return Part(named, part.features)


def _printable(text: str) -> str:
    """File names may hold bytes that are no text; they are written with backslashes."""
    return text.encode(errors="backslashreplace").decode()


def _digest(source: Source) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for i in range(len(source)):
        digest.update(os.fsencode(source.where(i)) + b"\0")
    return digest.hexdigest()


class _Parts:
    """The folder OUT.parts."""

    def __init__(self, out: Path, about: dict[str, Any]) -> None:
        self.out, self.about = out, about
        self.folder = out.with_name(f"{out.name}.parts")

    def begin(self, resume: bool, force: bool) -> bool:
        """Make or check the folder; True when the job has been finished before."""
        described = self.folder / "job.json"
        if force:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif resume and described.is_file():
            self._compare(json.loads(described.read_text(encoding="utf-8")))
            return False
        elif resume and self.out.is_file():
            return True
        elif described.is_file():
            raise DataError(f"a job for {self.out} was stopped before: go on with --resume, or begin anew with --force")
        elif self.out.exists():
            raise DataError(f"{self.out} exists already; choose another name, or replace it with --force")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(described) as file:
                file.write(canonical(self.about).encode())
        except OSError as e:
            raise DataError(
                f"{self.folder} cannot be made ({e.strerror}); give --out a folder that can be written"
            ) from e
        return False

    def _compare(self, before: dict[str, Any]) -> None:
        now = json.loads(canonical(self.about))
        other = [k for k in {**before, **now} if before.get(k) != now.get(k)]
        if not other:
            return
        told = ", ".join(f"{k} ({before.get(k)} before, {now.get(k)} now)" for k in other)
        raise DataError(
            f"the job in {self.folder} is another one: {told}. Repeat its options, or begin anew with --force"
        )

    def _file(self, number: int, kind: str) -> Path:
        return self.folder / f"{number:06d}.{kind}"

    def has(self, number: int) -> bool:
        return self._file(number, "jsonl").is_file()

    def write(self, number: int, found: list[Part]) -> None:
        """Rows last: a piece counts as done when its rows are there."""
        features = [p.features for p in found if p.features is not None]
        if features:
            with replacing(self._file(number, "npy")) as file:
                np.save(file, np.concatenate(features))
        with replacing(self._file(number, "jsonl")) as file:
            for part in found:
                for row in part.rows:
                    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def rows(self, number: int) -> list[Row]:
        with self._file(number, "jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def pieces(self, count: int) -> Iterator[Part]:
        """One at a time: memory does not grow with the job."""
        for n in range(count):
            array = self._file(n, "npy")
            yield Part(self.rows(n), np.load(array) if array.is_file() else None)

    def put_together(self, count: int, columns: dict[str, type]) -> list[BadFile]:
        """Write OUT, and name the pictures that could not be read."""
        with replacing(self.out) as file:
            write_table(file, self.out.suffix.lower(), lambda: self.pieces(count), columns)
        rows = (row for n in range(count) for row in self.rows(n))
        bad = [BadFile(row["path"], "", row["error"]) for row in rows if row["error"] is not None]
        shutil.rmtree(self.folder, ignore_errors=True)
        return bad
