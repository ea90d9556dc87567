"""The states after frozen blocks, computed once: `--freeze N` then trains the blocks above on a memory map.

Nothing below block N learns, so what block N sees of an image is the same in every epoch. One pass keeps it, under a
name made of weights and data, and the training loop gets states in place of images: loaders, orders, checkpoints and
evaluations are as ever, and the model that is saved is a whole one. A run that was killed continues the pass, or uses
what it kept, and ends with the same bits. Computed in other batches than those of a step, states may differ in the
last bit of a float32 where a matrix product depends on the size of its batch.

Shapes: B images, T tokens, D width.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitkit.data import Batch, Loader
from vitkit.data.augment import preset
from vitkit.data.order import Order
from vitkit.data.samples import Samples
from vitkit.errors import ConfigError, TrainError
from vitkit.evaluation import evaluation_loader
from vitkit.evaluation.features import Kept, fill
from vitkit.model.resnet_d import BatchNorm
from vitkit.model.vit import ViT
from vitkit.storage import workplace
from vitkit.training.config import TrainConfig
from vitkit.training.frozen import key
from vitkit.training.loop import Loop
from vitkit.training.parts import Parts
from vitkit.training.result import Watcher
from vitkit.training.stopping import Stopped, stop_signals

FOLDER = ".states"  # hidden, for it is worth nothing without the run: it is not published, and removed at the end
USED = 0.5  # at most, of the memory and of the disk space that are free
PASS = 0.7  # of a budget; a pass that takes longer is given up


def frozen_blocks(config: TrainConfig) -> int:
    """So many, whose states may be kept."""
    return int(config.freeze) if config.freeze.isdigit() else 0


def images_seen(splits: dict[str, int], config: TrainConfig) -> int:
    """Images whose states are kept, each view for itself."""
    return sum(count * (views_of(config) if split == "train" else 1) for split, count in splits.items())


def views_of(config: TrainConfig) -> int:
    return config.views if config.views and varies(config) else 1


def decide(parts: Parts) -> list[str]:
    """Whether states are kept goes into the configuration of a new run; the lines say why."""
    config, count = parts.config, frozen_blocks(parts.config)
    if config.states == "each" or not count:
        return []
    splits = {"train": parts.loader.source, **{n: x.source for n, x in parts.held_out.items()}}
    images = images_seen({name: len(source) for name, source in splits.items()}, config)
    reason = excluded(parts, images)
    every = len(parts.loader.source) * views_of(config)
    if not reason and not config.states and config.steps and config.steps * config.batch_size <= every:
        reason = f"so few steps: they see fewer images than the {every:,} that would be computed"
    if reason and config.states == "once":
        raise ConfigError(f"states=once is not possible with {reason}")
    parts.config = config.replace(states="each" if reason else "once")
    if reason:
        return [f"states: the {count} frozen blocks run in every step, because of {reason}"]
    size = images * row_bytes(parts) / 1e9
    seen = f"{views} augmented views of every image" if (views := views_of(config)) > 1 else "every image"
    kept = f"computed once for {seen} and kept while the run lasts: {size:.2g} GB"
    return [f"states: after the {count} frozen blocks, {kept} (else: --set states=each)"]


def row_bytes(parts: Parts) -> int:
    assert isinstance(parts.model, ViT)
    model = parts.model.config
    return 4 * model.width * (math.prod(model.grid) + model.prefix_tokens)


def excluded(parts: Parts, images: int) -> str:
    """Why the states of so many images cannot be kept; "": they can."""
    config, model, count = parts.config, parts.model, frozen_blocks(parts.config)
    assert isinstance(model, ViT)
    augment = config.augment or preset("none")
    needed, free = images * row_bytes(parts), min(free_memory(), free_disk(workplace(config.out)))
    room = f"{needed / 1e9:.2g} GB that they need, more than half of the {free / 1e9:.2g} GB that are free"
    reasons: dict[str, Callable[[], bool]] = {
        "several processes": lambda: parts.world.size > 1 or config.shard,
        "a teacher, which sees images": lambda: not parts.trainee.plain or parts.task.teacher is not None,
        "mixup or cutmix": lambda: bool(augment.mixup or augment.cutmix),
        "augmentation that is new in every epoch (--augment none or --set views=8 makes them worth keeping)": lambda: (
            varies(config) and not config.views
        ),
        "dropped patches": lambda: bool(config.patch_dropout),
        "growing images": lambda: config.progressive < 1,
        "batch normalisation": lambda: any(isinstance(m, BatchNorm) for m in model.modules()),
        "dropout in them": lambda: draws(model, count),
        room: lambda: needed > USED * free,
    }
    return next((reason for reason, holds in reasons.items() if holds()), "")


def varies(config: TrainConfig) -> bool:
    """Whether training images differ from one epoch to the next; smoothed targets do not count."""
    return config.augment is not None and replace(config.augment, smoothing=0.0) != preset("none")


@torch.no_grad()
def draws(model: ViT, count: int) -> bool:
    """Whether the first blocks use random numbers in training."""
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state if cuda else torch.get_rng_state
    images = torch.zeros(1, model.config.channels, *model.config.image_size, device=device)
    was = model.training
    with torch.random.fork_rng(devices=[device] if cuda else []):
        before = state()
        model.train().features(images, [count - 1])
        model.train(was)
        return not torch.equal(before, state())


def free_memory() -> float:
    """Bytes that are free or could be."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024.0 * float(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        pages = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {})
        return 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if pages else float("inf")


