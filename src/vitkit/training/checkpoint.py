"""What a run must remember to resume as if nothing had happened, on disk; and the models it leaves behind.

A checkpoint is a folder `step-NNNNNNNNN` with `state.pt` (or the files of torch.distributed.checkpoint
when the run is sharded) and `about.json`, which holds the checksums of all the others and is written
last. The folder is written in the background and appears under its name only when all of it is on disk.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitkit.checkpoints import sharded
from vitkit.checkpoints.native import save
from vitkit.checkpoints.step import ABOUT, SHARDS, STATE, damaged, describe
from vitkit.data import Batch
from vitkit.errors import CheckpointError
from vitkit.io import move, read_json, replacing_folder, sha256
from vitkit.model.build import outline
from vitkit.progress import SILENT, Progress
from vitkit.training.parts import plain

if TYPE_CHECKING:
    from vitkit.training.loop import Loop

State = dict[str, Any]  # numbers, tensors, and dicts and lists of them
_NUMBERS = ("step", "skipped", "bad_in_a_row", "evaluations_done", "evaluation_seconds", "evaluation_total")


def snapshot(value: object) -> object:
    """A copy in this process's own memory, so that training continues while it is written."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: snapshot(v) for k, v in value.items()}
    return [snapshot(v) for v in value] if isinstance(value, (list, tuple)) else value


class Keeper:
    """Writes checkpoints into a folder and keeps the last `keep` of them; `after` is called after each."""

    def __init__(self, folder: Path, keep: int = 2, after: Callable[[], None] | None = None) -> None:
        self.folder, self.keep, self.after = folder, keep, after
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(
        self, step: int, state: State, background: bool = True, more: Callable[[Path], None] = lambda folder: None
    ) -> None:
        """Copy the state and write it, and what `more` adds; a failure of an earlier write is raised here."""
        self.finish()
        copy = snapshot(state)

        def fill(folder: Path) -> None:
            save_torch(copy, folder / STATE)
            more(folder)

        self.save_with(step, fill, background)

    def save_with(self, step: int, fill: Callable[[Path], None], background: bool = False) -> None:
        """Write by a function that fills the folder."""
        self.finish()
        self._thread = threading.Thread(target=self._write, args=(step, fill))
        self._thread.start()
        if not background:
            self.finish()

    def finish(self) -> None:
        """Wait for what is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if isinstance(failure, OSError):
            raise not_written(self.folder, failure) from failure
        if failure is not None:
            raise failure

    def _write(self, step: int, fill: Callable[[Path], None]) -> None:
        try:
            for unfinished in self.folder.glob(".step-*"):  # of a process that was killed
                shutil.rmtree(unfinished, ignore_errors=True)
            with replacing_folder(self.path(step)) as part:
                fill(part)
                seal(part, step)
            _sync(self.folder)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(old), ignore_errors=True)
            if self.after is not None:
                self.after()
        except BaseException as e:
            self._failure = e

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, oldest first."""
        return sorted(int(p.name[5:]) for p in self.folder.glob("step-*") if p.name[5:].isdigit())

    def newest(self, progress: Progress = SILENT) -> Path | None:
        """The newest checkpoint whose files are as they were written; damaged ones are named and put aside.

        None when none was written yet; an error when all are damaged.
        """
        problems: dict[int, str] = {}
        for step in reversed(self.steps()):
            if not (damage := damaged(self.path(step))):
                for bad, why in problems.items():
                    kept = f"it is kept as {self.put_aside(bad)}, and the one before it is used"
                    progress.note(f"the checkpoint of step {bad} is damaged ({why}); {kept}")
                return self.path(step)
            problems[step] = damage
        if problems:
            words = "; ".join(f"step {step}: {why}" for step, why in problems.items())
            what = f"every checkpoint in {self.folder} is damaged ({words}). Restore one from a copy"
            raise CheckpointError(f"{what}, or add --restart: it keeps them aside and starts at the first step")
        return None

    def put_aside(self, step: int) -> Path:
        """Out of the way, under a name of its own; nothing is removed."""
        number = next(n for n in count() if not self.folder.joinpath(f"aside-{step:09d}-{n}").exists())
        move(self.path(step), kept := self.folder / f"aside-{step:09d}-{number}")
        return kept


