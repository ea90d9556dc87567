"""Open -> recognise -> read -> adapt size and classes -> load strictly.

`open_checkpoint` stops after reading: the configuration is known, no tensor has been read yet. `load` takes
what it returns, so that a file which is looked at first is opened only once.

Shapes: D width, C channels, P x Q patch, h x w grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.checkpoints import mapped
from vitkit.checkpoints.families import FAMILIES, family
from vitkit.checkpoints.family import Checkpoint, Opened
from vitkit.checkpoints.files import in_words
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.source import locate, on_hub, open_path
from vitkit.checkpoints.step import is_step, read_step
from vitkit.checkpoints.strict import check_fit
from vitkit.errors import CheckpointError, ConfigError
from vitkit.model import zoo
from vitkit.model.base import Outputs
from vitkit.model.build import Model, create
from vitkit.model.config import AnyConfig, ResNetConfig, Size, ViTConfig
from vitkit.model.patches import conv_to_linear, linear_to_conv
from vitkit.model.positions import POSITIONS
from vitkit.model.rotary import Rotary
from vitkit.storage import is_url

SizeLike = int | str | tuple[int, int]


def load(
    source: str | Path | Checkpoint,
    image_size: SizeLike | None = None,
    classes: int | None = None,
    patch_size: SizeLike | None = None,
    *,
    channels: int | None = None,
    resize: str | None = None,
    dtype: str | torch.dtype | None = None,
    map: str | Path | Mapping[str, object] | None = None,
    options: ModelOptions | None = None,
    **stated: object,
) -> Model:
    """A model from a checkpoint of any family, or with fresh weights from a name of the zoo.

    What is asked for and differs is adapted: positions to `image_size` (the family's own way, or
    `resize`), the patch embedding to `patch_size`, the first filters to `channels`, the classifier to
    `classes` (starting at zero). `dtype` None keeps the file's. `stated` are fields of `ViTConfig` that
    a file cannot tell, such as heads=6 or activation="gelu-tanh". `map` has the names of a home-made model, a
    .toml file or its tables (docs/checkpoints.md). `options` holds all of these at once.

    The model is in evaluation mode; it has `outputs`, `class_names` (or None), `pretrained` and
    `load_report`, one line for each thing that was assumed, left out or adapted.
    """
    given: dict[str, object] = {"image_size": image_size, "patch_size": patch_size, "resize": resize, "dtype": dtype}
    options = options or ModelOptions.of(**given, classes=classes, channels=channels, map=map, **stated)
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, options)
    model, checkpoint = prepare(checkpoint, options)
    model.load_state_dict(checkpoint.tensors, strict=True, assign=True)  # no copy: they take the places
    model.outputs, model.load_report = checkpoint.outputs, tuple(checkpoint.notes)
    model.pretrained = checkpoint.format != "zoo"
    return model.eval()


def prepare(checkpoint: Checkpoint, options: ModelOptions) -> tuple[Model, Checkpoint]:
    """The checkpoint adapted, every tensor read, all in one dtype; and the model that it fits, without memory yet."""
    with in_words(checkpoint.source):
        adapted = adapt(checkpoint, options)
        model = check_fit(adapted)
    found = {t.dtype for t in adapted.tensors.values()}
    wanted = getattr(torch, options.dtype) if options.dtype else reduce(torch.promote_types, found)  # the widest
    if found != {wanted}:
        words = ", ".join(sorted(map(str, found)))
        note = f"{words} -> {wanted}" if options.dtype else f"the file mixes {words}; all became {wanted}"
        adapted.notes.append(f"dtype: {note}".replace("torch.", ""))
        adapted.tensors = {name: t.to(wanted) for name, t in adapted.tensors.items()}
    return model, adapted


def open_checkpoint(source: str | Path, options: ModelOptions | None = None, **stated: object) -> Checkpoint:
    """A checkpoint as data, unadapted, its tensors not read yet; a name of the zoo gives fresh weights."""
    options = options or ModelOptions.of(**stated)
    if (fresh := _from_zoo(source)) is not None:
        model = create(fresh, **options.changes)
        return Checkpoint(model.config, model.state_dict(), notes=["fresh weights"], format="zoo", source=str(source))
    path = locate(source)
    with in_words(str(source), str(path)):
        if is_step(path):
            return dataclasses.replace(read_step(path), source=str(source))
        opened = open_path(path, as_named=options.map is not None)
        format = "map" if options.map is not None else _recognise(opened)
        read = mapped.read(opened, options) if options.map is not None else family(format).read(opened, options)
    return dataclasses.replace(read, format=format, source=str(source), notes=[*opened.notes, *read.notes])


def _recognise(opened: Opened) -> str:
    if format := next((name for name in FAMILIES if family(name).matches(opened)), None):
        return format
    examples, known = ", ".join(repr(name) for name in list(opened.tensors)[:3]), ", ".join(FAMILIES)
    unknown = f"the tensors have names of no known family, such as {examples}; known are {known}"
    raise CheckpointError(
        f"{unknown}. If its parts are those of a ViT, give their names: map='names.toml' (--name-map)"
    )


def _from_zoo(source: str | Path) -> AnyConfig | None:
    if not isinstance(source, str) or on_hub(source) or Path(source).exists():
        return None
    try:
        return zoo.config(source)
    except ConfigError:
        return None


def find_config(source: str, options: ModelOptions | None = None) -> AnyConfig:
    """The configuration behind a name of the zoo or a checkpoint, with what `options` change."""
    is_file = on_hub(source) or is_url(source) or Path(source).exists() or ("/" in source.strip("/") and "." in source)
    config = open_checkpoint(source, options).config if is_file and not _from_zoo(source) else zoo.config(source)
    return config.replace(**options.changes) if options is not None and options.changes else config


def adapt(checkpoint: Checkpoint, options: ModelOptions) -> Checkpoint:
    """Everything that was asked for and differs, with a note of each; the rest stays as it is. Every tensor is read."""
    tensors = dict(checkpoint.tensors)
    result = dataclasses.replace(checkpoint, tensors=tensors, notes=list(checkpoint.notes))
    if options.resize is not None and isinstance(result.config, ViTConfig):
        result.config = result.config.replace(position_resize=options.resize)
    if options.channels is not None and options.channels != result.config.channels:
        _to_channels(result, tensors, options.channels)
    if options.patch_size is not None or options.image_size is not None:
        _to_sizes(result, tensors, options)
    if options.classes is not None and options.classes != result.config.classes:
        _to_classes(result, tensors, options.classes)
    return result


def _to_channels(checkpoint: Checkpoint, tensors: dict[str, Tensor], channels: int) -> None:
    config = checkpoint.config
    if isinstance(config, ResNetConfig) or config.stem:
        names = ("stem.convs.0.weight", "stem.root.0.weight", "stem.root.weight", "stem.whitening.weight")
        first = next(name for name in names if name in tensors)
        tensors[first] = resize_channels(tensors[first], channels)
    else:
        _change_patches(tensors, config, lambda weight: resize_channels(weight, channels))
    how = "summed" if channels == 1 else "repeated and rescaled"
    checkpoint.notes.append(f"input channels: {config.channels} -> {channels}, the filters {how}")
    checkpoint.config = config.replace(channels=channels)


def resize_channels(weight: Tensor, channels: int) -> Tensor:
    """D C P Q -> D channels P Q. A grey image gives what it gave as RGB; N channels keep the scale of the sum."""
    given = weight.shape[1]
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if channels == 1:
        return wide.sum(dim=1, keepdim=True).to(weight.dtype)
    repeated = wide.repeat(1, -(-channels // given), 1, 1)[:, :channels]
    return (repeated * (given / channels)).to(weight.dtype)


def _to_sizes(checkpoint: Checkpoint, tensors: dict[str, Tensor], options: ModelOptions) -> None:
    old, notes = checkpoint.config, checkpoint.notes
    size = options.image_size or old.image_size
    if isinstance(old, ResNetConfig):
        if options.patch_size is not None:
            raise CheckpointError("a ResNet has no patches; leave patch_size (--patch-size) out")
        checkpoint.config = old.replace(image_size=size)
    else:
        checkpoint.config = new = old.replace(image_size=size, patch_size=options.patch_size or old.patch_size)
        if new.patch_size != old.patch_size:
            _change_patches(tensors, old, lambda weight: resize_patches(weight, new.patch_kernel))
            sizes = f"{_times(old.patch_size)} -> {_times(new.patch_size)}"
            notes.append(f"patches: {sizes}, pseudo-inverse resize (FlexiViT)")
    if size != old.image_size:
        notes.append(f"image size: {_times(old.image_size)} -> {_times(size)}")
    if isinstance(old, ViTConfig) and new.grid != old.grid and new.positions == "rope-2d":
        checkpoint.config = new.replace(positions="none", rotary=Rotary.rope_2d(old))  # the trained grid is remembered
    if isinstance(old, ViTConfig) and new.grid != old.grid and POSITIONS[old.positions].resize(tensors, old, new):
        grids = f"{_times(old.grid)} -> {_times(new.grid)}"
        notes.append(f"positions: grid {grids}, resized the way of {new.position_resize}")


def _change_patches(tensors: dict[str, Tensor], config: ViTConfig, change: Callable[[Tensor], Tensor]) -> None:
    """The patch embedding, changed in its form as a convolution."""
    weight, linear = tensors["patches.weight"], config.patch_embedding == "linear"
    changed = change(linear_to_conv(weight, config.patch_kernel) if linear else weight)
    tensors["patches.weight"] = conv_to_linear(changed) if linear else changed


def _times(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def resize_patches(weight: Tensor, patch: Size) -> Tensor:
    """D C P Q -> D C P' Q', so that an image resized with its patches gives the same tokens (Beyer et al. 2023).

    With B the bilinear resize of one patch, w' solves B^T w' = w in the least-squares sense.
    """
    old = (weight.shape[2], weight.shape[3])
    pixels = torch.eye(old[0] * old[1], dtype=torch.float64).unflatten(1, (1, *old))  # PQ 1 P Q
    bilinear = F.interpolate(pixels, patch, mode="bilinear", align_corners=False).flatten(1)  # PQ P'Q' = B^T
    solved = torch.linalg.pinv(bilinear) @ weight.flatten(2).to(torch.float64).mT  # D C P'Q'... as (.., P'Q', C)
    return solved.mT.unflatten(2, patch).to(weight.dtype).contiguous()


def _to_classes(checkpoint: Checkpoint, tensors: dict[str, Tensor], classes: int) -> None:
    """Another number of classes: the classifier starts at zero, and the tanh layer of pre-training goes."""
    config = checkpoint.config
    dtype = next(iter(tensors.values())).dtype
    if isinstance(config, ViTConfig):
        new: AnyConfig = (without := config.replace(classes=classes, pre_logits=0))
        names, width = ["head.classifier", "head.distilled"][: 1 + config.distillation_token], without.head_inputs
    else:
        new, names, width = config.replace(classes=classes), ["head"], config.stem.out_channels
    for name in [n for n in tensors if n.rpartition(".")[0] in (*names, "head.pre_logits")]:
        del tensors[name]
    for name in names if classes else ():
        tensors[f"{name}.weight"] = torch.zeros(classes, width, dtype=dtype)
        tensors[f"{name}.bias"] = torch.zeros(classes, dtype=dtype)
    start = "a new one that starts at zero" if classes else "none: the model returns the representation"
    tanh = ", and the tanh layer before it removed" if isinstance(config, ViTConfig) and config.pre_logits else ""
    checkpoint.notes.append(f"classifier: {config.classes} -> {classes} classes, {start}{tanh}")
    checkpoint.config, checkpoint.outputs = new, Outputs()
