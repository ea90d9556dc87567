"""A head on a frozen backbone: features are computed once, and the head is trained on them to convergence.

No epochs and no learning rate: the backbone sees every image once (every view of it, with augmentation), and
`evaluation.linear` finds the best head for these features. The features are kept beside the run, under a name made of
weights and data, so a run that was killed goes on where it was and ends with the same bits.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from dataclasses import replace

import torch

from vitkit.checkpoints.native import save
from vitkit.data import Loader
from vitkit.data.identity import digest
from vitkit.data.order import stratified_order
from vitkit.errors import TrainError, shell_word
from vitkit.evaluation.features import Features, features
from vitkit.evaluation.linear import FOLDS, Linear, fit
from vitkit.io import canonical
from vitkit.storage import workplace
from vitkit.training.advice import Curves
from vitkit.training.baseline import LEARNED, compare
from vitkit.training.log import Listener, Log
from vitkit.training.loop import ending
from vitkit.training.parts import Parts
from vitkit.training.result import Result, Watcher
from vitkit.training.stopping import Stopped, stop_signals

FOLDER = "features"


class FrozenRun:
    """What the loop is to other runs."""

    def __init__(self, parts: Parts, watcher: Watcher, started: float, listener: Listener | None = None) -> None:
        self.listener = listener
        self.parts, self.watcher, self.started, self.out = parts, watcher, started, workplace(parts.config.out)
        self.stop_asked, self.seen, self.begun = False, Curves(), 0.0
        self.folder = self.out / FOLDER / key(parts)

    def run(self) -> Result:
        task, watcher = self.parts.task, self.watcher
        for other in (self.out / FOLDER).glob("*"):
            if other != self.folder:  # of other weights or other data
                shutil.rmtree(other, ignore_errors=True)
        before = time.monotonic()
        self.begun = before - self.started
        with stop_signals(self):
            loaders = (self.parts.validation, self.parts.test)  # first: what there is no time for is left out of train
            others = [None if loader is None else self.features(loader) for loader in loaders]
            known = self.known()
            self.parts.loader.bad_files.record(*known[0].bad)
            seconds = time.monotonic() - self.started
            images = sum(len(f.indices) for f in (*known, *others) if f is not None)
            watcher.note(f"features: {images:,} images seen once, after {seconds:.0f} s; now the head learns from them")
            head = self.learn(known)
            self.raise_if_stopped()
        self.put_into_model(head)
        self.seen = self.curves(known[0], others[0])
        found, tested = (self.metrics(head, f) for f in others)
        self.write(head, found)
        best = {"score": found.get(task.score.key, 0.0), "step": len(head.tried), **found}
        now, parts = time.monotonic(), self.parts
        lengths = len(head.tried), float(len(known)), now - self.started
        result = Result(self.out, task.score, *lengths, found, best, tested, 0, len(parts.loader.bad_files))
        return replace(result, learning=now - before, images=parts.evaluated_images)

    def curves(self, known: Features, asked: Features | None) -> Curves:
        """How the score grows with the images, from a bounded part of the features."""
        source, task = self.parts.loader.source, self.parts.task
        if asked is None:
            return Curves()
        rows = stratified_order(source.groups[known.indices], self.parts.config.seed)[:LEARNED]
        x, labels, groups = known.values[rows], known.labels[rows], source.groups[known.indices[rows]]
        one = compare(task, "features of the backbone", x, labels, groups, asked.values, asked.labels)
        return Curves(((1.0, one.score),), None, (one,)) if one is not None else Curves()

    def known(self) -> list[Features]:
        """Of the training images, in each view; when the time of a budget is over, of those and the views so far."""
        known: list[Features] = []
        for view in range(self.parts.config.views):
            found = self.features(self.parts.loader, view)
            if known and len(found.indices) < len(known[0].indices):
                break
            known.append(found)
        count, there = len(known[0].indices), len(self.parts.loader.source)
        if count + len(known[0].bad) < there or len(known) < self.parts.config.views:
            slower = f"the head learns from {count:,} of {there:,} images in {len(known)} views"
            self.watcher.note(f"features: slower than they were measured; for the budget {slower}")
        return known

    def time_is_over(self) -> bool:
        """Whether what is left of a budget is needed for the head."""
        config = self.parts.config
        after = ending(self.begun) + float(str(config.costs.get("head", 0.0)))
        return bool(config.budget) and time.monotonic() - self.started > config.budget - after

    def features(self, loader: Loader, view: int = 0) -> Features:
        """Of every sample of a split; of the training split as it is varied for this view."""
        varied = loader.augment if self.parts.config.views > 1 else None
        name = f"{loader.source.split}-{view}" if varied is not None else loader.source.split
        if name == "test" and loader is self.parts.validation and self.parts.config.validation_images:
            name = "test-part"
        about = (loader.source, self.watcher, self.folder / f"{name}.f32", varied, self.parts.config.seed, view)
        enough = self.time_is_over if loader is self.parts.loader else lambda: False
        return features(self.parts.model, *about, check=self.raise_if_stopped, enough=enough, workers=loader.workers)

    def learn(self, known: list[Features]) -> Linear:
        source = self.parts.loader.source
        x = torch.cat([f.values for f in known]) if len(known) > 1 else known[0].values
        labels = torch.cat([f.labels for f in known])
        groups, config = source.groups[known[0].indices], self.parts.config
        folds = int(str(config.costs.get("folds", FOLDS)))
        head = fit(self.parts.task, x, labels, groups, config.seed, self.watcher, folds)
        if not all(torch.isfinite(t).all() for t in (head.weight, head.bias)):
            raise TrainError("some features are not finite numbers, and no head can learn from them; check --init")
        score = self.parts.task.score
        how = f"{head.folds}-fold cross-validation" if head.folds > 1 else "a fifth of train that was held out"
        reached = f"{score.words} {score.text(head.chosen.score)} by {how}"
        kind = "ridge regression" if self.parts.task.loss_name == "mse" else "logistic regression"
        self.watcher.note(f"head: {kind}, regularization {head.strength:.2g}, chosen for the best {reached}")
        return head

    def put_into_model(self, head: Linear) -> None:
        for part in self.parts.model.classifiers:  # two of them are averaged, as their features were
            part.weight.data.copy_(head.weight)
            part.bias.data.copy_(head.bias)
        for name in ("best.safetensors", "model.safetensors"):  # one set of weights under both names
            save(self.parts.model, self.out / name)

    def metrics(self, head: Linear, found: Features | None) -> dict[str, float]:
        return {} if found is None else self.parts.task.metrics(head(found.values), found.labels)

    def write(self, head: Linear, validation: dict[str, float]) -> None:
        """A line of the log for every strength that was tried, and one for the head."""
        log, key, epoch = Log(self.out, also=self.listener), self.parts.task.score.key, float(self.parts.config.views)
        for step, tried in enumerate(head.tried, start=1):
            line = {"step": step, "epoch": epoch, "loss": tried.loss, "strength": tried.strength}
            log.write({**line, f"cross_validated_{key}": tried.score})
        log.write({"step": len(head.tried), "epoch": epoch, **{f"val_{k}": v for k, v in validation.items()}})
        log.close()

    def raise_if_stopped(self) -> None:
        if self.stop_asked:
            again = f"vitkit train {shell_word(self.parts.config.data)} --out {shell_word(self.out)} --resume"
            raise Stopped(f"stopped, all features so far are saved. Resume with: {again}")


def key(parts: Parts, **more: object) -> str:
    """Weights that do not learn, how images are read and varied, and which they are."""
    model, config = parts.model, parts.config
    varied = vars(config.augment) if config.augment is not None else {}
    about = {"model": model.config.to_dict(), "augment": varied, "seed": config.seed, **more}
    found = hashlib.blake2b(canonical(about).encode(), digest_size=8)
    learning = {id(p) for p in parts.learning}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in learning:
            found.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    for loader in filter(None, (parts.loader, parts.validation, parts.test)):
        found.update(digest(loader.source).encode())
    return found.hexdigest()
