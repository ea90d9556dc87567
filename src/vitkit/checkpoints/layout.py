"""What every reader takes and returns, and the two-column name maps they are written as.

A reader is a pure function: foreign tensors in, a `Checkpoint` (configuration, tensors under our
names) out. Foreign tensors come as a mapping that may be lazy, so that shapes can be looked at
before memory is taken, and each tensor is read when it is converted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CheckpointError, ConfigError
from vitkit.model.config import AnyConfig, ConvStemConfig, Preprocessing, Size, StemConfig, ViTConfig, as_size
from vitkit.model.patches import linear_to_conv

Shape = tuple[int, ...]
IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@dataclass
class Checkpoint:
    """A model as data: what a reader returns and a writer takes. Tensors have our names."""

    config: AnyConfig
    tensors: dict[str, Tensor]
    class_names: tuple[str, ...] | None = None
    notes: list[str] = field(default_factory=list)  # what was assumed, changed or left out, one line each
    format: str = "native"
    in_file: Callable[[str], str | None] = lambda name: name  # our name -> the name it has in the file


class LazyTensors(Mapping[str, Tensor]):
    """Names, shapes and dtypes are known; a tensor is read when it is asked for."""

    def __init__(self, table: Mapping[str, tuple[Shape, torch.dtype]], read: Callable[[str], Tensor]) -> None:
        self.table, self._read = dict(table), read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.table:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, name: object) -> bool:
        return name in self.table

    def shape(self, name: str) -> Shape:
        return self.table[name][0]

    def dtype(self, name: str) -> torch.dtype:
        return self.table[name][1]


Tensors = Mapping[str, Tensor]


def of(mapping: Tensors) -> LazyTensors:
    """Any mapping of tensors as a lazy one."""
    if isinstance(mapping, LazyTensors):
        return mapping
    return LazyTensors({k: (tuple(v.shape), v.dtype) for k, v in mapping.items()}, mapping.__getitem__)


def renamed(tensors: Tensors, new_name: Callable[[str], str | None]) -> LazyTensors:
    """The same tensors under other names; those whose new name is None are left out."""
    lazy = of(tensors)
    back = {new: old for old in lazy if (new := new_name(old)) is not None}
    return LazyTensors({new: lazy.table[old] for new, old in back.items()}, lambda name: lazy[back[name]])


def within(tensors: Tensors, prefix: str) -> LazyTensors:
    """The tensors whose names begin with `prefix`, without it."""
    return renamed(tensors, lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None)


def tower(tensors: Tensors, prefixes: Sequence[str], part: str, what: str, notes: list[str]) -> LazyTensors:
    """What lies behind the first of `prefixes` that has `part`, with a note of how much (`what`) is left out."""
    for prefix in prefixes:
        if f"{prefix}{part}" in tensors:
            if rest := [name for name in tensors if not name.startswith(prefix)]:
                notes.append(f"left out: {len(rest)} tensors {what.format(prefix=prefix)}, such as {rest[0]!r}")
            return within(tensors, prefix)
    return of(tensors)


WITH_LEADING_AXIS = ("class_token", "distillation_token", "registers", "positions.learned", "head.pool.probe")


def without_leading_axis(name: str, tensor: Tensor) -> Tensor:
    """Tokens and positions as other PyTorch systems hold them, (1, N, width) -> (N, width); all else as it is."""
    if name not in WITH_LEADING_AXIS:
        return tensor
    if tensor.ndim != 3 or len(tensor) != 1:
        raise CheckpointError(f"the tensor for {name!r} has shape {tuple(tensor.shape)}, but should have (1, N, width)")
    return tensor[0]


def need(tensors: LazyTensors, name: str, ndim: int) -> Shape:
    """The shape of a tensor that the layout cannot do without."""
    if name not in tensors:
        raise CheckpointError(
            f"the tensor {name!r} is missing, although others show what kind of checkpoint this is; "
            f"the file is incomplete: fetch it again"
        )
    shape = tensors.shape(name)
    if len(shape) != ndim or 0 in shape:
        raise CheckpointError(f"the tensor {name!r} has shape {shape}, but should have {ndim} axes, none empty")
    return shape


def count(tensors: Tensors, pattern: str) -> int:
    """How many layers there are: 1 + the highest number that fills {i} in the pattern."""
    found = _compile(pattern)
    numbers = [int(match["i"]) for name in tensors if (match := found.fullmatch(name))]
    if not numbers or max(numbers) >= len(tensors):
        raise CheckpointError(f"no layers are found: no tensors are named like {pattern.format(i=0)!r}")
    return 1 + max(numbers)


def _compile(pattern: str) -> re.Pattern[str]:
    """'blocks.{i}.norm1.*': {letter} is a number, a final .* is weight or bias."""
    text = re.sub(r"\\\{(\w)\\\}", r"(?P<\1>\\d{1,6})", re.escape(pattern))
    return re.compile(text.replace(r"\.\*", r"\.(?P<part>weight|bias)"))


class NameMap:
    """Rows of (theirs, ours). {i} stands for a number, and .* at the end for .weight and .bias."""

    def __init__(self, *rows: tuple[str, str]) -> None:
        self.rows = rows
        self._to_ours = [(_compile(theirs), _template(ours)) for theirs, ours in rows]
        self._to_theirs = [(_compile(ours), _template(theirs)) for theirs, ours in rows]

    def ours(self, name: str) -> str | None:
        return _translate(name, self._to_ours)

    def theirs(self, name: str) -> str | None:
        return _translate(name, self._to_theirs)

    def renamed(self, tensors: Tensors) -> LazyTensors:
        """Tensors under our names; one that no row knows keeps its own, and loading reports it."""
        names = {name: self.ours(name) or name for name in tensors}
        return renamed(tensors, names.__getitem__)


def _template(pattern: str) -> str:
    return pattern.removesuffix(".*") + ".{part}" if pattern.endswith(".*") else pattern


def _translate(name: str, rows: Sequence[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, template in rows:
        if match := pattern.fullmatch(name):
            return template.format(**match.groupdict())
    return None


# Heads cannot be seen in fused weights. Published models have 64 channels per head, but for these widths, and none
# is narrower than ViT-Ti.
HEADS_BY_WIDTH = {1280: 16, 1408: 16, 1664: 16}
NARROWEST = 192


def guess_heads(width: int, given: dict[str, Any], notes: list[str]) -> int:
    """`given` are the fields that the caller states; the file does not tell."""
    if "heads" in given:
        return int(given["heads"])
    heads = HEADS_BY_WIDTH.get(width) or width // 64
    if width < NARROWEST or heads * (width // heads) != width or (width % 64 and width not in HEADS_BY_WIDTH):
        raise CheckpointError(
            f"the file does not say how many heads its layers of width {width} have, and no published model "
            f"has this width: pass heads=N (on the command line --set heads=N)"
        )
    notes.append(
        f"{heads} heads: not in the file, assumed as published models have them; pass heads=N if it has others"
    )
    return heads


def find_grid(rows: int, prefixes: Sequence[int], patch: Size, image_size: Any) -> tuple[Size, int]:
    """Which grid, with how many rows before it, a position table of so many rows holds.

    `prefixes` are the possible numbers of rows before the patches, likeliest first. The grid is the
    one of `image_size` if that fits, or else a square.
    """
    if image_size is not None:
        h, w = as_size(image_size)
        grid = (h // patch[0], w // patch[1])
        for prefix in prefixes:
            if grid[0] * grid[1] + prefix == rows:
                return grid, prefix
    for prefix in prefixes:
        side = round(max(0, rows - prefix) ** 0.5)
        if side > 0 and side * side == rows - prefix:
            return (side, side), prefix
    raise CheckpointError(
        f"a position table of {rows} rows is not a square grid of patches (with {' or '.join(map(str, prefixes))} "
        f"rows before it): say which picture size it was trained for with image_size=(height, width)"
    )


def note_assumptions(fields: dict[str, Any], notes: list[str]) -> None:
    """Say what is rare enough to be a sign of a damaged file."""
    patch = fields["patch_size"]
    if patch[0] != patch[1]:
        notes.append(f"patches of {patch[0]}x{patch[1]} pixels, which are not square")
    if not fields["class_token"]:
        notes.append(f"no class token in the file: pooling is {fields['pooling']!r}")


def make_config(given: dict[str, Any], **fields: Any) -> ViTConfig:
    """A configuration from what the file says and what the caller states; never with a traceback."""
    fields = {**fields, **{k: v for k, v in given.items() if k != "image_size"}}
    try:
        pre = fields.pop("preprocessing", None)
        size = as_size(fields["image_size"])
        channels = fields.get("channels", 3)
        if isinstance(pre, dict):
            if channels != 3:  # published statistics are for RGB
                pre = {k: (sum(v) / len(v),) if k in ("mean", "std") else v for k, v in pre.items()}
            pre = Preprocessing(**{"size": size, **pre})
        return ViTConfig(**fields, preprocessing=pre)
    except (ConfigError, TypeError) as e:
        raise CheckpointError(f"the tensors do not make a model that can be built: {e}") from e


# What formats for the paper's own model can hold; those that hold more say so after it.
PAPER: dict[str, Any] = {
    "positions": "learned",
    "positioned_prefix": ("all", "class"),
    "class_token": True,
    "distillation_token": False,
    "registers": 0,
    "pre_norm": False,
    "layer_scale": None,
    "qkv_bias": True,
    "activation": ("gelu", "gelu-tanh"),
    "pooling": "cls",
    "norm_after_pooling": False,
    "projection": 0,
}


def only(config: AnyConfig, format: str, **wanted: Any) -> ViTConfig:
    """The configuration, if the format can hold it; `wanted` are the values it can hold of some fields."""
    if not isinstance(config, ViTConfig):
        raise CheckpointError(f"{format} cannot hold a ResNet; write it with --to native")
    resnet_of(config, format)
    for name, values in wanted.items():
        values = values if isinstance(values, tuple) else (values,)
        if (value := getattr(config, name)) not in values:
            raise CheckpointError(
                f"{format} cannot hold a model with {name}={value!r} (only {' or '.join(map(repr, values))}); "
                f"--to native holds every model"
            )
    return config


def resnet_of(config: ViTConfig, format: str) -> StemConfig | None:
    """The ResNet of a hybrid, which is the only stem that other systems know."""
    if isinstance(config.stem, ConvStemConfig):
        raise CheckpointError(f"{format} cannot hold a stem of plain convolutions; write it with --to native")
    return config.stem


def conv_patches(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors with the patch embedding as a convolution, which is what other systems hold."""
    config = only(checkpoint.config, "this format")
    tensors = dict(checkpoint.tensors)
    if config.patch_embedding == "linear":
        stride = config.stem.stride if config.stem else 1
        patch = (config.patch_size[0] // stride, config.patch_size[1] // stride)
        tensors["patches.weight"] = linear_to_conv(tensors["patches.weight"], patch)
    return tensors


def not_kept(config: ViTConfig, format: str, **meant: Any) -> list[str]:
    """One line for each field that changes results and that the format cannot state; `meant` is what it implies."""
    lines = []
    for name, value in meant.items():
        if getattr(config, name) != value:
            lines.append(f"{name}={getattr(config, name)!r} is not kept: {format} means {value!r}")
    return lines