def free_disk(folder: Path) -> float:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return float(shutil.disk_usage(there).free)


# --- computing and using them ------------------------------------------------------------------------


def states_of(parts: Parts, images: Tensor) -> Tensor:
    """B C H W -> what the first block that learns sees, B T D."""
    assert isinstance(parts.model, ViT)
    return parts.model.features(images, [frozen_blocks(parts.config) - 1])[0]


def keep(loop: Loop, watcher: Watcher) -> bool:
    """Compute them, as far as they are not there yet; then the loop learns from them. False: it took too long."""
    parts, config = loop.parts, loop.config
    assert isinstance(parts.model, ViT)
    folder = loop.out / FOLDER / key(parts, precision=config.precision, blocks=config.freeze)
    for other in (loop.out / FOLDER).glob("*"):
        if other != folder:  # of other weights or other data
            shutil.rmtree(other, ignore_errors=True)
    found: list[tuple[Loader, list[Kept]]] = []
    training = [parts.loader] * views_of(config)
    names = ["train"] * len(training) + list(parts.held_out)
    with stop_signals(loop):
        for number, (name, loader) in enumerate(zip(names, [*training, *parts.held_out.values()], strict=True)):
            view = number if name == "train" else 0
            kept = _kept(loop, loader, folder / f"{name}-{view}.f32", view, watcher)
            if kept.ended:
                watcher.note("states: slower than they were measured; for the budget frozen blocks run in every step")
                return False
            if view:
                found[0][1].append(kept)
            else:
                found.append((loader, [kept]))
    for loader, views in found:
        loader.samples, loader.workers = StateSamples(loader.samples, views, parts.model.config.width), 0
    parts.trainee.start = frozen_blocks(config)
    return True


def _kept(loop: Loop, loader: Loader, path: Path, view: int, watcher: Watcher) -> Kept:
    parts, config, trains = loop.parts, loop.config, loader is loop.parts.loader
    varied = loader.augment if trains and varies(config) else None

    def compute(images: Tensor) -> Tensor:
        if not trains:  # in fp32, as images are evaluated
            return states_of(parts, images).flatten(1)
        with parts.autocast():
            return states_of(parts, images).flatten(1)

    def check() -> None:
        if loop.stop_asked:
            again = f"vitkit train {config.data} --out {config.out} --resume"
            raise Stopped(f"stopped, all states so far are saved. Resume with: {again}")

    def enough() -> bool:
        return bool(config.budget) and loop.elapsed > PASS * config.budget

    kept = Kept.open(path, len(loader.source))
    try:
        about = (loader.source, parts.model.config, None, loader.workers)
        with evaluation_loader(*about, augment=varied, seed=config.seed) as every:
            fill(kept, parts.model, every, compute, view, watcher, check, enough)
    except OSError as e:
        hint = "free some space, or start again in another folder with --set states=each"
        raise TrainError(f"the states of frozen blocks cannot be kept in {path.parent} ({e}); {hint}") from e
    return kept


class StateSamples(Samples):
    """In place of a loader's samples: the same, but of each its states."""

    def __init__(self, like: Samples, kept: list[Kept], width: int) -> None:
        self.__dict__.update(vars(like))
        self.kept, self.width = kept, width
        self.bad = dict(zip(kept[0].unread, kept[0].bad, strict=True))
        self.used = np.arange(kept[0].count)  # whose states a sample has; -1: none, and it is left out
        for index, bad in self.bad.items():
            self.used[index] = next((i for i in self.candidates(index) if i not in self.bad), -1)
            if self.used[index] < 0 and self.replace_bad:
                raise self.nothing_like(index, [bad])

    def load(self, epoch: int, order: Order) -> Batch:
        keys, used = self.keys(epoch, order), self.used[order.indices]
        there = used >= 0
        rows = self.kept[epoch % len(self.kept)].rows[used[there]]  # B T*D
        states = torch.from_numpy(rows).unflatten(1, (-1, self.width))
        labels = torch.from_numpy(self.source.labels[used[there]])
        labels = labels.float() if self.source.multi_label else labels
        bad = [self.bad[i] for i in order.indices.tolist() if i in self.bad]
        return Batch(states, labels, torch.from_numpy(order.indices[there]), keys[there], bad)
