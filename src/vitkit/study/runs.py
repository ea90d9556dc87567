"""One training of a study: what it is, what came out, and the small file that remembers it.

A run is described by values alone; the hash of the description is the name of its file. So a study that
was killed finds what it had finished, and studies in one folder share the trainings they have in common.
A file appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from vitkit.checkpoints.adapt import adapt
from vitkit.checkpoints.layout import Checkpoint
from vitkit.checkpoints.write import canonical, replacing
from vitkit.model.build import Model, build
from vitkit.model.config import AnyConfig
from vitkit.study import fit, variants
from vitkit.study.measures import MEASURES
from vitkit.study.sets import Sets, resized

AFTER = 1_000_000  # added to the seed of what follows a training, so that fresh parts are not its first ones again
VERSION = 1  # of the recipe: another one makes all runs anew


@dataclass(frozen=True)
class Run:
    """`before` is a training whose weights this one starts from, its positions resized if need be."""

    config: AnyConfig
    steps: int
    lr: float
    seed: int
    variant: str = ""
    share: float = 1.0  # of the training pictures
    judged: str = "test"  # or "val", when a learning rate is chosen
    measure: str = ""  # a name of MEASURES
    before: Run | None = None
    fresh_positions: bool = False  # after `before`: positions are learned anew instead of resized

    def describe(self, sets: Sets) -> dict[str, Any]:
        """Everything that the result depends on."""
        return {**chosen(self), "data": sets.about(), "batch": fit.BATCH, "version": VERSION}

    def key(self, sets: Sets) -> str:
        return hashlib.blake2b(canonical(self.describe(sets)).encode(), digest_size=8).hexdigest()


def chosen(value: Any) -> Any:
    """A dataclass as its kind and the fields that are not at their defaults: a field added later changes no key."""
    if not dataclasses.is_dataclass(value):
        return list(value) if isinstance(value, tuple) else value
    found = {"kind": type(value).__name__}
    for f in dataclasses.fields(value):
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if getattr(value, f.name) != default:
            found[f.name] = chosen(getattr(value, f.name))
    return found


def recall(run: Run, sets: Sets, folder: Path) -> dict[str, Any] | None:
    """What a finished run found, or None."""
    try:
        found = json.loads((folder / f"{run.key(sets)}.json").read_text(encoding="utf-8"))
        return found["result"] if isinstance(found["result"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def finish(run: Run, sets: Sets, folder: Path) -> dict[str, Any]:
    """The result of the run: remembered, or made now and remembered."""
    known = recall(run, sets, folder)
    if known is not None:
        return known
    wall, cpu = time.perf_counter(), time.process_time()
    model, losses = _trained(run, sets)
    result = _judge(run, model, sets)
    result |= {"losses": losses, "seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    content = json.dumps({"run": run.describe(sets), "result": result}, indent=1)
    with replacing(folder / f"{run.key(sets)}.json") as file:
        file.write(content.encode())
    return result


def _trained(run: Run, sets: Sets) -> tuple[Model, list[float]]:
    model = start(run, sets)
    source = resized(sets.part(run.share, run.seed), run.config.image_size[0])
    recipe = fit.Recipe(run.steps, run.lr, run.seed)
    return model, fit.fit(model, source, recipe) if run.steps else []


def start(run: Run, sets: Sets) -> Model:
    """The model before its first step."""
    torch.manual_seed(run.seed if run.before is None else run.seed + AFTER)
    model = build(run.config)
    variants.apply(model, run.variant)
    if run.before is not None:
        _take_over(model, _weights(run.before, sets), run)
    return model


def _take_over(model: Model, weights: dict[str, torch.Tensor], run: Run) -> None:
    assert run.before is not None
    way = getattr(run.config, "position_resize", None)
    given = Checkpoint(run.before.config, weights)
    tensors = adapt(given, image_size=run.config.image_size, resize=way).tensors
    if run.fresh_positions:
        tensors = {k: v for k, v in tensors.items() if not k.startswith("positions.")}
    missing, extra = model.load_state_dict(tensors, strict=False)
    assert not extra
    assert run.fresh_positions or not missing


@lru_cache(maxsize=8)
def _weights(run: Run, sets: Sets) -> dict[str, torch.Tensor]:
    """Training is repeated rather than kept on disk: the same seed gives the same weights."""
    model, _ = _trained(run, sets)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _judge(run: Run, model: Model, sets: Sets) -> dict[str, Any]:
    source = sets.val if run.judged == "val" else sets.test
    source = resized(source, run.config.image_size[0])
    labels = torch.from_numpy(source.labels)
    result: dict[str, Any] = {"accuracy": fit.accuracy(model, source.pixels, labels)}
    if run.measure:
        result |= MEASURES[run.measure](model, sets)
    return result
