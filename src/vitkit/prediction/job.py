"""A long job in pieces that are done or not done: streamed, resumable, shared among processes.

The images are cut into pieces of a few batches, whatever the number of processes. Each finished piece is a
file of its own in OUT.parts, put there whole: `000017-DIGEST.jsonl`, and `.npy` beside it for features. When all
are there they become OUT, a file or a folder of parts, which appears whole or not at all. A job that was killed finds
its pieces again; the same images meet in the same batches, so the result is the same to the last digit.

A job is bound to its model, data and options by a digest, which stands in the name of each piece and, with that of OUT,
in OUT.job.json: no piece of one job enters another, and `--resume` knows whose result OUT is.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vitkit.data import BadFile, ImageBatches, Source, normalise
from vitkit.data.given import Joined
from vitkit.data.identity import containers, digest
from vitkit.data.loader import ReadImages
from vitkit.errors import ConfigError, DataError, as_text
from vitkit.io import (
    canonical,
    parse_json,
    read_json,
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
from vitkit.prediction.parts import write_folder
from vitkit.prediction.tables import MANIFEST, Columns, Row, check_format, features_of, is_folder, write_table
from vitkit.progress import SILENT, Progress
from vitkit.storage import output_file, workplace
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
    out: str | Path,
    batch_size: int | None = None,
    resume: bool = False,
    force: bool = False,
    world: World = ALONE,
    progress: Progress = SILENT,
    engine: Engine | None = None,
) -> Done:
    """Work through a source and write OUT, a path or a URL.

    OUT ends in .csv, .jsonl or .parquet, in .npz for features, or is a folder of Parquet files.

    resume  continue with the pieces of a job that was stopped, if it is the same one
    force   overwrite whatever is there
    world   each process does its share of the pieces; then the first one puts all together
    engine  does the pieces instead, on processes of its own
    """
    start = time.monotonic()
    place = workplace(out)
    check_format(place, opened.features)
    job = Job(opened, source, place, batch_size)
    with ExitStack() as stack:
        if world.first:
            lock = place.with_name(f".{place.name}.lock")
            stack.enter_context(only_one(lock, f"the job for {out}", "choose another --out"))
            stack.enter_context(output_file(out, job.finished))
        if world.share(job.begin(resume, force) if world.first else False):
            return Done(0, [], 0.0)
        if engine is not None:
            engine(job, progress)
        else:
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
    found: list[Row] = [{**empty, "path": as_text(source.where(i)), **rows[i]} for i in sorted(rows)]
    for row, i in zip(found, sorted(rows) if with_labels(opened, source) else (), strict=False):
        row |= {"label": as_text(source.label_name(i)), "split": source.split_of(i)}
    return found


def with_labels(opened: Opened, source: Source) -> bool:
    """Whether label and split of every image are written too: with features, of a set that has them."""
    return opened.features is not None and source.labelled


def columns_of(opened: Opened, source: Source) -> Columns:
    own = {**opened.columns}
    path = {"path": own.pop("path")}
    return {**path, **({"label": str, "split": str} if with_labels(opened, source) else {}), **own}


class Job:
    """The pieces of a job, in the folder OUT.parts."""

    def __init__(self, opened: Opened, source: Source, out: Path, batch_size: int | None = None) -> None:
        self.opened, self.source, self.out = opened, source, out
        size = self.size = batch_size or batch_size_for(opened)
        self.folder = out.with_name(f"{out.name}.parts")
        self.pieces = cut(range(len(source)), _BATCHES * size)
        parts = source.parts if isinstance(source, Joined) else [source]
        data = [(digest(part), containers(part)) for part in parts]
        about = {**opened.about, "batch_size": size, "pictures": len(source), "data": sha256(canonical(data).encode())}
        about |= {"labels": "written"} if with_labels(opened, source) else {}
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
        elif resume and self.out.exists():
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
        if before.pop("sha256", None) != self._sealed():
            raise DataError(f"{self.out} was changed after it was written. {hint}")
        if changes := self._differs(before):
            raise DataError(f"{self.out} is the result of another job: {changes}. {hint}")

    def do_share(self, world: World, progress: Progress) -> None:
        """The pieces of this process, but for those that are there."""
        self.check_shared(f"process {world.rank}")
        mine = range(world.rank, len(self.pieces), world.size)
        todo = self.todo(mine)
        total = self.images(mine)
        done = total - self.images(todo)

        def shown(images: int) -> None:
            progress.update(self.source.name, done + images, total)

        for n in self.do(todo, shown):
            done += len(self.pieces[n])

    def check_shared(self, who: str) -> None:
        """An error where the folder of the pieces cannot be seen."""
        if not self.folder.is_dir():
            where = f"{self.folder} is not there for {who}"
            raise DataError(f"{where}; all machines must share the folder of {self.out}")

    def todo(self, numbers: Sequence[int] | None = None) -> list[int]:
        """Those of the pieces that are not done yet."""
        return [n for n in (range(len(self.pieces)) if numbers is None else numbers) if not self._is_done(n)]

    def images(self, numbers: Sequence[int] | None = None) -> int:
        return len(self.source) if numbers is None else sum(len(self.pieces[n]) for n in numbers)

    def do(self, numbers: Sequence[int], on_batch: Callable[[int], None] = lambda images: None) -> Iterator[int]:
        """Do these pieces; the number of each comes out once it is written. `on_batch`: images of the piece so far."""
        wanted = (batch for n in numbers for batch in cut(self.pieces[n], self.size))
        batches = ImageBatches(self.source, self.opened.config).batches(wanted)
        for n in numbers:
            rows: list[Row] = []
            for _ in cut(self.pieces[n], self.size):
                rows += _rows(self.opened, self.source, next(batches))
                on_batch(len(rows))
            self._write(n, rows)
            yield n

    def without_model(self) -> Job:
        """The same job for other processes, which open the model themselves and say so with `with_model`."""
        part = copy.copy(self)
        del part.opened
        return part

    def with_model(self, opened: Opened, who: str) -> Job:
        """This job with the model as another process has opened it, which must be the same one."""
        part, about = copy.copy(self), parse_json(canonical(opened.about))
        if other := [
            f"{k} ({self.about.get(k)} here, {about[k]} there)" for k in about if about[k] != self.about.get(k)
        ]:
            what = f"{who} has opened another model: {', '.join(other)}"
            raise ConfigError(f"{what}. Give all machines the same file, and name the runtime with --runtime")
        part.opened = opened
        return part

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
        if is_folder(self.out):
            write_folder(self.out, self.read, columns_of(self.opened, self.source), self.digest)
        else:
            with replacing(self.out) as file:
                write_table(file, self.out.suffix.lower(), self.read, columns_of(self.opened, self.source))
        write_json(self.finished, {**self.about, "sha256": self._sealed()})
        bad = [row for rows in self.read() for row in rows if row["error"] is not None]
        self.remove()
        return [BadFile(str(row["path"]), "", str(row["error"])) for row in bad]

    def _sealed(self) -> str | None:
        """The digest of OUT; of a folder that of its manifest, which has those of the parts. None: it is neither."""
        file = self.out / MANIFEST if is_folder(self.out) else self.out
        return sha256(file) if file.is_file() else None

    def remove(self) -> None:
        remove_folder(self.folder, self.out)


Engine = Callable[[Job, Progress], None]


def _read_about(path: Path) -> dict[str, object]:
    try:
        return {**read_json(path)}
    except (OSError, ValueError, TypeError) as e:
        raise DataError(f"{path} cannot be read ({e}); restart with --force") from e
