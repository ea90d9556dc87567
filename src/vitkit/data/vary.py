"""Augmentation of whole batches: pictures in uint8 go in, varied pictures in uint8 come out.

The same code serves sets in memory (which it also crops and mirrors) and files (whose crop is cheaper
while decoding). Order: crop, mirror, RandAugment or TrivialAugment, colour jitter, erasing.

Shapes: B pictures, C channels, H x W pixels; one key per picture.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitkit.data import operations as op
from vitkit.data.augment import Augment, crop_kind, random_box
from vitkit.data.keys import Keys, scramble, uniforms
from vitkit.model.config import Size


def crop_and_flip(images: Tensor, keys: Keys, augment: Augment, size: Size) -> Tensor:
    """The crop and the mirror image of sets in memory: (B, C, h, w) -> (B, C, H, W)."""
    kind = crop_kind(augment, size)
    if kind == "resized":
        return _zoom(images, keys, augment, size)
    return shift_and_flip(images, keys, augment, shift=kind == "pad")


def shift_and_flip(images: Tensor, keys: Keys, augment: Augment, shift: bool) -> Tensor:
    """Pad with black and cut out at a random place; mirror some. One gather does both; mirroring alone is in place."""
    count, channels, height, width = images.shape
    shifted = shift and augment.padding > 0
    pad_y, pad_x = (max(1, round(n * augment.padding)) if shifted else 0 for n in (height, width))
    mirrored = flips(keys, augment)
    if not (pad_y or pad_x):
        for i in np.flatnonzero(mirrored):
            images[i] = images[i].flip(-1)
        return images
    draws = uniforms(keys, "shift", 2)
    top = (draws[:, 0] * (2 * pad_y + 1)).astype(np.int64) - pad_y
    left = (draws[:, 1] * (2 * pad_x + 1)).astype(np.int64) - pad_x
    rows = np.arange(height)[None] + top[:, None]  # B H: where each row comes from
    columns = np.arange(width)[None]
    columns = np.where(mirrored[:, None], width - 1 - columns, columns) + left[:, None]  # B W
    outside = (rows < 0) | (rows >= height), (columns < 0) | (columns >= width)
    places = rows.clip(0, height - 1)[:, :, None] * width + columns.clip(0, width - 1)[:, None]  # B H W
    index = torch.from_numpy(places.reshape(count, 1, -1)).expand(-1, channels, -1)
    moved = images.reshape(count, channels, -1).gather(2, index).view(images.shape)
    moved *= torch.from_numpy(~(outside[0][:, :, None] | outside[1][:, None]))[:, None]
    return moved


def flips(keys: Keys, augment: Augment) -> np.ndarray:
    """Which pictures are mirrored: (B,) of bool."""
    return uniforms(keys, "flip", 1)[:, 0] < augment.flip


def _zoom(images: Tensor, keys: Keys, augment: Augment, size: Size) -> Tensor:
    """RandomResizedCrop of a batch in memory, by bilinear resampling."""
    height, width = images.shape[-2:]
    matrices = np.zeros((len(images), 2, 3))
    mirrored = flips(keys, augment)
    for i, draws in enumerate(uniforms(keys, "crop", 40)):
        left, top, right, bottom = random_box(draws, width, height, augment)
        matrices[i, 0, 0] = (right - left) / size[1] * (-1 if mirrored[i] else 1)
        matrices[i, 1, 1] = (bottom - top) / size[0]
        matrices[i, :, 2] = (left + right - width) / 2, (top + bottom - height) / 2
    return op.warp(images, torch.from_numpy(matrices), size)


def vary(images: Tensor, keys: Keys, augment: Augment) -> Tensor:
    """RandAugment or TrivialAugment, colour jitter and erasing, as far as they are switched on."""
    if augment.policy == "randaugment":
        for turn in range(augment.operations):
            images = _one_operation(images, keys, f"operation {turn}", augment.magnitude / 30)
    elif augment.policy == "trivial":
        images = _one_operation(images, keys, "operation", None)
    if augment.jitter:
        shares = 1 + augment.jitter * (2 * uniforms(keys, "jitter", 3) - 1)
        for share, operation in zip(shares.T, (op.brightness, op.contrast, op.saturation), strict=True):
            images = operation(images, torch.from_numpy(share))
    return _erase(images, keys, augment.erase) if augment.erase else images


def _one_operation(images: Tensor, keys: Keys, purpose: str, magnitude: float | None) -> Tensor:
    """Each picture gets one operation; those that share it are done together. None: any magnitude."""
    draws = uniforms(keys, purpose, 3)
    chosen = (draws[:, 0] * len(op.ALL)).astype(np.int64)
    order = np.argsort(chosen, kind="stable")  # pictures with the same operation side by side
    m = draws[order, 1] if magnitude is None else np.full(len(keys), magnitude)
    sign = np.where(draws[order, 2] < 0.5, -1.0, 1.0)
    wide = magnitude is None
    lined_up = images.index_select(0, torch.from_numpy(order))
    first = np.searchsorted(chosen[order], np.arange(len(op.ALL) + 1)).tolist()  # where each operation begins
    done = [lined_up[: first[1]]]  # "identity" is the first of all
    geometry = slice(first[1], first[1 + len(op.GEOMETRY)])
    if geometry.start < geometry.stop:
        names = [op.ALL[i] for i in chosen[order][geometry]]
        size = (images.shape[-2], images.shape[-1])
        matrices = op.geometry_matrices(names, m[geometry], sign[geometry], size, wide)
        done.append(op.warp(lined_up[geometry], matrices))
    for number, (name, operation) in enumerate(op.COLOUR.items(), start=1 + len(op.GEOMETRY)):
        some = slice(first[number], first[number + 1])
        if some.start < some.stop:
            done.append(operation(lined_up[some], op.colour_strength(name, m[some], sign[some], wide)))
    return torch.cat(done).index_select(0, torch.from_numpy(np.argsort(order, kind="stable")))


def _erase(images: Tensor, keys: Keys, probability: float) -> Tensor:
    """Replace a rectangle of 2% to 33% of the area by noise in some pictures."""
    channels, height, width = images.shape[1:]
    draws = uniforms(keys, "erase", 5)
    out = images.clone()
    for i in np.flatnonzero(draws[:, 0] < probability):
        area = height * width * (0.02 + draws[i, 1] * 0.31)
        shape = 0.3 * (1 / 0.3**2) ** draws[i, 2]  # width / height from 0.3 to 3.3
        h, w = (
            min(round(float(n)), side) for n, side in (((area / shape) ** 0.5, height), ((area * shape) ** 0.5, width))
        )
        top, left = int(draws[i, 3] * (height - h + 1)), int(draws[i, 4] * (width - w + 1))
        words = scramble(keys[i] ^ np.arange(1, channels * h * w // 8 + 2, dtype=np.uint64))
        noise = words.view(np.uint8)[: channels * h * w].reshape(channels, h, w)
        out[i, :, top : top + h, left : left + w] = torch.from_numpy(noise)
    return out
