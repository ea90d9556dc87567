"""One training of a study: what it is, what came out, and the small file that remembers it.

A run is described by values alone; the hash of the description is the name of its file. So a study that
was killed finds what it had finished, and studies in one folder share the trainings they have in common.

The recipe is the same for every model: AdamW, a linear warm-up and a cosine, clipped gradients; no augmentation unless
an arm asks for it.
The start of the weights and the order of the images follow from the seed alone, so two models of one seed see the
same batches. Every training has one thread, so that its result repeats to the last bit; several run side by side.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, repeat
from multiprocessing import active_children, get_context
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from vitkit.checkpoints.family import Checkpoint
from vitkit.checkpoints.load import adapt
from vitkit.checkpoints.options import ModelOptions
from vitkit.data import Loader, normalise
from vitkit.data.augment import drop_unsafe_flip, preset
from vitkit.data.loader import begin
from vitkit.errors import DataError
from vitkit.io import canonical, read_json, write_bytes, write_json
from vitkit.model.build import Model, build
from vitkit.model.config import AnyConfig, ViTConfig
from vitkit.plan.memory import Step
from vitkit.study import variants
from vitkit.study.measures import MEASURES, Measured, scored
from vitkit.study.sets import Sets, open_sets, resized
from vitkit.study.table import BATCH
from vitkit.tasks import Settings
from vitkit.tasks.table import task_of_data
from vitkit.training.config import TrainConfig
from vitkit.training.optim import rate
from vitkit.training.parts import add_lora, freeze

RANK = 4  # of low-rank updates
AFTER = 1_000_000  # added to the seed of what follows a training, so that fresh parts are not its first ones again
WARMUP = 0.1  # share of the steps
VERSION = 1  # of the recipe: with another one, all runs are trained again


@dataclass(frozen=True)
class Outcome:
    accuracy: float
    measured: Measured
    losses: list[float]  # of every step
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Run:
    """Fields that are an arm's too mean the same here."""

    config: AnyConfig
    steps: int
    lr: float
    seed: int
    variant: str = ""
    share: float = 1.0  # of the training images
    augment: str = "none"
    classes: tuple[int, ...] = ()
    task: str = ""
    learns: str = ""
    parts: int = 1
    split: str = field(default="test", metadata={"key": "judged"})  # that it is evaluated on; a rate is chosen on "val"
    measure: str = ""  # a name of MEASURES
    before: Run | None = None  # a training whose weights this one starts from, its positions resized if need be
    fresh_positions: bool = False  # after `before`: positions are trained from scratch instead of resized

    def describe(self, sets: Sets) -> dict[str, object]:
        """Everything that the result depends on."""
        return {**_chosen(self), "data": sets.describe(), "batch": BATCH, "version": VERSION}

    def key(self, sets: Sets) -> str:
        return hashlib.blake2b(canonical(self.describe(sets)).encode(), digest_size=8).hexdigest()


def _chosen(value: object) -> dict[str, object]:
    """A dataclass as its kind and the fields that are not at their defaults: a field added later changes no key."""
    chosen: dict[str, object] = {"kind": type(value).__name__}
    for f in dataclasses.fields(value):  # type: ignore[arg-type]
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if (own := getattr(value, f.name)) != default:
            chosen[f.metadata.get("key", f.name)] = _chosen(own) if dataclasses.is_dataclass(own) else own
    return chosen


def recall(run: Run, sets: Sets, folder: Path) -> Outcome | None:
    """The outcome of a finished run, or None."""
    try:
        known = read_json(folder / f"{run.key(sets)}.json")["result"]
        outcome = {key: known.pop(key) for key in ("accuracy", "losses", "seconds", "cpu_seconds")}
        return Outcome(**outcome, measured=known)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def finish(run: Run, sets: Sets, folder: Path, keep: bool = False) -> Outcome:
    """Train, evaluate, and remember the outcome; `keep`: and the weights, from which others start."""
    wall, cpu = time.perf_counter(), time.process_time()
    model, losses = _trained(run, sets, folder)
    if keep:
        write_bytes(_file(run, sets, folder), save(model.state_dict()))
    chosen = sets.of(run.classes)
    score = scored(model, chosen, run.split)
    measured = MEASURES[run.measure](model, chosen) if run.measure else {}
    outcome = Outcome(score, measured, losses, time.perf_counter() - wall, time.process_time() - cpu)
    flat = {k: v for k, v in {"accuracy": score, **measured, **vars(outcome)}.items() if k != "measured"}
    write_json(folder / f"{run.key(sets)}.json", {"run": run.describe(sets), "result": flat}, indent=1)
    return outcome


