"""Augmentation of whole batches: images in uint8 go in, varied images in uint8 come out.

Order: crop (of sets in memory; that of files is cheaper while decoding), mirror, RandAugment or TrivialAugment,
colour jitter, erasing.

An operation takes images (B, C, H, W) and one strength per image (B,), and returns uint8 images. Every sum is done
in whole numbers and every float operation is element by element, so an image's result cannot depend on which other
images are in its batch, nor on the number of threads.

Shapes: B images, C channels, H x W pixels; one key per image.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.data.augment import Augment, crop_kind, random_box
from vitkit.data.keys import Keys, scramble, uniforms
from vitkit.model.config import Size

Operation = Callable[[Tensor, Tensor], Tensor]


def crop_and_flip(images: Tensor, keys: Keys, augment: Augment, size: Size) -> Tensor:
    """The crop and the mirror image of sets in memory: (B, C, h, w) -> (B, C, H, W)."""
    kind = crop_kind(augment, size)
    if kind != "resized":
        return shift_and_flip(images, keys, augment, shift=kind == "pad")
    height, width = images.shape[-2:]  # RandomResizedCrop, by bilinear resampling
    matrices = np.zeros((len(images), 2, 3))
    mirrored = flips(keys, augment)
    for i, draws in enumerate(uniforms(keys, "crop", 40)):
        left, top, right, bottom = random_box(draws, width, height, augment)
        matrices[i, 0, 0] = (right - left) / size[1] * (-1 if mirrored[i] else 1)
        matrices[i, 1, 1] = (bottom - top) / size[0]
        matrices[i, :, 2] = (left + right - width) / 2, (top + bottom - height) / 2
    return warp(images, torch.from_numpy(matrices), size)


def shift_and_flip(images: Tensor, keys: Keys, augment: Augment, shift: bool) -> Tensor:
    """Pad with black and cut out at a random place; mirror some. One gather does both; mirroring alone is in place."""
    count, channels, height, width = images.shape
    mirrored = flips(keys, augment)
    if not shift or augment.padding <= 0:
        for i in np.flatnonzero(mirrored):
            images[i] = images[i].flip(-1)
        return images
    pad_y, pad_x = (max(1, round(n * augment.padding)) for n in (height, width))
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
    """Which images are mirrored: (B,) of bool."""
    return uniforms(keys, "flip", 1)[:, 0] < augment.flip


def vary(images: Tensor, keys: Keys, augment: Augment) -> Tensor:
    """RandAugment or TrivialAugment, colour jitter and erasing, as far as they are switched on."""
    if augment.policy == "randaugment":
        for turn in range(augment.operations):
            images = _one_operation(images, keys, f"operation {turn}", augment.magnitude / 30)
    elif augment.policy == "trivial":
        images = _one_operation(images, keys, "operation", None)
    elif augment.policy == "three":
        images = three(images, keys)
    if augment.jitter:
        shares = 1 + augment.jitter * (2 * uniforms(keys, "jitter", 3) - 1)
        for share, operation in zip(shares.T, (brightness, contrast, saturation), strict=True):
            images = operation(images, torch.from_numpy(share))
    return _erase(images, keys, augment.erase) if augment.erase else images


def three(images: Tensor, keys: Keys) -> Tensor:
    """DeiT III: each image becomes grey, solarised or blurred (sigma 0.1 to 2 pixels)."""
    draws = uniforms(keys, "three", 2)
    done = images.clone()
    for number, operation in enumerate((_colourless, _solarised, blurred)):
        some = torch.from_numpy(np.flatnonzero((draws[:, 0] * 3).astype(int) == number))
        if len(some):
            done[some] = operation(images[some], torch.from_numpy(0.1 + 1.9 * draws[some.numpy(), 1]).float())
    return done


def _colourless(images: Tensor, sigma: Tensor) -> Tensor:
    return saturation(images, torch.zeros(len(images)))


def _solarised(images: Tensor, sigma: Tensor) -> Tensor:
    return torch.where(images >= 128, 255 - images, images)


def blurred(images: Tensor, sigma: Tensor) -> Tensor:
    at = torch.arange(-4, 5)
    taps = (-0.5 * (at / sigma[:, None]) ** 2).exp()  # B 9
    kernels = (taps / taps.sum(dim=1, keepdim=True)).repeat_interleave(images.shape[1], 0)[:, None]  # B*C 1 9
    x = F.pad(images.float(), (4, 4, 4, 4), mode="replicate").flatten(0, 1)[None]  # 1 B*C H W
    x = F.conv2d(x, kernels[:, :, None], groups=len(kernels))
    x = F.conv2d(x, kernels[..., None], groups=len(kernels))
    return x.view(images.shape).round().to(images.dtype)


def _one_operation(images: Tensor, keys: Keys, purpose: str, magnitude: float | None) -> Tensor:
    """Each image gets one operation; those that share it are done together. None: any magnitude."""
    draws = uniforms(keys, purpose, 3)
    chosen = (draws[:, 0] * len(ALL)).astype(np.int64)
    order = np.argsort(chosen, kind="stable")  # images with the same operation side by side
    wide = magnitude is None
    m = draws[order, 1] if magnitude is None else np.full(len(keys), magnitude)
    sign = np.where(draws[order, 2] < 0.5, -1.0, 1.0)
    lined_up = images.index_select(0, torch.from_numpy(order))
    first = np.searchsorted(chosen[order], np.arange(len(ALL) + 1)).tolist()  # where each operation begins
    done = [lined_up[: first[1]]]  # "identity" is the first of all
    geometry = slice(first[1], first[1 + len(GEOMETRY)])
    if geometry.start < geometry.stop:
        names = [ALL[i] for i in chosen[order][geometry]]
        size = (images.shape[-2], images.shape[-1])
        done.append(warp(lined_up[geometry], geometry_matrices(names, (m * sign)[geometry], size, wide)))
    for number, (name, operation) in enumerate(COLOUR.items(), start=1 + len(GEOMETRY)):
        some = slice(first[number], first[number + 1])
        if some.start < some.stop:
            done.append(operation(lined_up[some], colour_strength(name, m[some], sign[some], wide)))
    return torch.cat(done).index_select(0, torch.from_numpy(np.argsort(order, kind="stable")))


def _erase(images: Tensor, keys: Keys, probability: float) -> Tensor:
    """Replace a rectangle of 2% to 33% of the area by noise in some images."""
    channels, height, width = images.shape[1:]
    draws = uniforms(keys, "erase", 5)
    out = images.clone()
    for i in np.flatnonzero(draws[:, 0] < probability):
        area = height * width * (0.02 + draws[i, 1] * 0.31)
        shape = 0.3 * (1 / 0.3**2) ** draws[i, 2]  # width / height from 0.3 to 3.3
        h, w = min(round(float((area / shape) ** 0.5)), height), min(round(float((area * shape) ** 0.5)), width)
        top, left = int(draws[i, 3] * (height - h + 1)), int(draws[i, 4] * (width - w + 1))
        words = scramble(keys[i] ^ np.arange(1, channels * h * w // 8 + 2, dtype=np.uint64))
        noise = words.view(np.uint8)[: channels * h * w].reshape(channels, h, w)
        out[i, :, top : top + h, left : left + w] = torch.from_numpy(noise)
    return out


def _to_uint8(values: Tensor) -> Tensor:
    return values.round_().clamp_(0, 255).to(torch.uint8)


def _blend(images: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """other + share * (images - other): share 0 gives `other`, 1 the images, above 1 exaggerates."""
    other = other.to(torch.float32)
    return _to_uint8((images.to(torch.float32) - other).mul_(share.float().view(-1, 1, 1, 1)).add_(other))


def grey(images: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, 1, H, W), rounded to whole numbers; the usual weights for RGB."""
    if images.shape[1] != 3:
        return images.to(torch.int32).sum(dim=1, keepdim=True) // images.shape[1]
    r, g, b = images.to(torch.int32).unbind(dim=1)
    return ((299 * r + 587 * g + 114 * b + 500) // 1000)[:, None]


def brightness(images: Tensor, share: Tensor) -> Tensor:
    return _to_uint8(images.to(torch.float32).mul_(share.float().view(-1, 1, 1, 1)))


def contrast(images: Tensor, share: Tensor) -> Tensor:
    shades = grey(images)
    mean = shades.sum(dim=(1, 2, 3), dtype=torch.int64) // shades[0].numel()
    return _blend(images, mean.view(-1, 1, 1, 1), share)


def saturation(images: Tensor, share: Tensor) -> Tensor:
    return _blend(images, grey(images), share) if images.shape[1] == 3 else images


def sharpness(images: Tensor, share: Tensor) -> Tensor:
    if min(images.shape[-2:]) < 3:
        return images
    wide = images.to(torch.int32)
    h, w = images.shape[-2:]
    around = sum(wide[..., y : h - 2 + y, x : w - 2 + x] for y in range(3) for x in range(3))
    smooth = wide.clone()  # the border keeps its values, as in Pillow
    smooth[..., 1:-1, 1:-1] = (around + 4 * wide[..., 1:-1, 1:-1] + 6) // 13
    return _blend(images, smooth, share)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    mask = (256 - 2 ** (8 - bits.round().to(torch.int64))).clamp(0, 255).to(torch.uint8)
    return images & mask.view(-1, 1, 1, 1)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(images.to(torch.float32) >= threshold.float().view(-1, 1, 1, 1), 255 - images, images)


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    low = images.amin(dim=(2, 3), keepdim=True).to(torch.float32)
    span = images.amax(dim=(2, 3), keepdim=True).to(torch.float32) - low
    stretched = _to_uint8((images.to(torch.float32) - low).mul_(255 / span.clamp(min=1)))
    return torch.where(span == 0, images, stretched)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Pillow's histogram equalisation, channel by channel."""
    flat = images.flatten(2).flatten(0, 1).to(torch.int64)  # B*C pixels
    counts = torch.zeros((len(flat), 256), dtype=torch.int64)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    last = counts.gather(1, 255 - counts.flip(1).ne(0).int().argmax(dim=1, keepdim=True))
    step = (counts.sum(dim=1, keepdim=True) - last) // 255
    before = counts.cumsum(dim=1) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp(0, 255)
    table = torch.where(step == 0, torch.arange(256), table)
    return table.gather(1, flat).to(torch.uint8).view(images.shape)


def warp(images: Tensor, matrices: Tensor, size: tuple[int, int] | None = None) -> Tensor:
    """Bilinear: output pixel p comes from its matrix (2 x 3) @ (p, 1), in pixels from the centre; black outside."""
    height, width = images.shape[-2:]
    out_height, out_width = size or (height, width)
    y = torch.arange(out_height, dtype=torch.float64).view(1, -1, 1) - (out_height - 1) / 2
    x = torch.arange(out_width, dtype=torch.float64).view(1, 1, -1) - (out_width - 1) / 2
    m = matrices.view(-1, 6, 1, 1)
    across = (m[:, 0] * x + m[:, 1] * y) + m[:, 2]  # B H W
    down = (m[:, 3] * x + m[:, 4] * y) + m[:, 5]
    grid = torch.stack([across * (2 / width), down * (2 / height)], dim=-1).to(torch.float32)  # B H W 2, in -1..1
    return _to_uint8(F.grid_sample(images.to(torch.float32), grid, align_corners=False))


_COLOURS = (brightness, saturation, contrast, sharpness, posterize, solarize, autocontrast, equalize)
COLOUR: dict[str, Operation] = {operation.__name__: operation for operation in _COLOURS}
GEOMETRY = ("shear-x", "shear-y", "translate-x", "translate-y", "rotate")
ALL = ("identity", *GEOMETRY, *COLOUR)


def colour_strength(name: str, m: np.ndarray, sign: np.ndarray, wide: bool) -> Tensor:
    """Magnitudes in 0..1 and signs -> what the operation takes. Wide ranges are TrivialAugment's."""
    own = {"posterize": 8 - (6 if wide else 4) * m, "solarize": 255 * (1 - m)}
    return torch.from_numpy(own.get(name, 1 + sign * (0.99 if wide else 0.9) * m))


def geometry_matrices(names: list[str], amount: np.ndarray, size: tuple[int, int], wide: bool) -> Tensor:
    """One matrix per image for the geometric operations, ranges as in the papers' code."""
    height, width = size
    shear, angle = (0.99, 135.0) if wide else (0.3, 30.0)
    shift = (min(32, width / 2), min(32, height / 2)) if wide else (150 / 331 * width, 150 / 331 * height)
    matrices = np.tile(np.eye(2, 3), (len(names), 1, 1))
    moves = dict(zip(GEOMETRY, ((0, 1, shear), (1, 0, shear), (0, 2, shift[0]), (1, 2, shift[1])), strict=False))
    for i, name in enumerate(names):
        if name == "rotate":
            turn = np.deg2rad(angle * amount[i])
            matrices[i, :, :2] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
        else:
            row, column, range_ = moves[name]
            matrices[i, row, column] = range_ * amount[i]
    return torch.from_numpy(matrices)
