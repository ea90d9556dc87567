"""A model and a set -> records of every sample, shared among ranks, each sample judged exactly once.

A picture that cannot be read is listed and left out; it is not replaced by another, which would then
count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.data import BadFile, BadFiles, BadPicture, Batch, Loader, Source, normalise, prepare, to_tensor
from vitkit.data.keys import sample_keys
from vitkit.data.order import Order
from vitkit.data.samples import Samples, one_thread
from vitkit.errors import DataError
from vitkit.evaluate.classes import columns_of, unwrapped
from vitkit.evaluate.records import Judged, Records, collect, judge, merge
from vitkit.evaluate.result import Evaluation
from vitkit.model.config import AnyConfig
from vitkit.ranks import gather

OnBatch = Callable[[int, int], None]  # samples done, and samples in all, of this rank
Call = Callable[[Tensor], Tensor]
_PIXELS_AT_ONCE = 1 << 20  # per batch, counting one channel: fast for small pictures, gentle to memory for large


def evaluate(
    model: nn.Module,
    source: Source,
    batch_size: int | None = None,
    workers: int = 0,
    device: str | torch.device | None = None,
    rank: int = 0,
    world_size: int = 1,
    on_batch: OnBatch | None = None,
) -> Evaluation:
    """Judge a model on a set, with the model's own preprocessing.

    batch_size  samples at once, over all ranks; by default what suits the size of the pictures
    workers     processes that decode pictures; sets in memory need none
    device      by default where the model is
    rank        judges its part of `world_size` parts; then every rank gets the whole result
    on_batch    called with (done, total) after every batch
    """
    columns = columns_of(model, source)
    with evaluation_loader(source, unwrapped(model).config, batch_size, workers, rank, world_size) as loader:
        return Evaluation.of(run(model, loader, device, columns, on_batch), source)


def quick(model: nn.Module, loader: Loader, device: str | torch.device | None = None) -> dict[str, float]:
    """top1 (or map, with several labels) and loss, for the end of an epoch: keep the loader and call again."""
    records = run(model, loader, device)
    judged = {"map": records.map} if loader.source.multi_label else {"top1": records.top(1), "top5": records.top(5)}
    return {**judged, "loss": records.mean_loss, "samples": len(records)}


def evaluation_loader(
    source: Source,
    config: AnyConfig,
    batch_size: int | None = None,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Loader:
    """Gives every readable sample once; unreadable ones are listed in `bad_files` and never end the run."""
    pre = config.preprocessing
    if batch_size is None:
        batch_size = world_size * min(512, max(16, _PIXELS_AT_ONCE // (pre.size[0] * pre.size[1])))
    bad = BadFiles(total=len(source), max_bad="100%")
    shared = {"workers": workers, "rank": rank, "world_size": world_size, "bad_files": bad}
    loader = Loader(source, pre, batch_size, channels=config.channels, **shared)  # type: ignore[arg-type]
    if loader.samples.pixels is None:
        loader.samples = _OnlyReadable(source, pre, channels=config.channels)
    return loader


def run(
    model: nn.Module,
    loader: Loader,
    device: str | torch.device | None = None,
    columns: np.ndarray | None = None,
    on_batch: OnBatch | None = None,
) -> Records:
    """Judge what an `evaluation_loader` gives, and put the parts of all ranks together."""
    part = run_part(model, loader, device, columns, on_batch)
    records = merge(gather(part, loader.world_size))
    if not len(records):
        first = f", the first one because: {records.bad[0].reason}" if records.bad else ""
        raise DataError(f"no picture of {loader.source.name} can be read{first}; `vitkit data check` lists them all")
    return records


def run_part(
    model: nn.Module,
    loader: Loader,
    device: str | torch.device | None = None,
    columns: np.ndarray | None = None,
    on_batch: OnBatch | None = None,
) -> Records:
    """The records of this rank's part alone, for `merge`."""
    order = None if columns is None else torch.from_numpy(columns).to(place(model, device)[0])
    indices: list[Tensor] = []
    judged: list[Judged] = []

    def take(outputs: Tensor, batch: Batch) -> None:
        logits = outputs if order is None else outputs[:, order]
        indices.append(batch.indices)
        judged.append(judge(logits, batch.labels.to(logits.device)))

    bad = feed(model, model, loader, take, device, on_batch)
    return collect(indices, judged, bad)


def feed(
    model: nn.Module,
    call: Call,
    loader: Loader,
    take: Callable[[Tensor, Batch], None],
    device: str | torch.device | None = None,
    on_batch: OnBatch | None = None,
) -> list[BadFile]:
    """Run `call` on the pictures of every batch and hand the outputs to `take`; gives the files that are bad.

    Every rank runs every batch, an empty one with a blank picture: a sharded model talks to the other
    ranks at each step and would wait forever for one that skips it.
    """
    where, dtype = place(model, device)
    loader.epoch = loader.step = 0  # from the start, whatever happened before
    done, bad = 0, []
    total = sum(len(part) for part in _shares(loader))
    with judging(model):
        for batch in loader:
            bad += batch.bad
            images = batch.images if len(batch) else torch.zeros(1, *batch.images.shape[1:], dtype=torch.uint8)
            outputs = call(normalise(images.to(where), loader.pre).to(dtype))
            take(outputs[: len(batch)], batch)
            done += len(batch) + len(batch.bad)
            if on_batch is not None:
                on_batch(done, total)
    return bad


def place(model: nn.Module, device: str | torch.device | None = None) -> tuple[torch.device, torch.dtype]:
    """Where pictures must go, and as what; a given device takes the model along."""
    if device is not None:
        model.to(device)
    first = next(model.parameters())
    return first.device, first.dtype


@contextmanager
def judging(model: nn.Module) -> Iterator[None]:
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


def _shares(loader: Loader) -> Iterator[range]:
    """This rank's part of every batch, as `Order.part` cuts it."""
    size, count = loader.batch_size, len(loader.source)
    for low in range(0, count, size):
        high = min(low + size, count)
        cuts = [low + (high - low) * r // loader.world_size for r in (loader.rank, loader.rank + 1)]
        yield range(*cuts)


class _OnlyReadable(Samples):
    """A picture that cannot be read is reported and left out of its batch, not replaced by another of its class."""

    def load(self, epoch: int, order: Order) -> Batch:
        images, kept, bad = [], [], []
        with one_thread():
            for index in order.indices.tolist():
                try:
                    picture = self.source.picture(index, self.channels)
                except BadPicture as e:
                    bad.append(BadFile(self.source.where(index), self.source.label_name(index), e.reason))
                    continue
                images.append(to_tensor(picture if self.source.prepared else prepare(picture, self.pre)))
                kept.append(index)
        indices = np.array(kept, dtype=np.int64)
        return Batch(
            images=torch.stack(images) if images else torch.empty(0, self.channels, *self.pre.size, dtype=torch.uint8),
            labels=torch.from_numpy(self.source.labels[indices]),
            indices=torch.from_numpy(indices),
            keys=sample_keys(self.seed, epoch, indices),
            bad=bad,
        )
