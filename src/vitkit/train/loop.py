"""The training loop, written out: one for one process and for a thousand.

A run is a function of its configuration. Everything random in step n is derived from (seed, n), batches
come from (seed, epoch, sample), and the state on disk holds the rest, so a run that was killed at any
moment and resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data import Batch, mix, normalise, soft_targets
from vitkit.data.keys import sample_keys
from vitkit.errors import TrainError
from vitkit.evaluate import quick
from vitkit.model.config import ViTConfig
from vitkit.train.checkpoint import Keeper
from vitkit.train.log import Log
from vitkit.train.parts import Parts
from vitkit.train.replay import save_replay
from vitkit.train.schedule import grown_size, rate
from vitkit.train.state import restore, save_model, state_of

EVALUATION_SHARE = 0.05  # of a budget may go into looking how good the model is
TELL = 2.0  # seconds; whoever watches hears something more often, when steps take long
BAD_STEPS = 5  # so many losses in a row that are not finite end the run


class Watcher:
    """What a run tells while it goes; the command draws it, others may ignore it."""

    def note(self, text: str) -> None:
        """A line worth reading."""

    def step(self, progress: float, line: dict[str, Any]) -> None:
        """After every logged step."""

    def evaluated(self, line: dict[str, Any]) -> None:
        """After every evaluation."""


@dataclass(frozen=True)
class Result:
    """What a run reached, and where it is."""

    out: Path
    steps: int
    epochs: float
    seconds: float
    validation: dict[str, float]  # of the last weights (their average where one is kept)
    best: dict[str, float]
    test: dict[str, float] = field(default_factory=dict)  # of the best weights, when there is a test split
    skipped: int = 0  # steps whose loss was not finite
    bad_files: int = 0


class Stopped(TrainError):
    """The run was asked to stop, and everything is saved."""

    exit_code = 130


class Loop:
    def __init__(self, parts: Parts, watcher: Watcher, started: float) -> None:
        self.parts, self.watcher, self.started = parts, watcher, started
        self.config, self.world, self.out = parts.config, parts.world, Path(parts.config.out)
        self.keeper = Keeper(self.out / "checkpoints")
        self.step = self.skipped = self.bad_in_a_row = 0
        self.elapsed_before = 0.0  # seconds that earlier parts of this run took
        self.window: list[float] = []  # losses since the last line of the log
        self.best: dict[str, float] = {}
        self.validation: dict[str, float] = {}
        self.evaluations_done = 0
        self.evaluation_seconds = 0.0  # of the last one
        self.evaluation_total = 0.0
        self.too_much_evaluation = False
        self.stop_asked = False
        self.told = 0.0

    # --- progress ----------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        return self.elapsed_before + time.monotonic() - self.started

    def progress(self) -> float:
        """0 at the start, 1 when done: by steps, or by the clock with time kept for what comes after."""
        if not self.config.budget:
            return self.step / self.config.steps
        after = 2.0 + self.evaluation_seconds * (1 + self.parts.test_share)
        return min(1.0, self.elapsed / max(1.0, self.config.budget - after))

    # --- the loop ----------------------------------------------------------------------------------

    def go(self, resumed: bool) -> Result:
        log = Log(self.out, self.step if resumed else -1) if self.world.first else None
        saved = time.monotonic()
        progress, stop = self.agree()
        with stop_signals(self):
            while progress < 1 or not self.step:  # one step at least, however short the budget
                for batch in self.parts.loader:
                    loss = self.train_step(batch, progress)
                    self.step += 1
                    self.window.append(loss)
                    progress, stop = self.agree()
                    if log is not None and (self.step % self.config.log_every == 0 or progress >= 1):
                        self.write_line(log, progress)
                    elif log is not None and time.monotonic() - self.told > TELL:
                        self.tell(self.line(), progress)
                    if self.evaluation_due(progress):
                        self.evaluate(log)
                    if stop or time.monotonic() - saved > self.config.save_every or progress >= 1:
                        self.save(background=not stop)
                        saved = time.monotonic()
                    if stop:
                        self.say_goodbye()
                    if progress >= 1:
                        break
        self.keeper.finish()
        if log is not None:
            log.close()
        return self.finish()

    def agree(self) -> tuple[float, bool]:
        """Progress, the wish to stop, and whether evaluation took too much of a budget: the same in all processes."""
        share = self.evaluation_total / max(1.0, self.elapsed) if self.config.budget else 0.0
        progress, stop, share = self.world.largest(self.progress(), float(self.stop_asked), share)
        self.too_much_evaluation = share > EVALUATION_SHARE
        return progress, bool(stop)

    def train_step(self, batch: Batch, progress: float) -> float:
        """One update from one batch of all processes; returns its mean loss."""
        config, parts = self.config, self.parts
        torch.manual_seed(int(sample_keys(config.seed, self.step, [self.world.rank])[0] >> 1))
        share = rate(progress, config.warmup, config.schedule)
        for optimizer in parts.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * share * group["factor"]
            optimizer.zero_grad(set_to_none=True)
        parts.trainee.train()
        images, targets = self.inputs(batch, progress)
        loss = self.backward(images, targets)
        loss = self.world.mean(loss)
        if not math.isfinite(value := loss.item()):
            self.skip(batch, value)
            return value
        self.bad_in_a_row = 0
        self.update()
        if parts.average is not None:
            parts.average.update(parts.model, self.step)
        return value

    def inputs(self, batch: Batch, progress: float) -> tuple[Tensor, Tensor]:
        """uint8 pictures -> what the model sees, and its targets."""
        config, parts = self.config, self.parts
        images = normalise(batch.images.to(self.world.device, non_blocking=True), parts.pre)
        labels = batch.labels.to(self.world.device, non_blocking=True)
        assert config.augment is not None
        if config.augment.soft_targets:
            images, targets = mix(images, labels, batch.keys, config.augment, parts.classes)
        else:
            targets = soft_targets(labels, parts.classes) if config.loss == "bce" else labels
        if config.progressive < 1 and isinstance(parts.model.config, ViTConfig):
            model = parts.model.config
            size = [
                grown_size(progress, config.progressive, n, p)
                for n, p in zip(model.image_size, model.patch_size, strict=True)
            ]
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        return images, targets

    def backward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the mean loss, in `accumulate` parts; processes talk only after the last."""
        config, parts = self.config, self.parts
        chunks = list(zip(images.chunk(config.accumulate), targets.chunk(config.accumulate), strict=True))
        total = torch.zeros((), device=self.world.device)
        for i, (x, y) in enumerate(chunks):
            last = i == len(chunks) - 1
            quiet = nullcontext() if last else no_sync(parts.trainee)
            with quiet:
                with parts.autocast():
                    loss = parts.objective(parts.trainee, x, y) * (len(x) / len(images))
                parts.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def update(self) -> None:
        parts, clip = self.parts, self.config.clip
        for optimizer in parts.optimizers:
            parts.scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(parts.learning, clip, foreach=True)
        for optimizer in parts.optimizers:
            parts.scaler.step(optimizer)
        parts.scaler.update()

    def skip(self, batch: Batch, value: float) -> None:
        """A loss that is not finite: leave the step out; several in a row end the run with a replay."""
        self.skipped += 1
        self.bad_in_a_row += 1
        if self.bad_in_a_row < BAD_STEPS:
            return
        self.keeper.finish()
        replay = self.out / "replay"
        if self.world.first:
            save_replay(replay, self.config, state_of(self), batch)
        raise TrainError(
            f"the loss was {value} in {BAD_STEPS} steps in a row, up to step {self.step}; try a smaller --lr or "
            f"--set precision=fp32. Look into it with: vitkit replay {replay}"
        )

    # --- now and then ------------------------------------------------------------------------------

    def write_line(self, log: Log, progress: float) -> None:
        line = self.line()
        self.window.clear()
        log.write(**line)
        self.tell(line, progress)

    def tell(self, line: dict[str, Any], progress: float) -> None:
        self.told = time.monotonic()
        images = self.step * self.parts.loader.batch_size
        self.watcher.step(progress, line | {"seconds": self.elapsed, "images": images})

    def line(self) -> dict[str, Any]:
        """Where the run is, and the mean loss since the last line of the log."""
        finite = [x for x in self.window if math.isfinite(x)]
        line: dict[str, Any] = {"step": self.step, "epoch": self.epoch}
        line["loss"] = sum(finite) / len(finite) if finite else None
        line["lr"] = self.parts.optimizers[0].param_groups[0]["lr"]
        if self.skipped:
            line["skipped"] = self.skipped
        return line

    @property
    def epoch(self) -> float:
        return round(self.step / len(self.parts.loader), 4)

    def evaluation_due(self, progress: float) -> bool:
        """At most `evaluations` of them, evenly spread, and always at the end; fewer when a budget is short.

        A budget has one within its first tenth: it tells how much time to keep for the last.
        """
        if self.config.budget and not self.evaluation_seconds and progress >= 0.1:
            return True
        due = int(progress * self.config.evaluations + 1e-9)
        return progress >= 1 or (due > self.evaluations_done and not self.too_much_evaluation)

    def evaluate(self, log: Log | None) -> None:
        before = time.monotonic()
        progress = self.progress()
        loader = self.parts.validation
        found = quick(self.parts.judged, loader, self.world.device) if loader is not None else {}
        self.validation = {k: v for k, v in found.items() if k != "samples"}
        self.evaluations_done = max(self.evaluations_done + 1, int(progress * self.config.evaluations + 1e-9))
        score = self.validation.get("top1", self.validation.get("map", 0.0))
        line: dict[str, Any] = {"step": self.step, "epoch": self.epoch}
        line |= {f"val_{k}": v for k, v in self.validation.items()}
        best = not self.best or score >= self.best["score"]
        if best:
            self.best = {"score": score, "step": self.step, **self.validation}
            save_model(self, self.out / "best.safetensors")
        self.evaluation_seconds = time.monotonic() - before
        self.evaluation_total += self.evaluation_seconds
        if log is not None:
            log.write(**line)
        self.watcher.evaluated(line | {"best": self.best["score"]})

    def save(self, background: bool) -> None:
        """The whole state of the run; from then on it can be resumed from here."""
        state = state_of(self)
        if self.config.shard:
            from vitkit.train.state import save_sharded

            save_sharded(self, state)
        elif self.world.first:
            self.keeper.save(self.step, state, background)

    def resume(self) -> bool:
        """Take up the newest sound checkpoint; False when there is none."""
        folder = self.world.share(self.keeper.newest(self.watcher.note) if self.world.first else None)
        if folder is None:
            return False
        restore(self, folder)
        self.watcher.note(f"resumed at step {self.step} from {folder}")
        return True

    def say_goodbye(self) -> None:
        self.keeper.finish()
        raise Stopped(
            f"stopped at step {self.step}, all saved. Go on with: "
            f"vitkit train {self.config.data} --out {self.config.out} --resume"
        )

    def finish(self) -> Result:
        save_model(self, self.out / "model.safetensors")
        test = {}
        if self.parts.test is not None:
            found = quick(self.parts.judged, self.parts.test, self.world.device)
            test = {k: v for k, v in found.items() if k != "samples"}
        return Result(
            out=self.out,
            steps=self.step,
            epochs=self.epoch,
            seconds=self.elapsed,
            validation=self.validation,
            best=self.best,
            test=test,
            skipped=self.skipped,
            bad_files=len(self.parts.loader.bad_files),
        )


def no_sync(trainee: nn.Module) -> Any:
    """Gradients of all but the last part of a batch stay in their process."""
    return trainee.no_sync() if isinstance(trainee, nn.parallel.DistributedDataParallel) else nullcontext()


@contextmanager
def stop_signals(loop: Loop) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask the loop to save and stop; a second Ctrl-C stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: object) -> None:
        if loop.stop_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        loop.stop_asked = True

    before = {s: signal.signal(s, ask) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
