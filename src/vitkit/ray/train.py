"""`vitkit train --engine ray`: Ray Train's TorchTrainer starts the processes that torchrun would start.

What runs in them is the same: `training.run.train`, with the ranks and the process group that Ray sets up. After a
lost process Ray starts all of them again, which then resume from the last checkpoint, as after torchrun's restart.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TypedDict

from ray import train as ray_train
from ray.train.torch import TorchConfig, TorchTrainer

from vitkit.errors import TrainError, VitkitError
from vitkit.io import read_json, write_json, write_text
from vitkit.locks import only_one
from vitkit.ray.cluster import connected, join_driver, reason_of, versions
from vitkit.storage import is_url, workplace
from vitkit.tasks import Metric
from vitkit.training.config import TrainConfig
from vitkit.training.live import PlainView
from vitkit.training.result import Result, Watcher
from vitkit.training.run import train
from vitkit.world import PeerGone, join

RESTARTS = 3  # of all processes, after one was lost
_BEGUN, _ERROR, _RESULT = "begun", "error", "result.json"  # files by which attempts and the command know of each other


class Work(TypedDict):
    """What a worker is told."""

    config: TrainConfig
    resume: bool
    restart: bool
    accept: bool
    quiet: bool  # nothing is printed
    notes: str  # a folder that all share, for as long as the command lasts
    folder: str
    argv: list[str]  # of the command, which the run remembers
    versions: dict[str, str]


def run(
    config: TrainConfig,
    address: str | None = None,
    processes: int | None = None,
    *,
    resume: bool = False,
    restart: bool = False,
    accept: bool = False,
    quiet: bool = False,
) -> Result:
    """Train in the processes of a Ray cluster; the run, in a folder or at a URL, is as torchrun would leave it."""
    out = config.out if is_url(config.out) else str(Path(config.out).absolute())
    with connected(address, processes, config.device, shown=not quiet) as cluster, _shared(out) as notes:
        work = Work(
            config=config.replace(out=out),
            resume=resume,
            restart=restart,
            accept=accept,
            quiet=quiet,
            notes=str(notes),
            folder=os.getcwd(),
            argv=sys.argv,
            versions=versions(),
        )
        trainer = TorchTrainer(
            _work,
            train_loop_config=dict(work),
            torch_config=TorchConfig(backend="cuda:nccl,cpu:gloo" if cluster.gpus else "gloo"),
            scaling_config=ray_train.ScalingConfig(num_workers=cluster.processes, use_gpu=cluster.gpus),
            run_config=ray_train.RunConfig(
                name="ray", storage_path=str(notes), failure_config=ray_train.FailureConfig(max_failures=RESTARTS)
            ),
        )
        _fit(trainer, notes, config.out)
        about = read_json(notes / _RESULT)
    known = {field.name for field in fields(Result)}
    about |= {"out": workplace(config.out), "score": Metric(**about["score"])}
    return Result(**{name: value for name, value in about.items() if name in known})


def _fit(trainer: TorchTrainer, notes: Path, out: str) -> None:
    failure = None
    try:
        trainer.fit()
    except Exception as e:  # Ray has a class for each way in which its parts may fail
        failure = e
    if (notes / _ERROR).is_file():
        raise TrainError((notes / _ERROR).read_text(encoding="utf-8")) from failure
    if failure is not None:
        what = f"the run in {out} was given up after {RESTARTS} restarts ({reason_of(failure)})"
        raise TrainError(f"{what}; its checkpoints are kept: --resume continues") from failure


@contextmanager
def _shared(out: str) -> Iterator[Path]:
    """A folder that all machines share anyway: in that of the run, or for a URL where the command was started."""
    run = Path.cwd() / f".vitkit-{workplace(out).parent.name}" if is_url(out) else Path(out)
    notes, empty = run / ".ray", not run.exists()
    with only_one(run.with_name(f".{run.name}.ray.lock"), f"the run in {out}", "choose another folder with --out"):
        shutil.rmtree(notes, ignore_errors=True)
        notes.mkdir(parents=True)
        try:
            yield notes
        finally:
            shutil.rmtree(notes, ignore_errors=True)
            if empty and not any(run.iterdir()):
                run.rmdir()


def _work(work: Work) -> None:
    """In each process. An error of the user's ends the command after one restart, in which everybody sees it."""
    notes, config = Path(work["notes"]), work["config"]
    if (notes / _ERROR).is_file():
        return
    try:
        sys.argv = work["argv"]
        join_driver(work["folder"], work["versions"])
        world = join(config.device)
        again = world.share((notes / _BEGUN).is_file() if world.first else False)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1" if again else "0"  # then the run resumes by itself
        if world.first:
            write_text(notes / _BEGUN, "")
        view: Watcher = Watcher() if work["quiet"] else PlainView()
        resume, restart, accept = work["resume"], work["restart"], work["accept"]
        result = train(config, resume=resume, restart=restart, accept_changed_data=accept, watcher=view)
        if world.first:
            write_json(notes / _RESULT, {**read_json(result.out / "result.json"), "score": asdict(result.score)})
    except PeerGone:  # a reason for Ray to start everybody again
        raise
    except VitkitError as e:
        if notes.is_dir():
            write_text(notes / _ERROR, str(e))
        raise
