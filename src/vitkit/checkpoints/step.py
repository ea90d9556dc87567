"""A step of a run, `RUN/checkpoints/step-N`, as a checkpoint: sharded over any number of processes, or in one file.

`model.json` beside the state says which model it is. Only the weights are read, the averaged ones where there are
any, without running a pickle (`sharded.py`), in one process.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vitkit.checkpoints import sharded
from vitkit.checkpoints.family import Checkpoint, read_json
from vitkit.checkpoints.native import KINDS
from vitkit.errors import CheckpointError
from vitkit.io import parse_json, read_regular, sha256, write_json
from vitkit.model.base import Outputs, VisionModel

MODEL = "model.json"
ABOUT = "about.json"  # checksums of all other files
SHARDS, STATE = "shards", "state.pt"
_AVERAGE, _LEARNING = "average", "model"  # what weights are called in the state of a run


def is_step(path: Path) -> bool:
    return path.is_dir() and (path / ABOUT).is_file() and ((path / SHARDS).is_dir() or (path / STATE).is_file())


def describe(folder: Path, model: VisionModel, outputs: Outputs) -> None:
    about = {"kind": model.config.kind, "config": model.config.to_dict(), "outputs": outputs.to_dict()}
    write_json(folder / MODEL, about)


def read_step(path: Path) -> Checkpoint:
    if damage := damaged(path):
        raise CheckpointError(f"it is damaged ({damage}); take another step of the run")
    if not (path / MODEL).is_file():
        raise CheckpointError("an earlier version wrote it, without model.json; resume the run once, then try again")
    about = read_json(path / MODEL)
    kind, config, outputs = about.get("kind"), about.table("config"), about.table("outputs")
    if kind not in KINDS:
        raise CheckpointError(f"its {MODEL} names a model of kind {kind!r}; known are {', '.join(KINDS)}")
    which, tensors = _from_shards(path / SHARDS) if (path / SHARDS).is_dir() else _from_file(path / STATE)
    if any(".parametrizations." in name for name in tensors):
        raise CheckpointError("it holds low-rank updates beside the weights; use best.safetensors of the run")
    notes = [
        f"read from step {int(path.name[5:])} of a run" if path.name[5:].isdigit() else "read from a step of a run"
    ]
    notes += ["the averaged weights"] if which == _AVERAGE else []
    return Checkpoint(KINDS[str(kind)].from_dict(config), tensors, Outputs.from_dict(outputs), notes)


def _from_shards(folder: Path) -> tuple[str, dict[str, Tensor]]:
    outlines = sharded.outlines(folder)
    which = _AVERAGE if any(name.startswith(f"{_AVERAGE}.") for name in outlines) else _LEARNING
    wanted = {name.removeprefix(f"{which}."): t for name, t in outlines.items() if name.startswith(f"{which}.")}
    own = {name: torch.empty_like(outline, device="cpu") for name, outline in wanted.items()}
    sharded.load({which: own}, folder, alone=True)
    return which, own


def _from_file(path: Path) -> tuple[str, dict[str, Tensor]]:
    state = torch.load(path, map_location="cpu", weights_only=True)
    which = _AVERAGE if state.get(_AVERAGE) is not None else _LEARNING
    return which, dict(state[which])


def damaged(folder: Path) -> str:
    """What is wrong with a checkpoint, in words; "" when nothing is."""
    try:
        sums = parse_json(read_regular(folder / ABOUT))["sha256"]
        there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {ABOUT}
        if other := there ^ set(sums):
            return f"{sorted(other)[0]} is missing, or does not belong to it"
        return next((f"{name} does not match its checksum" for name in sums if sha256(folder / name) != sums[name]), "")
    except (OSError, ValueError, KeyError, TypeError) as e:
        return f"{type(e).__name__}: {e}"
