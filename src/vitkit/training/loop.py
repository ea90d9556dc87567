"""The training loop, written out: one for one process and for a thousand.

A run is a function of its configuration. Everything random in step n is derived from (seed, n), batches
come from (seed, epoch, sample), and the state on disk holds the rest, so a run that was killed at any
moment and resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.checkpoints.load import load
from vitkit.checkpoints.step import describe
from vitkit.data import Batch, Loader, normalise
from vitkit.data.keys import sample_keys
from vitkit.errors import CheckpointError, TrainError
from vitkit.evaluation import quick
from vitkit.evaluation.run import run as record_all
from vitkit.model.config import ViTConfig
from vitkit.storage import workplace
from vitkit.tasks.result import Evaluation
from vitkit.training.advice import Curves, forecast
from vitkit.training.checkpoint import Keeper, restore, save_model, save_replay, save_sharded, state_of
from vitkit.training.log import Listener, Log
from vitkit.training.optim import grown_size, rate
from vitkit.training.parts import Parts
from vitkit.training.result import Line, Rate, Result, Watcher
from vitkit.training.stopping import Stopped, stop_signals
from vitkit.training.threads import Neighbours, Pace
from vitkit.training.watchdog import Watchdog

EVALUATION_SHARE = 0.1  # of the time of a run with a budget may go into validation
EVALUATED, FEW, MOST = 0.1, 3, 20  # of the work of a run without a budget; evaluations, at least and at most
PACED = 5  # steps that tell how fast a run is
AFTER, SLOW = 2.0, 0.25  # seconds for what comes after the last evaluation; more where starting up was slow: a share
TELL = 2.0  # seconds; whoever watches hears something more often, when steps take long
MISSED = 5  # so many checkpoints in a row that could not be written end the run
BAD_STEPS = 5  # so many losses in a row that are not finite end the run


def ending(begun: float) -> float:
    """Seconds of a budget that are kept for figures and files; `begun`: how long starting up took on this machine."""
    return AFTER + min(5.0, SLOW * begun)


class Loop:
    def __init__(
        self,
        parts: Parts,
        watcher: Watcher,
        started: float,
        listener: Listener | None = None,
        after_save: Callable[[], None] | None = None,
    ) -> None:
        self.parts, self.watcher, self.started, self.listener = parts, watcher, started, listener
        self.config, self.world, self.out = parts.config, parts.world, workplace(parts.config.out)
        self.keeper = Keeper(self.out / "checkpoints", after=after_save)
        self.step = self.skipped = self.bad_in_a_row = self.evaluations_done = 0
        self.elapsed_before = 0.0  # seconds that earlier parts of this run took
        self.begun = 0.0  # seconds until the first step: the schedule of a budget starts there
        self.learned = 0.0  # seconds of steps, reading of images included
        self.paced = (0, 0.0)  # steps after the first of this process, and their seconds
        self.window: list[float] = []  # losses since the last line of the log
        self.best, self.validation = dict[str, float](), dict[str, float]()
        self.curve: list[tuple[float, float]] = []  # progress and validation score of every evaluation
        self.recent: float | None = None  # the last training loss that was logged
        self.at_start: dict[str, float] = {}  # metrics before the first step, where they mean something
        each = float(str(self.config.costs.get("evaluated image", 0.0)))
        self.evaluation_seconds = each * self.validation_count  # of the last one; before the first, as measured
        self.evaluation_total = 0.0  # of all
        self.too_much_evaluation = self.stop_asked = self.learned_here = False
        self.evaluation: Evaluation | None = None  # of the kept weights on the test split
        self.told = 0.0  # when whoever watches last heard something
        self.missed = 0  # checkpoints in a row that could not be written
        self.neighbours, self.pace = Neighbours(), Pace.of(self.config)
        self.watchdog = Watchdog(self.config.hang_limit, self.out, self.world)

    # --- progress ----------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        return self.elapsed_before + time.monotonic() - self.started

    def progress(self) -> float:
        """0 at the start, 1 when done: by steps, or by the clock with time kept for what comes after."""
        if not self.config.budget:
            return self.step / self.config.steps
        measured = float(str(self.config.costs.get("step", 0.0)))
        step = self.paced[1] / self.paced[0] if self.paced[0] else measured  # the last one must end in time
        evaluation = self.evaluation_seconds * (1 + self.parts.test_share)
        if measured and not self.evaluation_total and self.paced[0] >= PACED:  # as much slower as steps are
            evaluation *= min(4.0, max(1.0, step / measured))
        end = self.config.budget - (ending(self.begun) + step + evaluation)
        return 1.0 if self.elapsed >= end else max(0.0, self.elapsed - self.begun) / max(1e-9, end - self.begun)

    @property
    def validation_count(self) -> int:
        return len(self.parts.validation.source) if self.parts.validation is not None else 0

    def note_pace(self, seconds: float) -> None:
        """Of a step; the first one of a process also starts those that load."""
        if self.learned_here:
            self.paced = (self.paced[0] + 1, self.paced[1] + seconds)
            self.watcher.aside(self.pace.note(seconds) if self.pace is not None else "")
        self.learned, self.learned_here = self.learned + seconds, True

    # --- the loop ----------------------------------------------------------------------------------

    def run(self, resumed: bool) -> Result:
        with self.watchdog:
            return self.run_watched(resumed)

    def run_watched(self, resumed: bool) -> Result:
        log = Log(self.out, self.step if resumed else -1, self.listener) if self.world.first else None
        saved = time.monotonic()
        if not self.step and (self.parts.task.pretrains or self.parts.answers):
            self.evaluate(log)
            self.at_start, self.evaluations_done = self.validation, 0
        self.begun = self.begun if self.step else self.elapsed
        progress, stop = self.sync()
        with stop_signals(self):
            while progress < 1 or not self.step:  # one step at least, however short the budget
                before = time.monotonic()
                for batch in self.parts.loader:
                    loss = self.train_step(batch, progress)
                    self.step += 1
                    self.note_pace(time.monotonic() - before)
                    self.watchdog.beat(self.step)
                    self.window.append(loss)
                    progress, stop = self.sync()
                    if log is not None:
                        self.write_line(log, progress)
                    if self.evaluation_due(progress):
                        self.evaluate(log)
                    if stop or time.monotonic() - saved > self.config.save_every or progress >= 1:
                        self.save(background=not stop)
                        saved = time.monotonic()
                    if stop:
                        self.keeper.finish()
                        command = "pretrain" if self.parts.task.pretrains else "train"
                        again = f"vitkit {command} {self.config.data} --out {self.config.out} --resume"
                        raise Stopped(f"stopped at step {self.step}, all saved. Resume with: {again}")
                    if progress >= 1:
                        break
                    before = time.monotonic()
        self.keeper.finish()
        if log is not None:
            log.close()
        self.check_learned()
        save_model(self, self.out / "model.safetensors")
        tested = self.test()
        reached = (self.step, self.epoch, self.elapsed, self.validation, self.best, tested)
        kept = (self.skipped, len(self.parts.loader.bad_files), self.at_start, self.verdict())
        return Result(self.out, self.parts.task.score, *reached, *kept, self.learned, self.parts.evaluated_images)

    @property
    def seen(self) -> Curves:
        """Losses of training and validation only where they are the same thing: not where targets are softened."""
        same = not (self.config.augment is not None and self.config.augment.soft_targets) and not self.config.teacher
        known = same and self.recent is not None and "loss" in self.validation
        return Curves(tuple(self.curve), (self.recent or 0.0, self.validation["loss"]) if known else None)

    def sync(self) -> tuple[float, bool]:
        """Progress, the wish to stop, and whether evaluation took too much of a budget: the same in all processes."""
        share = self.evaluation_total / max(1.0, self.elapsed) if self.config.budget else 0.0
        progress, stop, share = self.world.largest(self.progress(), float(self.stop_asked), share)
        self.too_much_evaluation = share > EVALUATION_SHARE
        return progress, bool(stop)

    def train_step(self, batch: Batch, progress: float) -> float:
        """One update from one batch of all processes; returns its mean loss."""
        config, parts = self.config, self.parts
        torch.manual_seed(int(sample_keys(config.seed, self.step, [self.world.rank])[0] >> 1))
        share = rate(progress, config.warmup, config.schedule, config.end)
        for optimizer in parts.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * share * group["factor"]
            optimizer.zero_grad(set_to_none=True)
        parts.wrapped.train()
        value = self.world.mean(self.backward(*self.inputs(batch, progress))).item()
        if not math.isfinite(value):
            self.skip(batch, value)
            return value
        self.bad_in_a_row = 0
        self.update()
        parts.trainee.after_step(progress)
        if parts.average is not None:
            parts.average.update(parts.model, self.step)
        return value

    def inputs(self, batch: Batch, progress: float) -> tuple[Tensor, Tensor]:
        """uint8 images -> what the trainee sees, and its targets."""
        model, start = self.parts.model.config, self.config.progressive
        images = normalise(batch.images.to(self.world.device, non_blocking=True), model.preprocessing)
        images, targets = self.parts.task.targets(images, batch.labels, batch.keys)
        if start < 1 and isinstance(model, ViTConfig):
            sides = zip(model.image_size, model.patch_size, strict=True)
            size = [grown_size(progress, start, side, patch) for side, patch in sides]
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        return images, targets

    def backward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the mean loss, in `accumulate` parts; processes talk only after the last."""
        parts, count = self.parts, self.config.accumulate
        chunks = list(zip(images.chunk(count), targets.chunk(count), strict=True))
        total = torch.zeros((), device=self.world.device)
        many = parts.wrapped if isinstance(parts.wrapped, nn.parallel.DistributedDataParallel) else None
        for left, (x, y) in zip(reversed(range(len(chunks))), chunks, strict=True):
            with many.no_sync() if many is not None and left else nullcontext():
                with parts.autocast():
                    loss = parts.task.loss(parts.wrapped, x, y) * (len(x) / len(images))
                parts.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def update(self) -> None:
        parts = self.parts
        for optimizer in parts.optimizers:
            parts.scaler.unscale_(optimizer)
        if self.config.clip:
            nn.utils.clip_grad_norm_(parts.learning, self.config.clip, foreach=True)
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
            save_replay(replay, self, batch)
        what = f"the loss was {value} in {BAD_STEPS} steps in a row, up to step {self.step}"
        advice = f"try a smaller --lr or --set precision=fp32. Look into it with: vitkit replay {replay}"
        raise TrainError(f"{what}; {advice}")

    # --- now and then ------------------------------------------------------------------------------

    def write_line(self, log: Log, progress: float) -> None:
        """Into the log every `log_every` steps; whoever watches also hears of slow steps between."""
        due = self.step % self.config.log_every == 0 or progress >= 1
        if not due and time.monotonic() - self.told <= TELL:
            return
        finite = [x for x in self.window if math.isfinite(x)]
        line: Line = {"step": self.step, "epoch": self.epoch}
        line["loss"] = self.recent = sum(finite) / len(finite) if finite else None
        line["lr"] = max(self.parts.optimizers[0].param_groups, key=lambda group: group["factor"])["lr"]  # the head's
        if self.skipped:
            line["skipped"] = self.skipped
        if self.pace is not None:
            line["threads"] = self.pace.now
        if due:
            self.window.clear()
            log.write({**line})
        self.told = time.monotonic()
        learned = self.elapsed - self.evaluation_total  # seconds: rates and the time left are without evaluation
        images = self.step * self.parts.loader.batch_size
        self.watcher.step(progress, line, Rate(learned, images, self.neighbours.missing()))

    @property
    def epoch(self) -> float:
        return round(self.step / len(self.parts.loader), 4)

    def evaluation_due(self, progress: float) -> bool:
        """Evenly spread, and always at the end; fewer when a budget is short.

        A budget that nothing was measured for has one within its first tenth: it tells how long the last will take.
        """
        if self.config.budget and not self.evaluation_seconds and progress >= 0.1:
            return True
        due = int(progress * self.evaluations + 1e-9)
        return progress >= 1 or (due > self.evaluations_done and not self.too_much_evaluation)

    @property
    def evaluations(self) -> int:
        """As many as were asked for; else a few, or one for each epoch, for about a tenth of the time at most.

        An image that is evaluated costs a third of one that is learned from: the same number in every resume.
        """
        config, validation = self.config, self.parts.validation
        if validation is None:  # the last weights are kept
            return 1
        if config.evaluations or config.budget:  # a budget is watched by the clock
            return config.evaluations or MOST
        affordable = EVALUATED * 3 * config.steps * self.parts.loader.batch_size / max(1, len(validation.source))
        return max(1, min(MOST, max(FEW, config.steps // len(self.parts.loader)), int(affordable)))

    def evaluate(self, log: Log | None) -> None:
        before, progress, metric = time.monotonic(), self.progress(), self.parts.task.score
        self.validation = self.metrics(self.parts.validation)
        self.evaluations_done = max(self.evaluations_done + 1, int(progress * self.evaluations + 1e-9))
        score = self.validation.get(metric.key, 0.0)
        last = self.parts.task.pretrains or not self.validation  # of what nothing can be chosen by, the last weights
        peak = metric.best(score, self.best.get("score", score), *(s for _, s in self.curve))
        if not self.best or last or metric.rivals(score, peak, self.validation_count * bool(self.best["step"])):
            self.best = {"score": score, "step": self.step, **self.validation}
            save_model(self, self.out / "best.safetensors")
        self.evaluation_seconds = time.monotonic() - before
        self.evaluation_total += self.evaluation_seconds
        line: Line = {"step": self.step, "epoch": self.epoch}
        verdict = self.verdict() if self.parts.task.pretrains else ""
        if log is not None:
            about = {"verdict": verdict} if verdict else {}
            log.write({**line, **{f"val_{k}": v for k, v in self.validation.items()}, **about})
        self.watcher.evaluated(line, *(metric.text(value) if self.validation else "" for value in (score, peak)))
        self.watcher.aside(verdict)
        if self.validation:
            self.watcher.scored(progress, score, metric.higher)
            self.stop_asked |= self.watcher.wants_stop
            self.curve.append((progress, score))
            if metric.higher and (ahead := forecast(self.curve, 1.0, self.validation_count)) is not None:
                self.watcher.expected(ahead.text(metric))

    def verdict(self) -> str:
        """Whether pre-training works, in words; of what knew its classes before: where it did not get better."""
        told = self.parts.task.pretrains or self.best.get("step") == 0
        return self.parts.task.verdict(self.at_start, self.validation) if self.at_start and told else ""

    def metrics(self, loader: Loader | None, model: nn.Module | None = None) -> dict[str, float]:
        """Of the weights as they are now, or of `model`; none without images to evaluate on."""
        model = self.parts.on_input(self.parts.evaluated if model is None else model)
        found = quick(model, loader, self.world.device, self.parts.task, self.watchdog) if loader is not None else {}
        return {k: v for k, v in found.items() if k != "samples"}

    def test(self) -> dict[str, float]:
        """The metrics of the weights that are kept on the test split; all that was found is in `evaluation`."""
        loader, task = self.parts.test, self.parts.task
        kept = self.kept()
        if loader is None:
            return {}
        model = self.parts.on_input(self.parts.evaluated if kept is None else kept)
        records = record_all(model, model, task.record, loader, self.world.device, self.watchdog)
        self.evaluation = task.evaluation(records, loader.source) if self.world.first else None
        return task.measure(records)

    def kept(self) -> nn.Module | None:
        """The weights of best.safetensors; None when they are those of now, or too large for one process."""
        self.world.wait()
        if self.best.get("step") == self.step or self.config.shard or self.parts.test is None:
            return None
        return load(str(self.out / "best.safetensors"))

    def save(self, background: bool) -> None:
        """The whole state of the run; from then on it can be resumed from here."""
        state = state_of(self)
        if self.config.shard:
            with self.may_miss(background):
                save_sharded(self, state)
        elif self.world.first:
            with self.may_miss(background):
                self.keeper.finish()
            about = partial(describe, model=self.parts.model, outputs=self.parts.task.outputs)
            self.keeper.save(self.step, state, background, about)

    @contextmanager
    def may_miss(self, go_on: bool) -> Iterator[None]:
        """A checkpoint that could not be written is tried again with the next; several in a row end the run."""
        try:
            yield
            self.missed = 0
        except CheckpointError as e:
            self.missed += 1
            if not go_on or self.missed >= MISSED:
                raise
            self.watcher.note(f"{e}. Until then the run goes on and tries again with every checkpoint")

    def check_learned(self) -> None:
        """A run that came to its end without finite numbers is no success: its weights are good for nothing."""
        loss = self.validation.get("loss", 0.0)
        if 2 * self.skipped > self.step or not math.isfinite(loss):
            raise TrainError(
                f"the run has diverged: the loss was not finite in {self.skipped} of {self.step} steps, and is {loss} "
                f"on the validation split. Start again in another folder with a smaller --lr"
            )

    def resume(self, restart: bool = False, accept_order: bool = False) -> bool:
        """Take up the newest sound checkpoint; False when there is none. With `restart` all are put aside.

        `accept_order`: also in the middle of an epoch that began in another order of samples.
        """
        if restart and self.world.first:
            for step in self.keeper.steps():
                self.watcher.note(f"the checkpoint of step {step} is kept as {self.keeper.put_aside(step)}")
        folder = self.world.share(self.keeper.newest(self.watcher) if self.world.first else None)
        if folder is None:
            return False
        restore(self, folder, accept_order)
        self.watcher.note(f"resumed at step {self.step} from {folder}")
        return True
