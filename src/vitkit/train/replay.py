"""A step whose loss was not finite, kept with all it needs to be run again: `vitkit replay DIR`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vitkit.checkpoints.write import replacing_folder
from vitkit.data import Batch
from vitkit.errors import TrainError
from vitkit.train.checkpoint import snapshot
from vitkit.train.config import TrainConfig


def save_replay(folder: Path, config: TrainConfig, state: dict[str, Any], batch: Batch) -> None:
    with replacing_folder(folder) as part:
        (part / "config.json").write_text(config.to_json())
        kept = {"images": batch.images, "labels": batch.labels, "indices": batch.indices}
        kept["keys"] = torch.from_numpy(batch.keys.view("int64").copy())
        torch.save({"state": snapshot(state), "batch": kept}, part / "step.pt")


def read_replay(folder: Path) -> tuple[TrainConfig, dict[str, Any], Batch]:
    if (folder / "log.jsonl").exists():  # the folder of a run was given
        if not (folder / "replay").is_dir():
            raise TrainError(f"no step of the run in {folder} went wrong: there is nothing to replay")
        folder /= "replay"
    try:
        config = TrainConfig.from_dict(json.loads((folder / "config.json").read_text()))
        kept = torch.load(folder / "step.pt", map_location="cpu", weights_only=True)
    except (OSError, ValueError) as e:
        raise TrainError(
            f"{folder} holds no replay ({e}); one is made when a run stops because its loss is not finite"
        ) from e
    parts = kept["batch"]
    keys = parts["keys"].numpy().view("uint64")
    return config, kept["state"], Batch(parts["images"], parts["labels"], parts["indices"], keys)


def replay(folder: Path) -> list[str]:
    """Run the step again, layer by layer, and say where the first number went wrong."""
    from vitkit.data import open_data
    from vitkit.train import world as worlds
    from vitkit.train.loop import Loop, Watcher
    from vitkit.train.parts import assemble
    from vitkit.train.state import put_back

    config, state, batch = read_replay(folder)
    source = open_data(config.data, "train")
    parts = assemble(config.replace(compile="no", shard=False), worlds.join(config.device), source, lambda _: None)
    loop = Loop(parts, Watcher(), 0.0)
    put_back(loop, state)
    wrong: list[str] = []

    def look(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor) and not tensor.isfinite().all():
                wrong.append(name)

        return hook

    handles = [m.register_forward_hook(look(n)) for n, m in parts.model.named_modules() if n]
    weights = [n for n, p in parts.model.named_parameters() if not p.isfinite().all()]
    images, targets = loop.inputs(batch, loop.progress() if config.steps else 0.5)
    loss = loop.backward(images, targets).item()
    for handle in handles:
        handle.remove()
    lines = [f"step {loop.step}: loss {loss}, {len(batch)} pictures, indices {batch.indices[:8].tolist()} ..."]
    lines.append(f"pictures: {images.min():.3g} to {images.max():.3g}, all finite: {bool(images.isfinite().all())}")
    lines.append(f"weights that are not finite: {', '.join(weights[:5]) or 'none'}")
    lines.append(f"first layer whose output is not finite: {wrong[0] if wrong else 'none'}")
    return lines
