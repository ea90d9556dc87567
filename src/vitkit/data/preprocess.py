"""Evaluation: the model's `Preprocessing`, and nothing else, turns a picture into its input.

The pixels are those of timm and Hugging Face for their models: the same Pillow resize, the same
rounding of sizes, the same centre. Batches travel as uint8 and become floats at the very end
(`normalise`), on the device of the model.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitkit.model.config import Preprocessing, Size

RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}


STRIP = 64  # a picture so many times as long as it is wide is cut before it is resized: the rest would only take memory


def prepare(picture: Image.Image, pre: Preprocessing) -> Image.Image:
    """Resize and cut out the centre: a picture of any size -> one of `pre.size`."""
    picture = picture if pre.fit == "squash" else middle(picture, STRIP * max(pre.size) // min(pre.size))
    height, width = resized_to(picture.height, picture.width, pre)
    how = RESAMPLING[pre.interpolation]
    top, left = (round((n - wanted) / 2.0) for n, wanted in zip((height, width), pre.size, strict=True))
    if width != pre.size[1] and picture.height - height <= max(0, 2 * (picture.width - width)):
        # Pillow goes across first here (the newest goes down first when that takes away far more pixels): cutting
        # the columns out in between gives the same pixels for less work.
        picture = picture if width == picture.width else picture.resize((width, picture.height), how)
        picture, left = picture.crop((left, 0, left + pre.size[1], picture.height)), 0
        width = pre.size[1]
    if (width, height) != picture.size:
        picture = picture.resize((width, height), how)
    if (height, width) == pre.size:
        return picture
    return picture.crop((left, top, left + pre.size[1], top + pre.size[0]))


def middle(picture: Image.Image, longest: int) -> Image.Image:
    """The middle of a strip, at most `longest` times as long as it is wide; other pictures as they are."""
    width, height = picture.size
    most = longest * min(width, height)
    left, top = (max(0, (n - most) // 2) for n in (width, height))
    return picture.crop((left, top, width - left, height - top)) if left or top else picture


def resized_to(height: int, width: int, pre: Preprocessing) -> Size:
    """The size a picture is resized to before the centre is cut out."""
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

    Torch resizes bytes about twice as fast as Pillow and rounds differently in one value of a thousand, by
    one level; the kinds of interpolation it does not know are left to Pillow, and bicubic grey pictures, where
    torch is off by up to 20 levels.
    """
    if pre.interpolation not in (("bilinear",) if pixels.ndim == 2 else ("bilinear", "bicubic")):
        return to_tensor(Image.fromarray(pixels).resize(pre.size[::-1], RESAMPLING[pre.interpolation]))
    image = torch.from_numpy(np.atleast_3d(pixels)).permute(2, 0, 1)[None]
    image = image.contiguous(memory_format=torch.channels_last)  # as it lies already, but torch must be told: 3x
    return F.interpolate(image, pre.size, mode=pre.interpolation, antialias=True)[0]


def to_tensor(picture: Image.Image | np.ndarray) -> Tensor:
    """A picture -> uint8 (C, H, W)."""
    array = np.asarray(picture)
    array = array[:, :, None] if array.ndim == 2 else array
    return torch.from_numpy(np.array(array)).permute(2, 0, 1)  # C H W


def normalise(images: Tensor, pre: Preprocessing) -> Tensor:
    """uint8 (..., C, H, W) -> float (x / 255 - mean) / std, on whatever device the images are."""
    mean, std = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (pre.mean, pre.std))
    out = torch.empty(images.shape, dtype=torch.float32, device=images.device)
    few = max(1, 2**18 // max(1, images[..., :1, :, :].numel())) if images.device.type == "cpu" else len(images)
    for part, result in zip(images.split(few), out.split(few), strict=True):  # small enough to stay in the cache
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
    planes = pixels.flatten(0, 1)  # N*C H W; Pillow resizes each by itself, four in one go as a picture of mode CMYK
    out = torch.empty((len(planes), *pre.size), dtype=torch.uint8)
    for four, result in zip(planes.split(4), out.split(4), strict=True):
        packed = np.zeros((*four.shape[1:], 4), dtype=np.uint8)
        packed[..., : len(four)] = four.permute(1, 2, 0).numpy()
        done = prepare(Image.frombytes("CMYK", (four.shape[2], four.shape[1]), packed.tobytes()), pre)
        result.copy_(to_tensor(done)[: len(four)])
    return out.view(*pixels.shape[:2], *pre.size)
