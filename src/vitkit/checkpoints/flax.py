"""How flax lays out the tensors of Google's two code bases, and how to tell a configuration from them.

A Dense kernel is (in, out), a convolution's is (height, width, in, out), and attention keeps its heads
apart: query, key and value kernels are (D, H, K), the output's is (H, K, D).
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from vitkit.checkpoints.layout import WITH_LEADING_AXIS, LazyTensors, Tensors, count, find_grid, need, tower
from vitkit.checkpoints.stems import stem_from_shapes
from vitkit.errors import CheckpointError
from vitkit.model.config import ViTConfig

ASSUMED = "preprocessing: not in the file, Google's (squashed to the size, pixels -1 to 1) is assumed"
_PARTS = re.compile(r"(?:.*\.attention|head\.pool)\.(?:query|key|value)\.(weight|bias)")
_OUT = re.compile(r"(?:.*\.attention|head\.pool)\.out\.weight")


# --- rows of a NameMap -------------------------------------------------------------------------------

Rows = list[tuple[str, str]]


def dense(theirs: str, ours: str) -> Rows:
    return [(f"{theirs}/kernel", f"{ours}.weight"), (f"{theirs}/bias", f"{ours}.bias")]


def norm(theirs: str, ours: str) -> Rows:
    return [(f"{theirs}/scale", f"{ours}.weight"), (f"{theirs}/bias", f"{ours}.bias")]


def attention(theirs: str, ours: str) -> Rows:
    return [row for part in ("query", "key", "value", "out") for row in dense(f"{theirs}/{part}", f"{ours}.{part}")]


def mlp(theirs: str, ours: str) -> Rows:
    return [*dense(f"{theirs}/Dense_0", f"{ours}.up"), *dense(f"{theirs}/Dense_1", f"{ours}.down")]


# --- tensors -----------------------------------------------------------------------------------------


def from_flax(name: str, tensor: Tensor, config: ViTConfig) -> Tensor:
    """One tensor, named as ours, in PyTorch's layout."""
    shape = tuple(tensor.shape)
    by_head = (config.heads, config.width // config.heads)  # H K
    if name in WITH_LEADING_AXIS:
        _expect(name, shape, tensor.ndim == 3 and shape[0] == 1)
        return tensor[0]
    if match := _PARTS.fullmatch(name):
        _expect(name, shape, shape == ((config.width, *by_head) if match[1] == "weight" else by_head))
        return tensor.flatten(1).T.contiguous() if match[1] == "weight" else tensor.flatten()
    if _OUT.fullmatch(name):
        _expect(name, shape, shape == (*by_head, config.width))
        return tensor.flatten(0, 1).T.contiguous()
    if tensor.ndim == 4:  # some hybrids keep the GroupNorm's values as (1, 1, 1, C)
        norm = shape[:3] == (1, 1, 1) and ("norm" in name or ".shortcut.1." in name)
        return tensor.flatten() if norm else tensor.permute(3, 2, 0, 1).contiguous()
    return tensor.T.contiguous() if tensor.ndim == 2 else tensor


def to_flax(name: str, tensor: Tensor, heads: int) -> Tensor:
    """The inverse of `from_flax`."""
    if name in WITH_LEADING_AXIS:
        return tensor[None]
    if match := _PARTS.fullmatch(name):
        return tensor.T.unflatten(1, (heads, -1)) if match[1] == "weight" else tensor.unflatten(0, (heads, -1))
    if _OUT.fullmatch(name):
        return tensor.T.unflatten(0, (heads, -1))
    if tensor.ndim == 4:
        return tensor.permute(2, 3, 1, 0)
    return tensor.T if tensor.ndim == 2 else tensor


def _expect(name: str, shape: tuple[int, ...], right: bool) -> None:
    if not right:
        raise CheckpointError(f"the tensor for {name!r} has shape {shape}, which is not flax's layout for it")


def without_prefix(tensors: Tensors, notes: list[str]) -> LazyTensors:
    """Drop the prefix of a training state or of an image tower, and everything beside it."""
    return tower(tensors, ("opt/target/", "params/img/", "params/"), "embedding/kernel", "outside {prefix!r}", notes)


def body_fields(tensors: LazyTensors) -> dict[str, Any]:
    """Sizes, from tensors that have our names but flax's layout."""
    *kernel, _, width = need(tensors, "patches.weight", 4)
    stem = stem_from_shapes(_stem_in_our_layout(tensors), numerics="official")
    stride = stem.stride if stem else 1
    _, heads, _ = need(tensors, "encoder.blocks.0.attention.query.weight", 3)
    head = "head.classifier.weight"
    return {
        "patch_size": (kernel[0] * stride, kernel[1] * stride),
        "channels": need(tensors, "stem.root.weight" if stem else "patches.weight", 4)[2],
        "width": width,
        "depth": count(tensors, "encoder.blocks.{i}.norm1.weight"),
        "heads": heads,
        "mlp_width": need(tensors, "encoder.blocks.0.mlp.up.weight", 2)[1],
        "classes": need(tensors, head, 2)[1] if head in tensors else 0,
        "stem": stem,
        "pre_logits": need(tensors, "head.pre_logits.weight", 2)[1] if "head.pre_logits.weight" in tensors else 0,
        "class_token": "class_token" in tensors,
    }


def _stem_in_our_layout(tensors: LazyTensors) -> LazyTensors:
    table = {
        name: ((shape[3], shape[2], *shape[:2]) if name == "stem.root.weight" and len(shape) == 4 else shape, dtype)
        for name, (shape, dtype) in tensors.table.items()
    }
    return LazyTensors(table, tensors.__getitem__)


def image_size(tensors: LazyTensors, patch: tuple[int, int], prefixes: list[int], given: Any) -> tuple[Any, int]:
    """The picture size that the position table was trained for, and how many rows come before the patches."""
    rows = need(tensors, "positions.learned", 3)[1]
    grid, prefix = find_grid(rows, prefixes, patch, given)
    return (grid[0] * patch[0], grid[1] * patch[1]), prefix