class Trainer:
    """Finishes what is not remembered, so many at a time, each on one thread."""

    def __init__(self, sets: Sets, folder: Path, workers: int) -> None:
        self.sets, self.folder, self.workers = sets, folder, workers
        self.pool: ProcessPoolExecutor | None = None
        self.threads = torch.get_num_threads()

    def __enter__(self) -> Trainer:
        torch.set_num_threads(1)
        if self.workers > 1:  # not forked: autograd has threads of its own by then
            self.pool = ProcessPoolExecutor(self.workers, get_context("spawn"), _ready)
        return self

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self.threads)
        if self.pool is not None:
            if any(error):  # nobody waits for what is under way: it is remembered whole, or not at all
                for process in active_children():
                    process.kill()
            self.pool.shutdown(cancel_futures=True)

    def __call__(self, runs: Sequence[Run]) -> Iterator[tuple[int, Outcome, bool]]:
        """Each run's number, its outcome, and whether it was remembered, as they come."""
        missing: dict[Run, list[int]] = {}
        for number, run in enumerate(runs):
            if (known := recall(run, self.sets, self.folder)) is not None:
                yield number, known, True
            else:
                missing.setdefault(run, []).append(number)
        first = {run.before: True for run in missing if run.before is not None}
        wanted = [run for run in first if not _file(run, self.sets, self.folder).exists()]
        for keep in (True, False):
            for run, outcome in self._finished(wanted if keep else [*missing], keep):
                yield from ((number, outcome, False) for number in missing.pop(run, []))

    def _finished(self, runs: Sequence[Run], keep: bool) -> Iterator[tuple[Run, Outcome]]:
        if self.pool is None:
            yield from ((run, finish(run, self.sets, self.folder, keep)) for run in runs)
            return
        try:
            waiting = {self.pool.submit(_finish, run, self.sets.name, self.folder, keep): run for run in runs}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        except BrokenProcessPool as e:
            what = "a training process was killed, perhaps for want of memory"
            raise DataError(f"{what}; the same command goes on, --workers 1 with less") from e


def _ready() -> None:
    begin(0)
    torch.set_num_threads(1)


def _finish(run: Run, data: str, folder: Path, keep: bool) -> Outcome:
    return finish(run, open_sets(data), folder, keep)


def train_config(lr: float, parts: int = 1) -> TrainConfig:
    return TrainConfig(optimizer="adamw", lr=lr, weight_decay=0.05, clip=1.0, accumulate=parts)


def _trained(run: Run, sets: Sets, folder: Path | None = None) -> tuple[Model, list[float]]:
    """The model and the loss of every step. A loss that is not finite ends the training."""
    model, losses = start(run, sets, folder), list[float]()
    if not run.steps:
        return model, losses
    source = resized(sets.of(run.classes).part(run.share, run.seed), run.config.image_size[0])
    pre, augment = model.config.preprocessing, drop_unsafe_flip(preset(run.augment), source.flip_safe)
    method, _, loss = run.task.partition(":")
    task = task_of_data(source, method, Settings(loss=loss, augment=augment))
    torch.manual_seed(run.seed)  # of what the task adds
    step = Step(model, train_config(run.lr, run.parts), task)
    loader = Loader(source, pre, BATCH, augment=augment, seed=run.seed)
    torch.manual_seed(run.seed)  # of dropout
    for done, batch in zip(range(run.steps), chain.from_iterable(repeat(loader)), strict=False):  # epoch after epoch
        for group in step.optimizers[0].param_groups:
            group["lr"] = run.lr * rate(done / run.steps, WARMUP, "cosine")
        losses.append(step.backward(*task.targets(normalise(batch.images, pre), batch.labels, batch.keys)))
        if not math.isfinite(losses[-1]):
            break
        step.update()
        step.trainee.after_step(done / run.steps)
        step.trainee.zero_grad()
    return step.trainee.kept, losses


def start(run: Run, sets: Sets, folder: Path | None = None) -> Model:
    """The model before its first step."""
    torch.manual_seed(run.seed if run.before is None else run.seed + AFTER)
    model = build(run.config)
    variants.apply(model, run.variant)
    if run.before is not None:
        _take_over(model, run, _weights(run.before, sets, folder))
    freeze(model, "backbone" if run.learns == "head" else "")
    add_lora(model, RANK if run.learns == "lora" else 0)
    return model


def _take_over(model: Model, run: Run, weights: dict[str, torch.Tensor]) -> None:
    """The weights of a training before; what belongs to other classes stays as it is."""
    before = run.before
    assert before is not None
    resize = run.config.position_resize if isinstance(run.config, ViTConfig) else None
    options = ModelOptions(image_size=run.config.image_size, resize=resize)
    tensors = adapt(Checkpoint(before.config, weights), options).tensors
    new = run.classes != before.classes or bool(before.task)
    fresh = tuple(["positions."] * run.fresh_positions + ["head.classifier."] * new)
    missing, extra = model.load_state_dict({k: v for k, v in tensors.items() if not k.startswith(fresh)}, strict=False)
    assert not extra
    assert all(name.startswith(fresh) for name in missing)


def _file(run: Run, sets: Sets, folder: Path) -> Path:
    return folder / f"{run.key(sets)}.safetensors"


def _weights(run: Run, sets: Sets, folder: Path | None) -> dict[str, torch.Tensor]:
    """Kept by `finish`, or trained again: the same seed gives the same weights."""
    if folder is not None:
        with suppress(OSError, SafetensorError):
            return load_file(_file(run, sets, folder))
    return _trained(run, sets, folder)[0].state_dict()
