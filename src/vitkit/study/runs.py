"""One training of a study: what it is, what came out, and the small file that remembers it.

A run is described by values alone; the hash of the description is the name of its file. So a study that
was killed finds what it had finished, and studies in one folder share the trainings they have in common.

The recipe is the same for every model: AdamW, a linear warm-up and a cosine, clipped gradients, no augmentation.
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
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, repeat
from multiprocessing import active_children, get_context
from pathlib import Path

import torch

from vitkit.checkpoints.family import Checkpoint
from vitkit.checkpoints.load import adapt
from vitkit.checkpoints.options import ModelOptions
from vitkit.data import Augment, Loader, normalise
from vitkit.data.loader import begin
from vitkit.errors import DataError
from vitkit.io import canonical, read_json, write_json
from vitkit.model.build import Model, build
from vitkit.model.config import AnyConfig, ViTConfig
from vitkit.plan.memory import Step
from vitkit.study import variants
from vitkit.study.measures import MEASURES, Measured, accuracy
from vitkit.study.sets import Sets, open_sets, resized
from vitkit.study.table import BATCH
from vitkit.training.config import TrainConfig
from vitkit.training.optim import rate

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
    config: AnyConfig
    steps: int
    lr: float
    seed: int
    variant: str = ""
    share: float = 1.0  # of the training images
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


def finish(run: Run, sets: Sets, folder: Path) -> Outcome:
    """Train, evaluate, and remember the outcome."""
    wall, cpu = time.perf_counter(), time.process_time()
    model, losses = _trained(run, sets)
    source = resized(sets.val if run.split == "val" else sets.test, run.config.image_size[0])
    assert source.pixels is not None
    score = accuracy(model, source.pixels, torch.from_numpy(source.labels))
    measured = MEASURES[run.measure](model, sets) if run.measure else {}
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
                    process.terminate()
            self.pool.shutdown(cancel_futures=True)

    def __call__(self, runs: Sequence[Run]) -> Iterator[tuple[int, Outcome, bool]]:
        """Each run's number, its outcome, and whether it was remembered, as they come."""
        missing: dict[Run, list[int]] = {}
        for number, run in enumerate(runs):
            if (known := recall(run, self.sets, self.folder)) is not None:
                yield number, known, True
            else:
                missing.setdefault(run, []).append(number)
        for run, outcome in self._finished(list(missing)):
            yield from ((number, outcome, False) for number in missing[run])

    def _finished(self, runs: Sequence[Run]) -> Iterator[tuple[Run, Outcome]]:
        if self.pool is None:
            yield from ((run, finish(run, self.sets, self.folder)) for run in runs)
            return
        try:
            waiting = {self.pool.submit(_finish, run, self.sets.name, self.folder): run for run in runs}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        except BrokenProcessPool as e:
            what = "a training process was killed, perhaps for want of memory"
            raise DataError(f"{what}; the same command goes on, --workers 1 with less") from e


def _ready() -> None:
    begin(0)
    torch.set_num_threads(1)


def _finish(run: Run, data: str, folder: Path) -> Outcome:
    return finish(run, open_sets(data), folder)


def train_config(lr: float) -> TrainConfig:
    return TrainConfig(optimizer="adamw", lr=lr, weight_decay=0.05, clip=1.0)


def _trained(run: Run, sets: Sets) -> tuple[Model, list[float]]:
    """The model and the loss of every step. A loss that is not finite ends the training."""
    model, losses = start(run, sets), list[float]()
    if not run.steps:
        return model, losses
    source = resized(sets.part(run.share, run.seed), run.config.image_size[0])
    pre, step = model.config.preprocessing, Step(model, train_config(run.lr))
    loader = Loader(source, pre, BATCH, augment=Augment(), seed=run.seed)
    torch.manual_seed(run.seed)  # of dropout
    for done, batch in zip(range(run.steps), chain.from_iterable(repeat(loader)), strict=False):  # epoch after epoch
        for group in step.optimizers[0].param_groups:
            group["lr"] = run.lr * rate(done / run.steps, WARMUP, "cosine")
        loss = step.loss(normalise(batch.images, pre), batch.labels)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            break
        loss.backward()
        step.update()
        model.zero_grad()
    return model, losses


def start(run: Run, sets: Sets) -> Model:
    """The model before its first step."""
    torch.manual_seed(run.seed if run.before is None else run.seed + AFTER)
    model = build(run.config)
    variants.apply(model, run.variant)
    if run.before is not None:
        resize = run.config.position_resize if isinstance(run.config, ViTConfig) else None
        options = ModelOptions(image_size=run.config.image_size, resize=resize)
        tensors = adapt(Checkpoint(run.before.config, _weights(run.before, sets)), options).tensors
        if run.fresh_positions:
            tensors = {k: v for k, v in tensors.items() if not k.startswith("positions.")}
        missing, extra = model.load_state_dict(tensors, strict=False)
        assert not extra
        assert run.fresh_positions or not missing
    return model


@lru_cache(maxsize=8)
def _weights(run: Run, sets: Sets) -> dict[str, torch.Tensor]:
    """Training is repeated rather than kept on disk: the same seed gives the same weights."""
    return _trained(run, sets)[0].state_dict()
