"""Query, key and value: three tensors in some families, one in ours.

Readers first give the parts the names `...attention.query.*`, `...attention.key.*` and
`...attention.value.*` (`head.pool.key.*`, `head.pool.value.*`); `fuse` joins them, `split` parts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from vitkit.checkpoints.layout import LazyTensors
from vitkit.errors import CheckpointError

_QKV = re.compile(r"(encoder\.blocks\.\d+\.attention\.)(query|key|value)\.(weight|bias)")
_KEY_VALUE = re.compile(r"(head\.pool\.)(key|value)\.(weight|bias)")
_SPLIT = (
    (re.compile(r"(encoder\.blocks\.\d+\.attention\.)qkv\.(weight|bias)"), ("query", "key", "value")),
    (re.compile(r"(head\.pool\.)key_value\.(weight|bias)"), ("key", "value")),
)


def fuse(tensors: LazyTensors, convert: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Read and convert every tensor, one after the other, joining what belongs together."""
    fused: dict[str, Tensor] = {}
    kinds: tuple[str, ...]
    for name in tensors:
        if match := _QKV.fullmatch(name):
            kinds, joined = ("query", "key", "value"), f"{match[1]}qkv.{match[3]}"
        elif match := _KEY_VALUE.fullmatch(name):
            kinds, joined = ("key", "value"), f"{match[1]}key_value.{match[3]}"
        else:
            fused[name] = convert(name, tensors[name])
            continue
        if joined not in fused:
            parts = [f"{match[1]}{kind}.{match[3]}" for kind in kinds]
            if missing := [part for part in parts if part not in tensors]:
                raise CheckpointError(f"of query, key and value some are missing: {', '.join(missing)}; fetch it again")
            converted = [convert(part, tensors[part]) for part in parts]
            if len({(tuple(c.shape), c.dtype) for c in converted}) != 1:
                raise CheckpointError(f"the parts of {joined!r} do not have the same shape: the file is damaged")
            fused[joined] = torch.cat(converted)
    return fused


def split(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `fuse`, as views."""
    parted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, kinds in _SPLIT:
            if match := pattern.fullmatch(name):
                for kind, part in zip(kinds, tensor.chunk(len(kinds)), strict=True):
                    parted[f"{match[1]}{kind}.{match[2]}"] = part
                break
        else:
            parted[name] = tensor
    return parted
