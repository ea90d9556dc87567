"""What the model is asked to say: soft targets, mixup, cutmix, label smoothing, class weights.

Mixing happens between neighbours of the global batch, the first with the second, the third with the
fourth, and each pair's weight comes from its first sample's key. So the result does not depend on how a
batch is divided among ranks, as long as each rank gets an even number of samples.
"""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.data.augment import Augment
from vitkit.data.keys import Keys, uniforms


def soft_targets(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Class numbers (B,) or zeros and ones (B, classes) -> float (B, classes)."""
    if labels.ndim == 2:  # several labels per picture: each is a question of its own
        return labels.float() * (1 - smoothing) + smoothing / 2
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes


def mix(images: Tensor, labels: Tensor, keys: Keys, augment: Augment, classes: int) -> tuple[Tensor, Tensor]:
    """Float pictures and labels -> mixed pictures and soft targets (B, classes), on the pictures' device."""
    targets = soft_targets(labels, classes, augment.smoothing).to(images.device)
    pairs = len(images) // 2
    if not pairs or not (augment.mixup or augment.cutmix):
        return images, targets
    weights, masks = _pair_weights(keys[: 2 * pairs : 2], augment, (images.shape[-2], images.shape[-1]))
    mask = masks.to(images).repeat_interleave(2, dim=0)[:, None]  # B 1 H W: the share of its own picture at each pixel
    share = weights.to(targets).repeat_interleave(2)[:, None]  # B 1
    mixed, blended = images.clone(), targets.clone()
    mixed[: 2 * pairs] = mask * images[: 2 * pairs] + (1 - mask) * _partners(images[: 2 * pairs])
    blended[: 2 * pairs] = share * targets[: 2 * pairs] + (1 - share) * _partners(targets[: 2 * pairs])
    return mixed, blended


def _partners(values: Tensor) -> Tensor:
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def _pair_weights(keys: Keys, augment: Augment, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The weight of each pair (P,) and its mask over the pixels (P, H, W), both in 0..1."""
    height, width = size
    weights, masks = np.empty(len(keys)), np.empty((len(keys), height, width))
    for i, draws in enumerate(uniforms(keys, "mix", 3)):
        cut = bool(augment.cutmix) and (not augment.mixup or draws[0] < 0.5)
        alpha = augment.cutmix if cut else augment.mixup
        weight = random.Random(int(keys[i])).betavariate(alpha, alpha)
        masks[i] = weight
        if cut:
            h, w = (round(n * (1 - weight) ** 0.5) for n in size)
            top, left = int(draws[1] * (height - h + 1)), int(draws[2] * (width - w + 1))
            masks[i] = 1.0
            masks[i, top : top + h, left : left + w] = 0.0
            weight = 1 - h * w / (height * width)
        weights[i] = weight
    return torch.from_numpy(weights), torch.from_numpy(masks)


def class_weights(counts: np.ndarray) -> Tensor:
    """Weights for the loss that make every class count the same; their mean over the samples is 1.

    A class without samples gets 0.
    """
    counts = np.asarray(counts, dtype=np.float64)
    present = counts > 0
    weights = np.where(present, counts.sum() / np.maximum(counts, 1) / max(1, present.sum()), 0.0)
    return torch.from_numpy(weights).float()
