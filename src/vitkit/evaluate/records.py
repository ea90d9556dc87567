"""What is remembered of every sample: a few numbers, from which every metric follows.

Ranks judge different samples; `merge` puts their records together, each sample once, in the order of
the set. So the result does not depend on how many ranks took part.

Shapes: B samples of a batch, N of the set, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.data import BadFile
from vitkit.evaluate.metrics import mean_average_precision

Judged = dict[str, Tensor]


@dataclass(frozen=True)
class Records:
    """One row per sample that could be read. Of the last four, the first three or the last one is there.

    indices      (N,) number in the set
    labels       (N,) class numbers, or (N, C) zeros and ones when a picture may have several
    loss         (N,) cross-entropy; with several labels the mean over the questions
    predicted    (N,) the class with the highest score
    probability  (N,) what the model gave it
    place        (N,) how many classes stood before the right one; 0 is a hit
    scores       (N, C) logits, with several labels
    bad          files that could not be read, and therefore have no row
    """

    indices: np.ndarray
    labels: np.ndarray
    loss: np.ndarray
    predicted: np.ndarray | None = None
    probability: np.ndarray | None = None
    place: np.ndarray | None = None
    scores: np.ndarray | None = None
    bad: tuple[BadFile, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def mean_loss(self) -> float:
        return float(self.loss.mean()) if len(self) else float("nan")

    def top(self, k: int) -> float:
        """The share of samples whose class is among the k highest scores."""
        assert self.place is not None, "with several labels there is no top-k; use map"
        return float((self.place < k).mean()) if len(self) else float("nan")

    @property
    def wrong(self) -> np.ndarray:
        """Rows that are wrong, the highest loss first; with several labels, wrong about any of them."""
        if self.scores is None:
            assert self.place is not None
            rows = np.flatnonzero(self.place > 0)
        else:
            rows = np.flatnonzero(((self.scores > 0) != (self.labels > 0)).any(axis=1))
        return rows[np.argsort(-np.nan_to_num(self.loss[rows], nan=np.inf), kind="stable")]

    @property
    def map(self) -> float:
        assert self.scores is not None, "mAP is for several labels; use top(1)"
        return mean_average_precision(self.labels, self.scores)


def judge(logits: Tensor, labels: Tensor) -> Judged:
    """B C, and B or B C -> what `Records` holds of each sample. Where the logits are, nothing is waited for."""
    logits = logits.float()
    if labels.ndim == 2:
        loss = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(dim=1)
        return {"labels": labels, "loss": loss, "scores": logits}
    label = labels[:, None]  # B 1
    predicted = logits.argmax(dim=1, keepdim=True)  # B 1, the first of equals
    log_p = logits.log_softmax(dim=1)
    own = logits.gather(1, label)  # B 1
    before = ~(logits <= own)  # not >: a score that is no number stands before everything
    before |= (logits == own) & (torch.arange(logits.shape[1], device=logits.device) < label)
    place = before.sum(dim=1)
    return {
        "labels": labels,
        "loss": -log_p.gather(1, label)[:, 0],
        "predicted": predicted[:, 0],
        "probability": log_p.gather(1, predicted)[:, 0].exp(),
        "place": torch.where(own[:, 0].isnan(), logits.shape[1], place),
    }


def collect(indices: list[Tensor], judged: list[Judged], bad: Sequence[BadFile] = ()) -> Records:
    """The batches of one rank -> its records. Losses are kept in float64, so that their order matters little."""
    columns = {name: torch.cat([j[name] for j in judged]).cpu().numpy() for name in judged[0]}
    columns["loss"] = columns["loss"].astype(np.float64)
    return Records(indices=torch.cat(indices).numpy(), **columns, bad=tuple(bad))


def merge(parts: Sequence[Records]) -> Records:
    """The records of all ranks, each sample once, in the order of the set."""
    indices = np.concatenate([p.indices for p in parts])
    order = np.unique(indices, return_index=True)[1]
    columns: dict[str, np.ndarray] = {}
    for name in (f.name for f in fields(Records) if f.name != "bad"):
        values = [getattr(p, name) for p in parts]
        if values[0] is not None:
            columns[name] = np.concatenate(values)[order]
    bad = {b.path: b for p in parts for b in p.bad}
    return Records(**columns, bad=tuple(bad[path] for path in sorted(bad)))
