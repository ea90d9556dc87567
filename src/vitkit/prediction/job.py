"""A long job in pieces that are done or not done: streamed, resumable, shared among processes.

The images are cut into pieces of a few batches, whatever the number of processes. Each finished piece is a
file of its own in OUT.parts, put there whole: `000017-DIGEST.jsonl`, and `.npy` beside it for features. When all
are there they become OUT, which appears whole or not at all. A job that was killed finds its pieces again; the
same images meet in the same batches, so the result is the same to the last digit.

A job is bound to its model, data and options by a digest, which stands in the name of each piece and, with that of OUT,
in OUT.job.json: no piece of one job enters another, and `--resume` knows whose result OUT is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vitkit.data import BadFile, ImageBatches, Source, normalise
from vitkit.data.given import Joined
from vitkit.data.identity import containers, digest
from vitkit.data.loader import ReadImages
from vitkit.errors import DataError, as_text
from vitkit.io import (
    canonical,
    parse_json,
    remove_folder,
    remove_leftovers,
    replacing,
    sha256,
    write_json,
    write_npy,
    write_text,
)
from vitkit.locks import only_one
from vitkit.prediction.opened import Opened
from vitkit.prediction.tables import Row, check_format, features_of, write_table
from vitkit.progress import SILENT, Progress
from vitkit.world import World

_BATCHES = 4  # per piece: what a kill may cost
_PIXELS_AT_ONCE = 1 << 20  # per batch, counting one channel
ALONE = World(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Done:
    images: int  # 0: all was done before
    bad: list[BadFile]
    seconds: float


def stream(opened: Opened, source: Source, batch_size: int | None = None) -> Iterator[Row]:
    """Row after row of a source, for whoever wants no file."""
    batches = cut(range(len(source)), batch_size or batch_size_for(opened))
    for read in ImageBatches(source, opened.config).batches(batches):
        yield from _rows(opened, source, read)


def run_job(
    opened: Opened,
    source: Source,
    out: Path,
    batch_size: int | None = None,
    resume: bool = False,
    force: bool = False,
    world: World = ALONE,
    progress: Progress = SILENT,
) -> Done:
    """Work through a source and write OUT (.csv, .jsonl, .parquet; .npz for features).

    resume  continue with the pieces of a job that was stopped, if it is the same one
    force   overwrite whatever is there
    world   each process does its share of the pieces; then the first one puts all together
    """
    start = time.monotonic()
    check_format(out, opened.features)
    job = Job(opened, source, out, batch_size)
    with ExitStack() as stack:
        if world.first:
            lock = out.with_name(f".{out.name}.lock")
            stack.enter_context(only_one(lock, f"the job for {out}", "choose another --out"))
        if world.share(job.begin(resume, force) if world.first else False):
            return Done(0, [], 0.0)
        job.do_share(world, progress)
        world.wait()  # until everybody is done
        bad = world.share(job.put_together() if world.first else [])
    return Done(len(source), bad, time.monotonic() - start)


def batch_size_for(opened: Opened) -> int:
    """What `vitkit tune` chose, or by the size of the images."""
    height, width = opened.config.preprocessing.size
    return opened.runtime.batch_size or min(256, max(8, _PIXELS_AT_ONCE // (height * width)))


def cut(numbers: range, size: int) -> list[range]:
    return [numbers[low : low + size] for low in range(0, len(numbers), size)]


def _rows(opened: Opened, source: Source, read: ReadImages) -> list[Row]:
    """Rows of a batch in the order of the source, with those that could not be read in their places."""
    answers = opened(normalise(read.images, opened.config.preprocessing)) if read.indices else []
    rows: dict[int, Row] = dict(zip(read.indices, answers, strict=True))
    rows |= {i: {"error": reason} for i, reason in read.bad.items()}
    empty = dict.fromkeys(name for name in opened.columns if name != "features")
    return [{**empty, "path": as_text(source.where(i)), **rows[i]} for i in sorted(rows)]


class Job:
    """The pieces of a job, in the folder OUT.parts."""

    def __init__(self, opened: Opened, source: Source, out: Path, batch_size: int | None = None) -> None:
        self.opened, self.source, self.out = opened, source, out
        size = self.size = batch_size or batch_size_for(opened)
        self.folder = out.with_name(f"{out.name}.parts")
        self.pieces = cut(range(len(source)), _BATCHES * size)
        parts = source.parts if isinstance(source, Joined) else [source]
        data = [(digest(part, range(len(part))), containers(part)) for part in parts]
        about = {**opened.about, "batch_size": size, "pictures": len(source), "data": sha256(canonical(data).encode())}
        self.about: dict[str, object] = parse_json(canonical(about))
        self.digest = sha256(canonical(about).encode())[:16]
        self.finished = out.with_name(f"{out.name}.job.json")

    @property
    def waits(self) -> bool:
        """Whether this very job was begun before."""
        described = self.folder / "job.json"
        return described.is_file() and not self._differs(_read_about(described))

    def begin(self, resume: bool, force: bool) -> bool:
        """Make or check the folder; True when the job has been finished before."""
        described = self.folder / "job.json"
        self.out.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.out)
        if force:
            remove_folder(self.folder, self.out)
        elif described.is_file() and not resume:
            raise DataError(f"a job for {self.out} was stopped before: --resume continues it, --force restarts it")
        elif described.is_file():
            if changes := self._differs(_read_about(described)):
                what = f"the job in {self.folder} is another one: {changes}"
                raise DataError(f"{what}. Repeat its options, or restart with --force")
            return False
        elif resume and self.out.is_file():
            self._check_finished()
            return True
        elif self.out.exists():
            raise DataError(f"{self.out} exists already; choose another name, or overwrite it with --force")
        write_text(described, canonical(self.about))
        return False

    def _differs(self, before: dict[str, object]) -> str:
        other = [k for k in {**before, **self.about} if before.get(k) != self.about.get(k)]
        return ", ".join(f"{k} ({before.get(k)} before, {self.about.get(k)} now)" for k in other)

    def _check_finished(self) -> None:
        """OUT is the result of this very job, as it was written."""
        hint = "Choose another name, or overwrite it with --force"
        if not self.finished.is_file():
            raise DataError(f"nothing says whose result {self.out} is ({self.finished.name} is missing). {hint}")
        before = _read_about(self.finished)
        if before.pop("sha256", None) != sha256(self.out):
            raise DataError(f"{self.out} was changed after it was written. {hint}")
        if changes := self._differs(before):
            raise DataError(f"{self.out} is the result of another job: {changes}. {hint}")

    def do_share(self, world: World, progress: Progress) -> None:
        """The pieces of this process, but for those that are there."""
        if not self.folder.is_dir():
            where = f"{self.folder} is not there for process {world.rank}"
            raise DataError(f"{where}; all machines must share the folder of {self.out}")
        mine = range(world.rank, len(self.pieces), world.size)
        todo = [n for n in mine if not self._is_done(n)]
        total = sum(len(self.pieces[n]) for n in mine)
        done = total - sum(len(self.pieces[n]) for n in todo)
        wanted = (numbers for n in todo for numbers in cut(self.pieces[n], self.size))
        batches = ImageBatches(self.source, self.opened.config).batches(wanted)
        for n in todo:
            rows: list[Row] = []
            for _ in cut(self.pieces[n], self.size):
                rows += _rows(self.opened, self.source, next(batches))
                progress.update(self.source.name, done + len(rows), total)
            self._write(n, rows)
            done += len(rows)

    def _file(self, number: int, kind: str) -> Path:
        return self.folder / f"{number:06d}-{self.digest}.{kind}"

    def _is_done(self, number: int) -> bool:
        kinds = ("jsonl",) if self.opened.features is None else ("npy", "jsonl")
        return all(self._file(number, kind).is_file() for kind in kinds)

    def _write(self, number: int, rows: list[Row]) -> None:
        """Rows last: a piece counts as done when its rows are there."""
        if self.opened.features is not None:
            features = [array for array in map(features_of, rows) if array is not None]
            with replacing(self._file(number, "npy")) as file:
                write_npy(file, np.stack(features) if features else np.empty((0, 0)))
        with replacing(self._file(number, "jsonl")) as file:
            for row in rows:
                row.pop("features", None)
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def read(self) -> Iterator[list[Row]]:
        """One piece at a time: memory does not grow with the job."""
        for n in range(len(self.pieces)):
            try:
                rows = self._piece(n)
            except (ValueError, KeyError, TypeError, EOFError, FileNotFoundError) as e:
                self._file(n, "jsonl").unlink(missing_ok=True)
                what = f"{self._file(n, 'jsonl')} was damaged ({e}) and is removed"
                raise DataError(f"{what}; --resume computes this piece again") from e
            yield rows

    def _piece(self, number: int) -> list[Row]:
        with self._file(number, "jsonl").open(encoding="utf-8") as lines:
            rows: list[Row] = [parse_json(line) for line in lines]
        if len(rows) != len(self.pieces[number]) or not all("error" in {**row} for row in rows):
            raise ValueError(f"{len(rows)} rows instead of {len(self.pieces[number])}")
        if self.opened.features is not None:
            readable = [row for row in rows if row["error"] is None]
            for row, features in zip(readable, np.load(self._file(number, "npy")), strict=True):
                row["features"] = features
        return rows

    def put_together(self) -> list[BadFile]:
        """Write OUT, and name the images that could not be read."""
        with replacing(self.out) as file:
            write_table(file, self.out.suffix.lower(), self.read, self.opened.columns)
        write_json(self.finished, {**self.about, "sha256": sha256(self.out)})
        bad = [row for rows in self.read() for row in rows if row["error"] is not None]
        self.remove()
        return [BadFile(str(row["path"]), "", str(row["error"])) for row in bad]

    def remove(self) -> None:
        remove_folder(self.folder, self.out)


def _read_about(path: Path) -> dict[str, object]:
    try:
        return {**parse_json(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as e:
        raise DataError(f"{path} cannot be read ({e}); restart with --force") from e
