"""What a run must remember to go on as if nothing had happened, and the models it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from vitkit.checkpoints.native import save
from vitkit.errors import CheckpointError
from vitkit.model.build import outline
from vitkit.train.adapters import plain
from vitkit.train.checkpoint import read_state
from vitkit.train.world import whole

if TYPE_CHECKING:
    from vitkit.train.loop import Loop

_NUMBERS = ("step", "skipped", "bad_in_a_row", "evaluations_done", "evaluation_seconds", "evaluation_total")


def state_of(loop: Loop) -> dict[str, Any]:
    """Numbers always; tensors unless the run is sharded, when `save_sharded` writes them in parts."""
    parts = loop.parts
    state: dict[str, Any] = {name: getattr(loop, name) for name in _NUMBERS}
    state |= {"elapsed": loop.elapsed, "window": list(loop.window), "best": loop.best, "validation": loop.validation}
    state |= {"loader": _position(loop), "scaler": parts.scaler.state_dict()}
    if not loop.config.shard:
        state["model"] = parts.model.state_dict()
        state["optimizers"] = [o.state_dict() for o in parts.optimizers]
        state["average"] = parts.average.model.state_dict() if parts.average is not None else None
    return state


def _position(loop: Loop) -> dict[str, int]:
    """The next batch. A loader that has just given the last batch of an epoch has not turned the page yet."""
    epoch, step = divmod(loop.step, len(loop.parts.loader))
    return {"epoch": epoch, "step": step}


def restore(loop: Loop, folder: Path) -> None:
    try:
        put_back(loop, read_sharded(loop, folder) if loop.config.shard else read_state(folder))
    except (KeyError, ValueError, RuntimeError) as e:
        raise CheckpointError(f"{folder} does not fit this run ({e}); was --shard or the model changed?") from e


def put_back(loop: Loop, state: dict[str, Any]) -> None:
    """The other way round than `state_of`."""
    parts = loop.parts
    for name in _NUMBERS:
        setattr(loop, name, state[name])
    loop.elapsed_before, loop.window = state["elapsed"], list(state["window"])
    loop.best, loop.validation = state["best"], state["validation"]
    parts.loader.load_state_dict(state["loader"])
    parts.scaler.load_state_dict(state["scaler"])
    if not loop.config.shard:
        parts.model.load_state_dict(state["model"])
        for optimizer, saved in zip(parts.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if parts.average is not None:
            parts.average.model.load_state_dict(state["average"])


def _sharded_tensors(loop: Loop) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    parts = loop.parts
    tensors: dict[str, Any] = {"model": get_model_state_dict(parts.model)}
    tensors["optimizers"] = {str(i): get_optimizer_state_dict(parts.model, o) for i, o in enumerate(parts.optimizers)}
    if parts.average is not None:
        tensors["average"] = get_model_state_dict(parts.average.model)
    return tensors


def save_sharded(loop: Loop, numbers: dict[str, Any]) -> None:
    """Every process writes its part; the first one seals the folder."""
    import torch.distributed.checkpoint as dcp

    tensors = _sharded_tensors(loop)
    folder = loop.keeper.folder / f".shards-{loop.step:09d}"
    dcp.save(tensors, checkpoint_id=str(folder))
    loop.world.wait()
    if loop.world.first:

        def fill(into: Path) -> None:
            folder.rename(into / "shards")
            (into / "numbers.json").write_text(json.dumps(numbers))

        loop.keeper.save_with(loop.step, fill)
    loop.world.wait()


def read_sharded(loop: Loop, folder: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    parts = loop.parts
    tensors = _sharded_tensors(loop)
    dcp.load(tensors, checkpoint_id=str(folder / "shards"))
    set_model_state_dict(parts.model, tensors["model"])
    for i, optimizer in enumerate(parts.optimizers):
        set_optimizer_state_dict(parts.model, optimizer, tensors["optimizers"][str(i)])
    if parts.average is not None:
        set_model_state_dict(parts.average.model, tensors["average"])
    numbers: dict[str, Any] = json.loads((folder / "numbers.json").read_text())
    return numbers


def save_model(loop: Loop, path: Path) -> None:
    """The judged weights as a native file, without adapters, put together from all processes."""
    average = loop.parts.average
    judged: nn.Module = average.model if average is not None else loop.parts.model
    if loop.config.shard:
        tensors = {name: whole(t).cpu() for name, t in judged.state_dict().items()}  # every process takes part
        if not loop.world.first:
            return
        judged = outline(loop.parts.model.config)
        judged.load_state_dict(tensors, assign=True)
    if loop.world.first:
        save(plain(judged), path, loop.parts.class_names)  # type: ignore[arg-type]
