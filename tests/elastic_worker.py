"""`vitkit`, as a rank of torchrun that writes down which samples it has learned from: step, rank, ranks, samples,
and which it has read out of shards for this step.

The file SAMPLES/pace, seconds per step, slows it down, so that there is time to disturb it; FULL_DISK="rank first
last" refuses files of more than a few bytes to one rank from one step to another.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

from vitkit.cli.main import run
from vitkit.data import Batch
from vitkit.data.order import Order
from vitkit.data.samples import Samples
from vitkit.data.sources.shards import ShardSource
from vitkit.training.loop import Loop

learn, load, encoded, read = Loop.train_step, Samples.load, ShardSource.encoded, list[str]()
samples = Path(os.environ["SAMPLES"])
full_rank, first, last = (int(word) for word in os.environ.get("FULL_DISK", "-1 0 0").split())
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)


def recorded(loop: Loop, batch: Batch, progress: float) -> float:
    step, rank = loop.step, loop.world.rank
    if rank == full_rank and step in (first, last):
        limit = (10, unlimited[1]) if step == first else unlimited
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    value = learn(loop, batch, progress)
    if rank != full_rank or not first <= step < last:
        line = [step, rank, loop.world.size, batch.indices.tolist(), time.time(), os.environ["MASTER_PORT"], read]
        with (samples / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    time.sleep(float((samples / "pace").read_text() or 0))
    return value


def batch_of(samples: Samples, epoch: int, order: Order) -> Batch:
    read.clear()
    return load(samples, epoch, order)


def noted(source: ShardSource, index: int) -> bytes:
    read.append(source.where(index))
    return encoded(source, index)


Loop.train_step = recorded  # type: ignore[method-assign]
Samples.load = batch_of  # type: ignore[method-assign]
ShardSource.encoded = noted  # type: ignore[method-assign]
sys.argv[0] = "vitkit"
run()
