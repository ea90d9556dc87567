"""Is pre-training working? Pure functions of the features of some images.

Shapes: N images, D width, K codes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

NEIGHBOURS, TEMPERATURE = 20, 0.07  # of the online k-NN, as in DINO


def effective_rank(features: Tensor) -> float:
    """RankMe (Garrido et al. 2023): exp of the entropy of the singular values of N D, from 1 to D.

    The mean is taken off first: of mean-pooled tokens it is so large that it would hide everything else.
    """
    values = torch.linalg.svdvals((features - features.mean(dim=0)).double())
    shares = values / values.sum().clamp(min=1e-12) + 1e-7
    return float((-(shares * shares.log()).sum()).exp())


def spread(features: Tensor) -> float:
    """The standard deviation of a coordinate of unit vectors over images, times sqrt(D): 0 when all are equal, about
    1 when they point everywhere (SimSiam's measure of collapse)."""
    return float(F.normalize(features.double(), dim=1).std(dim=0, correction=0).mean()) * math.sqrt(features.shape[1])


def uniformity(features: Tensor) -> float:
    """Wang and Isola 2020: log mean exp(-2 |x - y|^2) over pairs of unit vectors; 0 when all are equal."""
    if len(features) < 2:
        return 0.0
    return float(torch.pdist(F.normalize(features.double(), dim=1)).square().mul(-2).exp().mean().log())


def attention_entropy(weights: Tensor) -> Tensor:
    """B H T T -> B: mean entropy of where tokens look, 0 for one place and 1 for everywhere alike."""
    entropy = -(weights * weights.clamp(min=1e-12).log()).sum(dim=-1)  # B H T
    return entropy.mean(dim=(1, 2)) / max(math.log(weights.shape[-1]), 1e-12)


def information(codes: Tensor) -> float:
    """What codes (N K, rows sum to 1) tell about their image, as a share of log min(N, K).

    The entropy of the mean code less the mean entropy of a code: 0 when all images get one code, and when every
    image gets all codes alike, which are the two ways in which DINO collapses.
    """
    codes = codes.double().clamp(min=1e-12)
    mean = codes.mean(dim=0)
    information = -(mean * mean.log()).sum() + (codes * codes.log()).sum(dim=1).mean()
    return float(information) / max(math.log(min(codes.shape)), 1e-12)


def neighbours_accuracy(features: Tensor, labels: Tensor, classes: int) -> float:
    """Leave one out: the share of images whose nearest neighbours among the others vote for their class."""
    unit = F.normalize(features.float(), dim=1)
    similarity = unit @ unit.T
    similarity.fill_diagonal_(-torch.inf)
    values, nearest = similarity.topk(min(NEIGHBOURS, len(unit) - 1), dim=1)
    votes = torch.zeros(len(unit), classes).scatter_add_(1, labels[nearest], (values / TEMPERATURE).exp())
    return float((votes.argmax(dim=1) == labels).double().mean())


def retrieval_accuracy(features: Tensor, views: Tensor) -> float:
    """The share of images whose changed view is nearer to them than to any other, without the features' mean."""
    mean = features.mean(dim=0)
    similarity = F.normalize(views - mean, dim=1) @ F.normalize(features - mean, dim=1).T  # N N
    own = similarity.diagonal().clone()
    best = similarity.fill_diagonal_(-torch.inf).amax(dim=1)
    return float((own > best).double().mean()) if len(features) > 1 else 1.0