def not_written(folder: Path, failure: OSError) -> CheckpointError:
    why = f"a checkpoint could not be written to {folder} ({failure.strerror or failure})"
    action = "Free some space" if failure.errno == errno.ENOSPC else "Fix that"
    return CheckpointError(f"{why}; earlier ones are intact. {action}; a run that has ended continues with --resume")


def seal(folder: Path, step: int) -> None:
    """Force everything to disk and write the checksums beside it."""
    sums = {p.relative_to(folder).as_posix(): sha256(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    about = folder / ABOUT
    about.write_text(json.dumps({"version": 1, "step": step, "sha256": sums}))
    for path in (*(folder / name for name in sums), about):
        _sync(path)
    _sync(folder)


def save_torch(value: object, path: Path) -> None:
    """Through a file of Python's: then the error says what the disk said, which PyTorch's own writer does not."""
    with path.open("wb") as file:
        torch.save(value, file)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- what is remembered -----------------------------------------------------------------------------


def state_of(loop: Loop) -> State:
    """Numbers always; tensors unless the run is sharded, when `save_sharded` writes them in parts."""
    parts = loop.parts
    state: State = {name: getattr(loop, name) for name in _NUMBERS}
    state |= {"elapsed": loop.elapsed, "window": list(loop.window), "best": loop.best, "validation": loop.validation}
    state |= {"start": loop.at_start, "begun": loop.begun, "learned": loop.learned}
    state |= {} if loop.pace is None else {"threads": loop.pace.now}
    state |= {"curve": [list(point) for point in loop.curve]}
    epoch, step = divmod(loop.step, len(parts.loader))  # of the next batch, also right after the last of an epoch
    state["loader"] = {**parts.loader.state_dict(), "epoch": epoch, "step": step}
    state["scaler"] = parts.scaler.state_dict()
    if not loop.config.shard:
        state["model"] = parts.model.state_dict()
        state["optimizers"] = [o.state_dict() for o in parts.optimizers]
        state["average"] = parts.average.model.state_dict() if parts.average is not None else None
        state["task"] = task_state(loop)
    return state


def task_state(loop: Loop) -> dict[str, Tensor]:
    """Of the modules that the task adds to the model."""
    return {k: v for k, v in loop.parts.trainee.state_dict().items() if not k.startswith("model.")}


def restore(loop: Loop, folder: Path, accept_order: bool = False) -> None:
    try:
        if loop.config.shard:
            state = read_sharded(loop, folder)
        else:
            state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        put_back(loop, state, accept_order)
    except pickle.UnpicklingError as e:
        raise CheckpointError(f"{folder / 'state.pt'} holds Python objects beside numbers, which are not read") from e
    except CheckpointError as e:  # of a sharded one; torch.distributed may have wrapped it
        raise CheckpointError(f"{folder} is not used: {e}. Fetch the run again, or start in another folder") from e
    except (KeyError, ValueError, RuntimeError, TypeError, AttributeError, OSError) as e:
        raise CheckpointError(f"{folder} does not fit this run ({e}); was --shard or the model changed?") from e


def put_back(loop: Loop, state: State, accept_order: bool = False) -> None:
    """The other way round than `state_of`."""
    parts = loop.parts
    for name in _NUMBERS:
        setattr(loop, name, state[name])
    loop.elapsed_before, loop.window = state["elapsed"], list(state["window"])
    loop.begun, loop.learned = (float(state.get(name, 0.0)) for name in ("begun", "learned"))  # 0.1 had neither
    if loop.pace is not None and "threads" in state:
        loop.pace.take(int(state["threads"]))
    loop.curve = [(float(progress), float(score)) for progress, score in state.get("curve", [])]
    loop.best, loop.validation, loop.at_start = state["best"], state["validation"], state.get("start", {})
    parts.loader.load_state_dict(state["loader"], accept_order)
    parts.scaler.load_state_dict(state["scaler"])
    if not loop.config.shard:
        parts.model.load_state_dict(state["model"])
        for optimizer, saved in zip(parts.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if parts.average is not None:
            parts.average.model.load_state_dict(state["average"])
        if task := state.get("task"):  # version 0.1 had none
            parts.trainee.load_state_dict(task, strict=False)


def _sharded_tensors(loop: Loop) -> State:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    parts = loop.parts
    tensors: State = {"model": get_model_state_dict(parts.model)}
    learner = parts.trainee if task_state(loop) else parts.model
    tensors["optimizers"] = {str(i): get_optimizer_state_dict(learner, o) for i, o in enumerate(parts.optimizers)}
    if learner is parts.trainee:
        tensors["task"] = {k: v for k, v in get_model_state_dict(learner).items() if not k.startswith("model.")}
    if parts.average is not None:
        tensors["average"] = get_model_state_dict(parts.average.model)
    return tensors


def save_sharded(loop: Loop, numbers: State) -> None:
    """Every process writes its part; the first one seals the folder."""
    tensors = _sharded_tensors(loop)
    folder = loop.keeper.folder / f".shards-{loop.step:09d}"
    try:
        sharded.save(tensors, folder)  # of one that fails, all processes hear
    except OSError as e:
        if loop.world.first:
            shutil.rmtree(folder, ignore_errors=True)
        raise not_written(loop.keeper.folder, e) from e
    loop.world.wait()
    if loop.world.first:

        def fill(into: Path) -> None:
            move(folder, into / SHARDS)
            describe(into, loop.parts.model, loop.parts.task.outputs)
            (into / "numbers.json").write_text(json.dumps(numbers))

        loop.keeper.save_with(loop.step, fill)
    loop.world.wait()


def read_sharded(loop: Loop, folder: Path) -> State:
    from torch.distributed.checkpoint import state_dict as dicts

    parts, tensors = loop.parts, _sharded_tensors(loop)
    sharded.load(tensors, folder / SHARDS)
    dicts.set_model_state_dict(parts.model, tensors["model"])
    if "task" in tensors:
        dicts.set_model_state_dict(parts.trainee, tensors["task"], options=dicts.StateDictOptions(strict=False))
    for i, optimizer in enumerate(parts.optimizers):
        learner = parts.trainee if "task" in tensors else parts.model
        dicts.set_optimizer_state_dict(learner, optimizer, tensors["optimizers"][str(i)])
    if parts.average is not None:
        dicts.set_model_state_dict(parts.average.model, tensors["average"])
    return read_json(folder / "numbers.json")


def save_model(loop: Loop, path: Path) -> None:
    """The evaluated weights as a native file, without adapters, put together from all processes."""
    model = loop.parts.trainee.kept if loop.parts.average is None else loop.parts.average.model
    if loop.config.shard:
        parts = model.state_dict().items()  # put together by all processes
        tensors = {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).cpu() for k, v in parts}
        if not loop.world.first:
            return
        model = outline(loop.parts.model.config)
        model.load_state_dict(tensors, assign=True)
        model.outputs = loop.parts.task.outputs
    if loop.world.first:
        save(plain(model), path)


def save_replay(folder: Path, loop: Loop, batch: Batch) -> None:
    """A step that went wrong, with all it needs to be run again."""
    with replacing_folder(folder) as part:
        (part / "config.json").write_text(loop.config.to_json())
        kept = {"images": batch.images, "labels": batch.labels, "indices": batch.indices}
        kept["keys"] = torch.from_numpy(batch.keys.view("int64").copy())
        save_torch({"state": snapshot(state_of(loop)), "batch": kept}, part / "step.pt")
