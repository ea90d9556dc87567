"""Is pre-training working? Pure functions of the features of some images.

Shapes: N images, D width, K codes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

NEIGHBOURS, TEMPERATURE = 20, 0.07  # of the online k-NN, as in DINO
RIDGE = 0.01  # of the online linear probe, for features of unit variance


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


def codes_in_use(codes: Tensor) -> float:
    """exp of the entropy of the mean code (N K, rows sum to 1): from 1, one code for all images, to K."""
    mean = codes.double().mean(dim=0).clamp(min=1e-12)
    return float((-(mean * mean.log()).sum()).exp())


def context(losses: Tensor, swapped: Tensor) -> float:
    """How much of the loss seeing the image itself saves, compared with predictions that were made for another one:
    0 when predictions do not depend on the image."""
    return 1 - float(losses.double().mean()) / max(float(swapped.double().mean()), 1e-12)


def standard_error(before: float, after: float, count: int) -> float:
    """Of the difference of two accuracies on `count` images, each a little nearer to one half than it was measured,
    so that neither 0 nor 1 counts as certain. Both were measured on the same images: it is less in truth."""
    shares = ((share * count + 1) / (count + 2) for share in (before, after))
    return math.sqrt(sum(p * (1 - p) for p in shares) / count)


def neighbours_accuracy(features: Tensor, labels: Tensor, classes: int) -> float:
    """Leave one out: the share of images whose nearest neighbours among the others vote for their class."""
    unit = F.normalize(features.float(), dim=1)
    similarity = unit @ unit.T
    similarity.fill_diagonal_(-torch.inf)
    values, nearest = similarity.topk(min(NEIGHBOURS, len(unit) - 1), dim=1)
    votes = torch.zeros(len(unit), classes).scatter_add_(1, labels[nearest], (values / TEMPERATURE).exp())
    return float((votes.argmax(dim=1) == labels).double().mean())


def linear_accuracy(features: Tensor, labels: Tensor, classes: int) -> float:
    """Leave one out: the share of images that a ridge regression on the others gives their class.

    In closed form: without sample i its residual is r_i / (1 - H_ii), where H maps the targets to the fit. With X the
    standardised features (N D), H = X (X'X + r)^-1 X' = (XX' + r)^-1 XX', plus 1/N for the mean, which is fitted too.
    """
    x = features.double() - features.double().mean(dim=0)
    x = x / x.std(dim=0, correction=0).clamp(min=1e-12)
    targets, (count, width) = F.one_hot(labels, classes).double(), x.shape  # N C
    ridge = RIDGE * count * torch.eye(min(count, width), dtype=x.dtype, device=x.device)
    if width < count:  # the smaller of the two systems
        solved = torch.linalg.solve(x.T @ x + ridge, x.T)  # D N
        fit, own = x @ (solved @ targets), (x * solved.T).sum(dim=1)
    else:
        hat = torch.linalg.solve(x @ x.T + ridge, x @ x.T)  # N N
        fit, own = hat @ targets, hat.diagonal()
    residuals = (targets - fit - targets.mean(dim=0)) / (1 - own - 1 / count).clamp(min=1e-12)[:, None]
    return float(((targets - residuals).argmax(dim=1) == labels).double().mean())


def retrieval_accuracy(features: Tensor, views: Tensor) -> float:
    """The share of images whose changed view is nearer to them than to any other, each without their mean."""
    similarity = F.normalize(views - views.mean(dim=0), dim=1) @ F.normalize(features - features.mean(dim=0), dim=1).T
    own = similarity.diagonal().clone()
    best = similarity.fill_diagonal_(-torch.inf).amax(dim=1)
    return float((own > best).double().mean()) if len(features) > 1 else 1.0
