"""Change a checkpoint to another picture size, patch size, number of channels or number of classes.

Only `load` calls these. Each works on data (a `Checkpoint`), returns a new one, and adds one line
about what it did. Shapes: D width, C channels, P x Q patch, h x w grid.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.checkpoints.layout import Checkpoint
from vitkit.errors import CheckpointError, ConfigError
from vitkit.model.config import ConvStemConfig, ResNetConfig, Size, ViTConfig, as_size
from vitkit.model.patches import conv_to_linear, linear_to_conv
from vitkit.model.positions import resize_grid


def adapt(
    checkpoint: Checkpoint,
    image_size: Any = None,
    patch_size: Any = None,
    channels: int | None = None,
    classes: int | None = None,
    resize: str | None = None,
) -> Checkpoint:
    """Everything that was asked for and differs; what was not asked for stays as it is."""
    result = dataclasses.replace(checkpoint, tensors=dict(checkpoint.tensors), notes=list(checkpoint.notes))
    try:
        if resize is not None and isinstance(result.config, ViTConfig):
            result.config = result.config.replace(position_resize=resize)
        if channels is not None:
            to_channels(result, channels)
        if patch_size is not None or image_size is not None:
            to_sizes(result, image_size, patch_size)
        if classes is not None:
            to_classes(result, classes)
    except ConfigError as e:
        raise CheckpointError(f"the checkpoint cannot be changed as asked: {e}") from e
    return result


def to_channels(checkpoint: Checkpoint, channels: int) -> None:
    config = checkpoint.config
    if channels == config.channels:
        return
    first = "stem.convs.0.weight" if isinstance(config.stem, ConvStemConfig) else "stem.root.weight"
    name = first if config.stem else "patches.weight"
    linear = isinstance(config, ViTConfig) and not config.stem and config.patch_embedding == "linear"
    weight = checkpoint.tensors[name]
    if linear:
        assert isinstance(config, ViTConfig)
        weight = linear_to_conv(weight, config.patch_size)
    weight = resize_channels(weight, channels)
    checkpoint.tensors[name] = conv_to_linear(weight) if linear else weight
    how = "summed" if channels == 1 else "repeated and rescaled"
    checkpoint.notes.append(f"input channels: {config.channels} -> {channels}, the filters {how}")
    checkpoint.config = config.replace(channels=channels)


def resize_channels(weight: Tensor, channels: int) -> Tensor:
    """D C P Q -> D channels P Q. A grey picture gives what it gave as RGB; N channels keep the scale of the sum."""
    given = weight.shape[1]
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if channels == 1:
        return wide.sum(dim=1, keepdim=True).to(weight.dtype)
    repeated = wide.repeat(1, -(-channels // given), 1, 1)[:, :channels]
    return (repeated * (given / channels)).to(weight.dtype)


def to_sizes(checkpoint: Checkpoint, image_size: Any, patch_size: Any) -> None:
    config = checkpoint.config
    size = config.image_size if image_size is None else as_size(image_size)
    if isinstance(config, ResNetConfig):
        if patch_size is not None:
            raise CheckpointError("a ResNet has no patches; leave patch_size out")
        if size != config.image_size:
            checkpoint.notes.append(f"picture size: {_times(config.image_size)} -> {_times(size)}")
            checkpoint.config = config.replace(image_size=size)
        return
    patch = config.patch_size if patch_size is None else as_size(patch_size, "patch_size")
    new = config.replace(image_size=size, patch_size=patch)
    if patch != config.patch_size:
        stride = config.stem.stride if config.stem else 1
        old_kernel, kernel = ((p[0] // stride, p[1] // stride) for p in (config.patch_size, patch))
        weight = checkpoint.tensors["patches.weight"]
        linear = config.patch_embedding == "linear"
        weight = resize_patches(linear_to_conv(weight, old_kernel) if linear else weight, kernel)
        checkpoint.tensors["patches.weight"] = conv_to_linear(weight) if linear else weight
        checkpoint.notes.append(
            f"patches: {_times(config.patch_size)} -> {_times(patch)}, pseudo-inverse resize (FlexiViT)"
        )
    if size != config.image_size:
        checkpoint.notes.append(f"picture size: {_times(config.image_size)} -> {_times(size)}")
    if new.grid != config.grid:
        _resize_positions(checkpoint.tensors, config, new)
        if config.positions in ("learned", "learned-2d", "relative"):
            grids = f"{_times(config.grid)} -> {_times(new.grid)}"
            checkpoint.notes.append(f"positions: grid {grids}, resized the way of {config.position_resize}")
    checkpoint.config = new


def _times(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def resize_patches(weight: Tensor, patch: Size) -> Tensor:
    """D C P Q -> D C P' Q', so that a picture resized with its patches gives the same tokens (Beyer et al. 2023).

    With B the bilinear resize of one patch, w' solves B^T w' = w in the least-squares sense.
    """
    old = (weight.shape[2], weight.shape[3])
    pixels = torch.eye(old[0] * old[1], dtype=torch.float64).unflatten(1, (1, *old))  # PQ 1 P Q
    bilinear = F.interpolate(pixels, patch, mode="bilinear", align_corners=False).flatten(1)  # PQ P'Q' = B^T
    solved = torch.linalg.pinv(bilinear) @ weight.flatten(2).to(torch.float64).mT  # D C P'Q'... as (.., P'Q', C)
    return solved.mT.unflatten(2, patch).to(weight.dtype).contiguous()


def _resize_positions(tensors: dict[str, Tensor], old: ViTConfig, new: ViTConfig) -> None:
    way, (h, w) = new.position_resize, new.grid
    if old.positions == "learned":
        table, rows = tensors["positions.learned"], old.positioned_prefix_tokens
        patches = resize_grid(table[rows:].unflatten(0, old.grid), new.grid, way).flatten(0, 1)
        tensors["positions.learned"] = torch.cat([table[:rows], patches])
    elif old.positions == "learned-2d":
        tensors["positions.columns"] = resize_grid(tensors["positions.columns"][None], (1, w), way)[0]
        tensors["positions.rows"] = resize_grid(tensors["positions.rows"][:, None], (h, 1), way)[:, 0]
    elif old.positions == "relative":
        for name in [n for n in tensors if n.endswith(".relative.by_offset")]:
            resized = resize_grid(tensors[name].permute(1, 2, 0), (2 * h - 1, 2 * w - 1), way)
            tensors[name] = resized.permute(2, 0, 1).contiguous()


def to_classes(checkpoint: Checkpoint, classes: int) -> None:
    """Another number of classes: the classifier starts at zero, and the tanh layer of pre-training goes."""
    config, tensors = checkpoint.config, checkpoint.tensors
    if classes == config.classes:
        return
    old = [n for n in tensors if n.startswith(("head.classifier.", "head.distilled.", "head.pre_logits."))]
    old += [n for n in ("head.weight", "head.bias") if isinstance(config, ResNetConfig) and n in tensors]
    dtype = next(iter(tensors.values())).dtype
    for name in old:
        del tensors[name]
    if isinstance(config, ViTConfig):
        what = ", and the tanh layer before it removed" if config.pre_logits else ""
        new: Any = config.replace(classes=classes, pre_logits=0)
        heads = ["head.classifier"] + ["head.distilled"] * config.distillation_token
        width = new.head_inputs
    else:
        what, new, heads, width = "", config.replace(classes=classes), ["head"], config.stem.out_channels
    if classes:
        for name in heads:
            tensors[f"{name}.weight"] = torch.zeros(classes, width, dtype=dtype)
            tensors[f"{name}.bias"] = torch.zeros(classes, dtype=dtype)
    start = "a new one that starts at zero" if classes else "none: the model returns the representation"
    checkpoint.notes.append(f"classifier: {config.classes} -> {classes} classes, {start}{what}")
    checkpoint.config, checkpoint.class_names = new, None
