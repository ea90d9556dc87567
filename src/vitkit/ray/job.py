"""The pieces of a job through Ray Data: `vitkit predict|embed --engine ray`.

The numbers of the pieces are a Ray data set, which streams through a pool of actors; each loads the model once and
writes the pieces it gets, under names that follow from the job (`prediction/job.py`). An actor that dies is started
again and its pieces are asked for again: those that are written are passed over, so every image is in the result once.

Ray repeats without end. How often a task was begun is therefore counted in the folder of the pieces, a byte each time:
an image that kills whoever opens it ends the job after RETRIES, in words that say where it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import ray
import ray.data
from ray.exceptions import RayError

from vitkit.errors import DataError, VitkitError
from vitkit.prediction import Job, Opened
from vitkit.prediction.job import Engine
from vitkit.progress import Progress
from vitkit.ray.cluster import Cluster, connected, here, join_driver, keep_memory, reason_of, versions

RETRIES = 5  # how often a worker that died is started again, and its work repeated
_TRIES = ".tries"
_TASKS = 64  # for each actor, at about
_PIECES = 8  # in a task, at least, while there are many left: each task costs Ray a moment
_WAITING = 2  # tasks that an actor has at once, the one it does among them

Open = Callable[[], Opened]
Numbers = dict[str, np.ndarray]


def engine(
    open_model: Open, address: str | None = None, processes: int | None = None, device: str | None = None
) -> Engine:
    """What does the pieces of a job in place of this process: `run_job(..., engine=...)`."""

    def run(job: Job, progress: Progress) -> None:
        if todo := job.todo():
            with connected(address, processes, device) as cluster:
                _run(open_model, cluster, job, todo, progress)

    return run


def _run(open_model: Open, cluster: Cluster, job: Job, todo: list[int], progress: Progress) -> None:
    total = job.images()
    done = total - job.images(todo)
    try:
        for number in _finished(open_model, cluster, job, todo):
            done += job.images([number])
            progress.update(job.source.name, done, total)
    except RayError as e:
        raise DataError(f"Ray gave up ({reason_of(e)}). What is done is kept: --resume continues") from e
    if left := job.todo():
        raise DataError(f"{len(left)} pieces are missing although Ray has ended; --resume does them")


def _finished(open_model: Open, cluster: Cluster, job: Job, todo: list[int]) -> Iterator[int]:
    """The numbers of the pieces, each once it is written."""
    for tried in job.folder.glob(f"*{_TRIES}"):  # by a command that was stopped
        tried.unlink(missing_ok=True)
    ray.data.DataContext.get_current().enable_progress_bars = False
    about = (ray.put(job.without_model()), open_model, os.getcwd(), versions(), RETRIES)
    pieces = ray.data.from_numpy(tasks(todo, cluster.processes))
    done = pieces.map_batches(
        Worker,
        fn_constructor_args=about,
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(size=cluster.processes, max_tasks_in_flight_per_actor=_WAITING),
        num_cpus=1,
        num_gpus=1 if cluster.gpus else 0,
    )
    for row in done.iter_rows():
        if row["error"]:
            raise DataError(row["error"])
        yield int(row["piece"])


def tasks(todo: list[int], actors: int) -> list[np.ndarray]:
    """Pieces that go to an actor together: fewer and fewer of them, so that all actors end at about the same time."""
    most, found, done = max(_PIECES, len(todo) // (_TASKS * actors)), list[np.ndarray](), 0
    while done < len(todo):
        size = max(1, min(most, (len(todo) - done) // (2 * _WAITING * actors)))
        found.append(np.array(todo[done : done + size]))
        done += size
    return found


class Worker:
    """An actor: one model, one piece after the other. What is wrong travels as words, whole and without a traceback."""

    def __init__(self, job: ray.ObjectRef, open_model: Open, folder: str, wanted: dict[str, str], retries: int) -> None:
        self.error, self.retries = "", retries
        try:
            join_driver(folder, wanted)
            keep_memory()
            light: Job = ray.get(job)
            light.check_shared(here())
            begun = light.folder / f"model{_TRIES}"
            if _count(begun) > 2 * (retries + 1):
                raise DataError(f"workers die while they open the model, on {here()}; does it fit into the memory?")
            self.job = light.with_model(open_model(), here())
            begun.unlink(missing_ok=True)
        except VitkitError as e:
            self.error = str(e)

    def __call__(self, numbers: Numbers) -> Iterator[Numbers]:
        """The same answer for the same numbers, also when some were written before: Ray may ask again."""
        pieces = numbers["data"].tolist()
        try:
            if not self.error:
                self._do(pieces)
        except VitkitError as e:
            self.error = str(e)
        yield {"piece": np.array(pieces), "error": np.array([self.error] * len(pieces), dtype=object)}

    def _do(self, pieces: list[int]) -> None:
        todo = self.job.todo(pieces)
        if todo and _count(self.job.folder / f"{todo[0]:06d}{_TRIES}") > self.retries + 1:
            images = self.job.pieces[todo[0]]
            where = f"{self.job.source.where(images[0])} to {self.job.source.where(images[-1])}"
            what = f"a worker died {self.retries + 1} times at the same images, {where}"
            raise DataError(f"{what}; take out the one that does it, or give the workers more memory")
        for _ in self.job.do(todo):
            pass


def _count(path: Path) -> int:
    """How often this was asked, a byte each time; it outlives whoever asks."""
    with path.open("ab") as file:
        file.write(b".")
        return file.tell()
