"""Evaluation: the model's `Preprocessing`, and nothing else, turns whatever an image comes as into its input.

One path for one image: decode upright, convert the channels (colour becomes grey by luma, before anything is
resized), resize and cut out the centre. Files, rows of Parquet, members of shards, arrays in memory and caches go
through it. The pixels are those of timm and Hugging Face for their models: the same Pillow resize, the same rounding
of sizes, the same centre. Batches travel as uint8 and become floats at the very end, on the device of the model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitkit.data.decode import decode
from vitkit.errors import DataError
from vitkit.model.config import Interpolation, Preprocessing, Size

PLAIN = "bilinear-plain"  # what Pillow does not have; training, whose crops vary anyway, takes the antialiased one
RESAMPLING = {how: Image.Resampling[how.removesuffix("-plain").upper()] for how in get_args(Interpolation)}
STRIP = 64  # an image so many times as long as it is wide is cut before it is resized: the rest would only take memory


def read_image(encoded: bytes | str | Path, pre: Preprocessing, channels: int) -> Tensor:
    """The bytes of an image or its path -> uint8 (C, H, W) of `pre.size`. Raises `BadImage`."""
    return to_tensor(prepare(decode(encoded, channels), pre))


def read_pixels(pixels: Tensor, pre: Preprocessing, channels: int) -> Tensor:
    """The same of images that are pixels already: uint8 (N, C, h, w) -> (N, channels, H, W)."""
    return prepare_pixels(match_channels(pixels, channels), pre)


def can_match(have: int, channels: int) -> bool:
    return have in (1, channels) or (have == 3 and channels == 1)


def match_channels(pixels: Tensor, channels: int) -> Tensor:
    """(N, C, H, W) with the wanted number of channels: grey is repeated, colour becomes grey by luma."""
    have = pixels.shape[1]
    if have == channels:
        return pixels
    if have == 1:
        return pixels.expand(-1, channels, -1, -1)
    if have == 3 and channels == 1:
        r, g, b = pixels.to(torch.int32).unbind(dim=1)
        return ((19595 * r + 38470 * g + 7471 * b + (1 << 15)) >> 16).to(torch.uint8)[:, None]  # as Pillow does
    raise DataError(f"the images have {have} channels, the model wants {channels}; make a model with channels={have}")


def prepare(image: Image.Image, pre: Preprocessing) -> Image.Image:
    """Resize and cut out the centre: an image of any size -> one of `pre.size`."""
    if pre.fit != "squash":
        most = STRIP * max(pre.size) // min(pre.size) * min(image.size)
        left, top = (max(0, (n - most) // 2) for n in image.size)
        image = image.crop((left, top, image.width - left, image.height - top)) if left or top else image
    height, width = resized_to(image.height, image.width, pre)
    how = RESAMPLING[pre.interpolation]
    top, left = (round((n - wanted) / 2.0) for n, wanted in zip((height, width), pre.size, strict=True))
    if pre.interpolation == PLAIN:
        image = resize_plain(image, (height, width))
    if width != pre.size[1] and image.height - height <= max(0, 2 * (image.width - width)):
        # Pillow goes across first here (the newest goes down first when that takes away far more pixels): cutting
        # the columns out in between gives the same pixels for less work.
        image = image if width == image.width else image.resize((width, image.height), how)
        image, left = image.crop((left, 0, left + pre.size[1], image.height)), 0
        width = pre.size[1]
    if (width, height) != image.size:
        image = image.resize((width, height), how)
    if (height, width) == pre.size:
        return image
    return image.crop((left, top, left + pre.size[1], top + pre.size[0]))


def resize_plain(image: Image.Image, size: Size) -> Image.Image:
    """tf.image.resize(image, size) with its defaults, rounded to whole levels."""
    x = F.interpolate(to_tensor(image)[None].float(), size, mode="bilinear", align_corners=False)[0]
    pixels = x.round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    return Image.frombytes(image.mode, size[::-1], pixels.tobytes())


def resized_to(height: int, width: int, pre: Preprocessing) -> Size:
    """The size an image is resized to before the centre is cut out."""
    goal = math.floor(pre.size[0] / pre.crop), math.floor(pre.size[1] / pre.crop)
    if pre.fit == "squash":
        return goal
    if goal[0] == goal[1]:  # the shorter side to the goal, the longer one rounded down, as torchvision does
        short, long = sorted((height, width))
        longer = int(goal[0] * long / short)
        return (goal[0], longer) if height <= width else (longer, goal[0])
    ratio = min(height / goal[0], width / goal[1])
    return max(goal[0], round(height / ratio)), max(goal[1], round(width / ratio))


def resize(pixels: np.ndarray, pre: Preprocessing) -> Tensor:
    """(h, w) or (h, w, C) -> (C, H, W) of `pre.size`, for training.

    Torch is about twice as fast as Pillow and one level off in one value of a thousand; Pillow does the kinds of
    interpolation that torch does not know, and bicubic grey images, where torch is off by up to 20 levels.
    """
    if pre.interpolation not in (("bilinear",) if pixels.ndim == 2 else ("bilinear", "bicubic")):
        return to_tensor(Image.fromarray(pixels).resize(pre.size[::-1], RESAMPLING[pre.interpolation]))
    image = torch.from_numpy(np.atleast_3d(pixels)).permute(2, 0, 1)[None]
    image = image.contiguous(memory_format=torch.channels_last)  # as it lies already, but torch must be told: 3x
    return F.interpolate(image, pre.size, mode=pre.interpolation, antialias=True)[0]


def to_tensor(image: Image.Image | np.ndarray) -> Tensor:
    """An image -> uint8 (C, H, W)."""
    return torch.from_numpy(np.atleast_3d(np.array(image))).permute(2, 0, 1)  # C H W


def normalise(images: Tensor, pre: Preprocessing) -> Tensor:
    """uint8 (..., C, H, W) -> float (x / 255 - mean) / std, on whatever device the images are.

    Floats stay as they are: what is kept of frozen blocks comes in place of images.
    """
    if images.is_floating_point():
        return images
    mean, std = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (pre.mean, pre.std))
    out = torch.empty(images.shape, dtype=torch.float32, device=images.device)
    few = max(1, 2**18 // max(1, images[..., :1, :, :].numel())) if images.device.type == "cpu" else len(images)
    # parts that are small enough to stay in the cache
    for part, result in zip(torch.split(images, few), torch.split(out, few), strict=True):
        result.copy_(part).div_(255).sub_(mean).div_(std)
    return out


def denormalise(images: Tensor, pre: Preprocessing) -> Tensor:
    """The way back, for looking at what a model saw: float -> uint8."""
    mean, std = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (pre.mean, pre.std))
    return images.mul(std).add_(mean).mul_(255).round_().clamp_(0, 255).to(torch.uint8)


def prepare_pixels(pixels: Tensor, pre: Preprocessing) -> Tensor:
    """`prepare` for a whole set in memory, uint8 (N, C, H, W) of any number of channels."""
    if tuple(pixels.shape[-2:]) == pre.size and pre.crop == 1:
        return pixels
    planes = pixels.flatten(0, 1)  # N*C H W; Pillow resizes each by itself, four in one go as an image of mode CMYK
    out = torch.empty((len(planes), *pre.size), dtype=torch.uint8)
    for four, result in zip(torch.split(planes, 4), torch.split(out, 4), strict=True):
        packed = np.zeros((*four.shape[1:], 4), dtype=np.uint8)
        packed[..., : len(four)] = four.permute(1, 2, 0).numpy()
        done = prepare(Image.frombytes("CMYK", (four.shape[2], four.shape[1]), packed.tobytes()), pre)
        result.copy_(to_tensor(done)[: len(four)])
    return out.view(*pixels.shape[:2], *pre.size)
