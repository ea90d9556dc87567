"""A linear map from features to what a task asks for, trained to convergence.

Logistic regression (any convex loss of a task) by L-BFGS, ridge regression in closed form. How strongly large weights
are held back is chosen by cross-validation within the samples themselves: another split stays untouched. So is whether
features are standardised each or all by one scale; the map that comes out takes them as they are.

Shapes: N samples, D width of the features, C outputs of the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.data.keys import permutation
from vitkit.progress import SILENT, Progress
from vitkit.tasks.base import Task
from vitkit.world import using_threads

STRENGTHS = [10 ** (1 - i / 2) for i in range(15)]  # of the penalty strength / 2 * |weights|^2: 10 to 1e-6
FOLDS = 5
PATIENCE = 4  # so many strengths in a row without a better score end the search
MOST_WORK = 2e9  # N D C; beyond, one part in five is held out instead of five times one
ALONE = 1e7  # N D C; below, products are so small that several threads mostly wait for each other: an estimate
_IN_DOUBLE = 1 << 27  # N D; more is computed in single precision


class Tried(NamedTuple):
    strength: float
    score: float  # the task's, on samples that were held out
    loss: float


@dataclass(frozen=True)
class Linear:
    """x -> x @ weight.T + bias."""

    weight: Tensor  # C D float32
    bias: Tensor  # C
    strength: float
    tried: tuple[Tried, ...]
    folds: int  # 1: one part was held out

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight, self.bias)  # N C

    @property
    def chosen(self) -> Tried:
        return next(t for t in self.tried if t.strength == self.strength)


def fit(
    task: Task,
    x: Tensor,
    labels: Tensor,
    groups: np.ndarray,
    seed: int = 0,
    progress: Progress = SILENT,
    folds: int = FOLDS,
) -> Linear:
    """The map with the best cross-validated score, from all samples.

    groups  the class of every sample, so that each part has its share of each; views of one image have one group
            and follow each other at a distance of len(groups): x has len(groups) rows, or several times as many
    folds   1: one part in five is held out, not each in turn
    """
    with using_threads(1 if x.numel() * task.count < ALONE else 0):
        return _fit(task, x, labels, groups, seed, progress, folds)


def _fit(
    task: Task, x: Tensor, labels: Tensor, groups: np.ndarray, seed: int, progress: Progress, folds: int
) -> Linear:
    views, parts = len(x) // len(groups), stratified(groups, seed)
    held_out = [torch.from_numpy(np.tile(parts == part, views)) for part in range(FOLDS) if (parts == part).any()]
    if x.numel() * task.count > MOST_WORK or folds == 1:
        held_out = held_out[:1]
    solver = Ridge if task.loss_name == "mse" else Minimised
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0)
    each = torch.where(std > 1e-6 * (1 + mean.abs()), std, torch.inf)  # what never changes says nothing
    common = std.square().mean().sqrt().clamp(min=1e-12).expand_as(std)
    x = (x.double() if x.numel() <= _IN_DOUBLE else x) - mean  # N D
    y = task.targets(x, labels, np.empty(0, dtype=np.uint64))[1]
    y = y.to(x.dtype) if y.is_floating_point() else y
    found: list[tuple[Tried, list[Tried], Tensor]] = []
    for scale in (each, common):
        done = len(STRENGTHS) * len(found)
        turned, _ = _turned(x / scale)
        solvers = [solver(task, turned[~out], y[~out]) for out in held_out]
        tried = _search(task, solvers, turned, labels, held_out, progress, done)
        found.append((_best(task, tried), tried, scale))
    chosen = _best(task, [best for best, _, _ in found])
    _, tried, scale = next(f for f in found if f[0] is chosen)
    turned, back = _turned(x / scale)
    weights = solver(task, turned, y, precise=True).at(chosen.strength)  # C D+1
    weight, bias = weights[:, :-1] @ back / scale, weights[:, -1]
    bias = bias - weight @ mean.to(weight)
    return Linear(weight.float(), bias.float(), chosen.strength, tuple(tried), len(held_out))


def _turned(x: Tensor) -> tuple[Tensor, Tensor]:
    """N D -> N E, and the E D that lead back: fewer samples than features span no more than as many dimensions.

    Lengths and angles stay, so the best map and its penalty do too.
    """
    if len(x) >= x.shape[1]:
        return x, torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    back = torch.linalg.qr(x.T)[0].T  # N D, rows of length 1 at right angles
    return x @ back.T, back


def _search(
    task: Task,
    solvers: list[Ridge | Minimised],
    x: Tensor,
    labels: Tensor,
    held_out: list[Tensor],
    progress: Progress,
    done: int,
) -> list[Tried]:
    tried: list[Tried] = []
    for count, strength in enumerate(STRENGTHS, start=1):
        outputs = torch.cat([_apply(s.at(strength), x[out]) for s, out in zip(solvers, held_out, strict=True)])
        found = task.metrics(outputs, torch.cat([labels[out] for out in held_out]))
        tried.append(Tried(strength, found[task.score.key], found["loss"]))
        progress.update("choosing the regularization", done + count, 2 * len(STRENGTHS))
        if count - tried.index(_best(task, tried)) > PATIENCE:
            break
    return tried


def _best(task: Task, tried: Sequence[Tried]) -> Tried:
    """The best score; of equal ones the lowest loss."""
    sign = -1 if task.score.higher else 1
    return min(tried, key=lambda t: (sign * t.score, t.loss))


def stratified(groups: np.ndarray, seed: int = 0) -> np.ndarray:
    """The part 0 .. FOLDS - 1 of every sample: parts of equal size with an equal share of every group."""
    mixed = permutation(seed, 0, len(groups), "folds")
    order = mixed[np.argsort(groups[mixed], kind="stable")]  # group after group, each in random order
    parts = np.empty(len(groups), dtype=np.int64)
    parts[order] = np.arange(len(groups)) % FOLDS
    return parts


def _apply(weights: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weights[:, :-1], weights[:, -1])


class Minimised:
    """task.criterion + strength / 2 * |weights|^2, by L-BFGS; every strength starts from the solution of the last."""

    def __init__(self, task: Task, x: Tensor, y: Tensor, precise: bool = False) -> None:
        self.task, self.x, self.y = task, x, y
        self.weights = x.new_zeros(task.count, x.shape[1] + 1)  # the bias last
        self.limits = (2000, 1e-7, 1e-12) if precise else (100, 1e-5, 1e-9)

    def at(self, strength: float) -> Tensor:
        """C D+1"""
        weights = self.weights.clone().requires_grad_()
        most, gradient, change = self.limits
        optimizer = torch.optim.LBFGS(
            [weights],
            max_iter=most,
            tolerance_grad=gradient,
            tolerance_change=change,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def objective() -> Tensor:
            optimizer.zero_grad()
            penalty = strength / 2 * weights[:, :-1].square().sum()
            loss = self.task.criterion(_apply(weights, self.x), self.y) + penalty
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(objective)
        self.weights = weights.detach()
        return self.weights


class Ridge:
    """mean |x w - y|^2 + strength * |w|^2 in closed form, from one decomposition for all strengths."""

    def __init__(self, task: Task, x: Tensor, y: Tensor, precise: bool = False) -> None:
        self.mean, self.offset = x.mean(dim=0), y.mean(dim=0)
        x, y = (x - self.mean).double(), (y - self.offset).double()
        if len(x) >= x.shape[1]:
            self.values, self.basis = torch.linalg.eigh(x.T @ x / len(x))  # D; D D
            self.projected = self.basis.T @ (x.T @ y / len(x))
        else:  # fewer samples than features: the same from the smaller matrix
            self.values, vectors = torch.linalg.eigh(x @ x.T / len(x))  # N; N N
            self.basis, self.projected = x.T @ vectors, vectors.T @ y / len(x)

    def at(self, strength: float) -> Tensor:
        """C D+1"""
        w = self.basis @ (self.projected / (self.values.clamp(min=0) + strength)[:, None])  # D C
        bias = self.offset - self.mean.double() @ w
        return torch.cat([w.T, bias[:, None]], dim=1).to(self.mean.dtype)
