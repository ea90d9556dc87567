"""How good is a representation, without training anything: nearest neighbours, and few-shot least squares.

Both learn from the split `train` in closed form and are judged on another. The representation is what
the classifier sees; with a distillation token, the mean of the two.

Shapes: N samples, D width of the representation, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data import BadFile, Batch, Source
from vitkit.data.packed import Names
from vitkit.errors import ConfigError
from vitkit.evaluate.classes import unwrapped
from vitkit.evaluate.metrics import top_k
from vitkit.evaluate.result import plain
from vitkit.evaluate.run import OnBatch, evaluation_loader, feed
from vitkit.model.stem import ResNet
from vitkit.ranks import gather

NEIGHBOURS, TEMPERATURE = 20, 0.07  # DINO
SHOTS, SEEDS = (5, 10), 3
L2 = 2.0**10  # big_vision: one strength for every set, and a constant feature for the bias that is so
BIAS = 100.0  # large that it is hardly held back
_SIMILARITIES_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Probe:
    """`accuracy` maps what was tried to a fraction: top1 and top5 for knn, the number of shots for fewshot."""

    probe: str
    data: str
    split: str
    samples: int
    learned_from: int  # samples of the split train
    accuracy: dict[str, float]
    settings: dict[str, Any]
    bad_files: tuple[BadFile, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        bad = [{"path": b.path, "class": b.label, "reason": b.reason} for b in self.bad_files]
        return dict(plain({**asdict(self), "bad_files": bad}))


# --- representations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Features:
    """Representations of the readable samples, in the order of the set."""

    values: Tensor  # N D float32, on the CPU
    labels: np.ndarray  # N
    bad: tuple[BadFile, ...]


def representation(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """What the classifier sees: pictures B C H W -> B D."""
    inner = unwrapped(model)
    if isinstance(inner, ResNet):
        return lambda images: inner.stem(images).mean((-2, -1))

    def represent(images: Tensor) -> Tensor:
        x = inner.head.represent(inner.tokens(images))  # B D, or B 2 D with a distillation token
        return x.mean(dim=1) if inner.config.distillation_token else x

    return represent


def features(
    model: nn.Module,
    source: Source,
    batch_size: int | None = None,
    workers: int = 0,
    device: str | torch.device | None = None,
    rank: int = 0,
    world_size: int = 1,
    on_batch: OnBatch | None = None,
) -> Features:
    """The representation of every readable sample; ranks share the work and all get the whole."""
    if source.multi_label:
        raise ConfigError(f"a probe needs one class per picture, and {source.name} has several; leave out --probe")
    rows: list[tuple[Tensor, Tensor]] = []

    def take(outputs: Tensor, batch: Batch) -> None:
        rows.append((batch.indices, outputs.float().cpu()))

    config = unwrapped(model).config
    with evaluation_loader(source, config, batch_size, workers, rank, world_size) as loader:
        bad = feed(model, representation(model), loader, take, device, on_batch)
    part = torch.cat([i for i, _ in rows]).numpy(), torch.cat([x for _, x in rows]).numpy(), bad
    parts = gather(part, world_size)
    indices = np.concatenate([i for i, _, _ in parts])
    order = np.unique(indices, return_index=True)[1]
    values = torch.from_numpy(np.concatenate([x for _, x, _ in parts])[order])
    return Features(values, source.labels[indices[order]], tuple(b for _, _, of_rank in parts for b in of_rank))


# --- nearest neighbours ------------------------------------------------------------------------------


def knn(
    model: nn.Module,
    train: Source,
    test: Source,
    neighbours: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
    **how: Any,
) -> Probe:
    """Every picture gets the class that its nearest neighbours in `train` vote for; `how` as in `features`."""
    known, asked = features(model, train, **how), features(model, test, **how)
    neighbours = min(neighbours, len(known.values))
    votes = knn_votes(known.values, known.labels, asked.values, len(train.classes), neighbours, temperature)
    accuracy = {f"top{k}": top_k(votes, asked.labels, k) for k in (1, 5)}
    settings = {"neighbours": neighbours, "temperature": temperature}
    return Probe(
        "knn", test.name, test.split, len(asked.labels), len(known.labels), accuracy, settings, known.bad + asked.bad
    )


def knn_votes(
    known: Tensor,
    labels: np.ndarray,
    asked: Tensor,
    classes: int,
    neighbours: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> np.ndarray:
    """N D, N, M D -> votes M C: each neighbour votes with exp(cosine / temperature)."""
    known, asked = F.normalize(known, dim=1), F.normalize(asked, dim=1)
    of = torch.from_numpy(labels)
    votes = torch.zeros(len(asked), classes)
    step = max(1, _SIMILARITIES_AT_ONCE // len(known))
    for low in range(0, len(asked), step):
        similarity, nearest = (asked[low : low + step] @ known.T).topk(neighbours, dim=1)
        votes[low : low + step].scatter_add_(1, of[nearest], (similarity / temperature).exp())
    return votes.numpy()


# --- few-shot least squares --------------------------------------------------------------------------


def fewshot(
    model: nn.Module,
    train: Source,
    test: Source,
    shots: Sequence[int] = SHOTS,
    seeds: int = SEEDS,
    l2: float = L2,
    **how: Any,
) -> Probe:
    """The paper's probe: ridge regression from a few pictures per class; `how` as in `features`.

    The mean over `seeds` draws of the pictures. Only pictures that are drawn are read.
    """
    if train.multi_label:
        raise ConfigError(f"a probe needs one class per picture, and {train.name} has several; leave out --probe")
    drawn = [draw_shots(train.labels, len(train.classes), max(shots), seed) for seed in range(seeds)]
    used = np.unique(np.concatenate([i for of_seed in drawn for i in of_seed]))
    known = features(model, Subset(train, used), **how)
    asked = features(model, test, **how)
    read = np.setdiff1d(used, [used[i] for i in _unread(train, used, known.bad)])  # rows of `known.values`
    accuracy = {}
    for n in shots:
        right = []
        for of_seed in drawn:
            chosen = np.intersect1d(np.concatenate([i[:n] for i in of_seed]), read)
            rows = np.searchsorted(read, chosen)
            scores = least_squares(known.values[rows], train.labels[chosen], asked.values, len(train.classes), l2)
            right.append(top_k(scores, asked.labels, 1))
        accuracy[str(n)] = float(np.mean(right))
    settings = {"shots": list(shots), "seeds": seeds, "l2": l2}
    return Probe(
        "fewshot", test.name, test.split, len(asked.labels), len(read), accuracy, settings, known.bad + asked.bad
    )


def draw_shots(labels: np.ndarray, classes: int, shots: int, seed: int) -> list[np.ndarray]:
    """For every class the numbers of a few samples; a class that has fewer gives all it has."""
    random = np.random.default_rng(seed)
    return [random.permutation(np.flatnonzero(labels == c))[:shots] for c in range(classes)]


def least_squares(known: Tensor, labels: np.ndarray, asked: Tensor, classes: int, l2: float = L2) -> np.ndarray:
    """N D, N, M D -> scores M C: ridge regression of standardised features to targets of -1 and 1, in closed form."""
    mean, std = known.double().mean(dim=0), known.double().std(dim=0, correction=0) + 1e-5
    x, z = (F.pad((v.double() - mean) / std, (0, 1), value=BIAS) for v in (known, asked))  # N D+1, M D+1
    y = 2.0 * F.one_hot(torch.from_numpy(labels), classes).double() - 1  # N C
    if len(x) >= x.shape[1]:
        weights = torch.linalg.solve(x.T @ x + l2 * torch.eye(x.shape[1], dtype=x.dtype), x.T @ y)
    else:  # fewer samples than features: the same weights from the smaller system
        weights = x.T @ torch.linalg.solve(x @ x.T + l2 * torch.eye(len(x), dtype=x.dtype), y)
    return (z @ weights).numpy()  # M C


def _unread(source: Source, used: np.ndarray, bad: Sequence[BadFile]) -> list[int]:
    paths = {b.path for b in bad}
    return [row for row, index in enumerate(used.tolist()) if source.where(index) in paths] if paths else []


class Subset(Source):
    """Some samples of another source."""

    def __init__(self, whole: Source, indices: np.ndarray) -> None:
        names = Names(whole.where(int(i)) for i in indices)
        labels = whole.labels[indices]
        super().__init__(whole.name, whole.split, whole.splits, whole.classes, labels, names, whole.channels)
        self.whole, self.chosen, self.prepared = whole, indices, whole.prepared

    @property
    def pixels(self) -> Tensor | None:
        return None if self.whole.pixels is None else self.whole.pixels[torch.from_numpy(self.chosen)]

    def encoded(self, index: int) -> Any:
        return self.whole.encoded(int(self.chosen[index]))

    def picture(self, index: int, *how: Any, **more: Any) -> Any:
        return self.whole.picture(int(self.chosen[index]), *how, **more)
