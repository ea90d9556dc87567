"""A model and a set -> records of every sample, shared among ranks, each sample evaluated exactly once.

An image that cannot be read is listed and left out; it is not replaced by another, which would then
count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn

from vitkit.data import Augment, BadFile, BadFiles, Loader, Source, normalise
from vitkit.errors import DataError
from vitkit.evaluation.views import over_views
from vitkit.model.config import AnyConfig, Preprocessing
from vitkit.progress import SILENT, Progress
from vitkit.tasks.base import Task
from vitkit.tasks.result import Evaluation, Recorded, Records, collect, merge
from vitkit.tasks.table import task_of
from vitkit.tasks.trainee import unwrapped
from vitkit.world import gather

if TYPE_CHECKING:
    from typing_extensions import Unpack

Call = Callable[[Tensor], Tensor]
Record = Callable[[Tensor, Tensor], Recorded]
Device = str | torch.device | None
_PIXELS_AT_ONCE = 1 << 20  # per batch, counting one channel: fast for small images, gentle to memory for large


class How(TypedDict, total=False):
    """How samples are read and shared.

    batch_size  samples at once, over all ranks; by default what suits the size of the images
    workers     processes that decode images; sets in memory need none
    rank        evaluates its part of `world_size` parts; then every rank gets the whole result
    """

    batch_size: int | None
    workers: int
    rank: int
    world_size: int


def evaluate(
    model: nn.Module,
    source: Source,
    device: Device = None,
    progress: Progress = SILENT,
    views: int = 1,
    **how: Unpack[How],
) -> Evaluation:
    """Evaluate a model on a set, with the model's own preprocessing and by its own task.

    device  by default where the model is
    views   of every image, whose outputs are averaged
    how     batch_size, workers, rank and world_size, as `How` says
    """
    call = over_views(model, views, source.flip_safe)
    task = task_of(model, source.label_kind)
    order = task.align(model, source, progress)

    def record(outputs: Tensor, labels: Tensor) -> Recorded:
        return task.record(outputs if order is None else outputs[:, order], labels)

    with evaluation_loader(source, unwrapped(model).config, **how) as loader:
        return task.evaluation(run(model, call, record, loader, device, progress), source)


def quick(
    model: nn.Module, loader: Loader, device: Device = None, task: Task | None = None, progress: Progress = SILENT
) -> dict[str, float]:
    """The task's metrics and the number of samples, for the end of an epoch: keep the loader and call again."""
    task = task or task_of(model, loader.source.label_kind)
    records = run(model, model, task.record, loader, device, progress)
    return {**task.measure(records), "samples": len(records)}


def suited_batch(pre: Preprocessing) -> int:
    """Images that are evaluated at once, by their size."""
    return min(512, max(16, _PIXELS_AT_ONCE // (pre.size[0] * pre.size[1])))


def evaluation_loader(
    source: Source,
    config: AnyConfig,
    batch_size: int | None = None,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    augment: Augment | None = None,
    seed: int = 0,
) -> Loader:
    """Gives every readable sample once; unreadable ones are listed in `bad_files` and never end the run.

    With `augment` the images vary as in training.
    """
    pre = config.preprocessing
    if batch_size is None:
        batch_size = world_size * suited_batch(pre)
    return Loader(
        source,
        pre,
        batch_size,
        augment,
        seed,
        workers=workers,
        rank=rank,
        world_size=world_size,
        bad_files=BadFiles(total=len(source), max_bad="100%"),
        channels=config.channels,
        replace_bad=False,
        in_order=True,
    )


def run(
    model: nn.Module, call: Call, record: Record, loader: Loader, device: Device = None, progress: Progress = SILENT
) -> Records:
    """The records of everything that an `evaluation_loader` gives, the parts of all ranks put together."""
    records = merge(gather(run_part(model, call, record, loader, device, progress), loader.world_size))
    if not len(records):
        first = f", the first one because: {records.bad[0].reason}" if records.bad else ""
        raise DataError(f"no image of {loader.source.name} can be read{first}; `vitkit data check` lists them all")
    return records


def run_part(
    model: nn.Module, call: Call, record: Record, loader: Loader, device: Device = None, progress: Progress = SILENT
) -> Records:
    """The records of this rank's part alone, for `merge`: `record` of what `call` makes of the images of each batch.

    Every rank runs every batch, an empty one with a blank image: a sharded model talks to the other
    ranks at each step and would wait forever for one that skips it.
    """
    first = next(model.parameters() if device is None else model.to(device).parameters())
    loader.epoch = loader.step = 0  # from the start, whatever happened before
    indices: list[Tensor] = []
    recorded: list[Recorded] = []
    bad: list[BadFile] = []
    done, total = 0, len(loader.source)
    with evaluating(model):
        for batch in loader:
            images = batch.images if len(batch) else torch.zeros(1, *batch.images.shape[1:], dtype=torch.uint8)
            outputs = call(normalise(images.to(first.device), loader.pre).to(first.dtype))
            recorded.append(record(outputs[: len(batch)], batch.labels))
            indices.append(batch.indices)
            bad += batch.bad
            done = min(done + loader.batch_size, total)  # of all ranks
            progress.update(f"evaluating {loader.source.name}", done, total)
    return collect(indices, recorded, bad)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode and without gradients; afterwards the model trains on if it did before."""
    from torch.distributed.tensor import DTensor

    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    was_training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        with torch.no_grad() if sharded else torch.inference_mode():
            yield
    finally:
        for module in was_training:
            module.training = True
