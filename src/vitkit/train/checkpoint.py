"""The state of a run on disk: atomic, checked by checksum, written in the background.

A checkpoint is a folder `step-NNNNNNNNN` with `state.pt` (or the files of torch.distributed.checkpoint
when the run is sharded) and `about.json`, which holds the checksums of all the others and is written
last. The folder appears under its name only when everything in it is on disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CheckpointError

State = dict[str, Any]


def snapshot(value: Any) -> Any:
    """A copy in this process's own memory, so that training can go on while it is written."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: snapshot(v) for k, v in value.items()}
    return [snapshot(v) for v in value] if isinstance(value, (list, tuple)) else value


class Keeper:
    """Writes checkpoints into a folder and keeps the last `keep` of them."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, step: int, state: State, background: bool = True) -> None:
        """Copy the state and write it; a failure of an earlier background write is raised here."""
        self.finish()
        copy = snapshot(state)
        self._thread = threading.Thread(target=self._write, args=(step, lambda f: torch.save(copy, f / "state.pt")))
        self._thread.start()
        if not background:
            self.finish()

    def save_with(self, step: int, fill: Callable[[Path], None]) -> None:
        """Write now, by a function that fills the folder."""
        self.finish()
        self._write(step, fill)
        self.finish()

    def finish(self) -> None:
        """Wait for what is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if isinstance(failure, OSError):
                full = failure.errno == errno.ENOSPC
                raise CheckpointError(
                    f"a checkpoint could not be written to {self.folder} ({failure.strerror or failure}); earlier ones "
                    f"are intact. {'Free some space' if full else 'Mend that'} and go on with --resume"
                ) from failure
            raise failure

    def _write(self, step: int, fill: Callable[[Path], None]) -> None:
        final = self.path(step)
        part = final.with_name(f".{final.name}.part")
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            fill(part)
            seal(part, step)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(part, final)
            _sync(self.folder)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(old), ignore_errors=True)
        except BaseException as e:
            self._failure = e
            shutil.rmtree(part, ignore_errors=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, oldest first."""
        return sorted(int(p.name[5:]) for p in self.folder.glob("step-*") if p.name[5:].isdigit())

    def newest(self, tell: Callable[[str], None] = lambda _: None) -> Path | None:
        """The newest checkpoint whose files are as they were written; damaged ones are named and passed over."""
        for step in reversed(self.steps()):
            damage = damaged(self.path(step))
            if not damage:
                return self.path(step)
            tell(f"the checkpoint of step {step} is damaged ({damage}); the one before it is used")
        return None


def seal(folder: Path, step: int) -> None:
    """Force everything to disk and write the checksums beside it."""
    sums = {p.relative_to(folder).as_posix(): _checksum(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    about = folder / "about.json"
    about.write_text(json.dumps({"version": 1, "step": step, "sha256": sums}))
    for path in (*(folder / name for name in sums), about):
        _sync(path)
    _sync(folder)


def damaged(folder: Path) -> str:
    """What is wrong with a checkpoint, in words; "" when nothing is."""
    try:
        sums = json.loads((folder / "about.json").read_text())["sha256"]
        for name, expected in sums.items():
            if _checksum(folder / name) != expected:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def read_state(folder: Path) -> State:
    return torch.load(folder / "state.pt", map_location="cpu", weights_only=True)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _by_blocks(file)


def _by_blocks(file: Any) -> str:  # Python 3.10 has no file_digest
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
