"""Google's vit_jax checkpoints (.npz), plain and hybrid <-> vitkit; and what big_vision's share with them.

A Dense kernel is (in, out), a convolution's is (height, width, in, out), and attention keeps its heads
apart: query, key and value kernels are (D, H, K), the output's is (H, K, D).

What a file does not say is what the JAX code does: GELU in flax's default, the tanh form (PyTorch ports take the
exact one: `load(..., activation="gelu")`), images squashed without antialiasing to pixels of -1 to 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from torch import Tensor

from vitkit.checkpoints import reading, writing
from vitkit.checkpoints.family import Checkpoint, Fields, Opened, Written
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import WITH_LEADING_AXIS, LazyTensors, NameMap, block, split, without_leading_axis
from vitkit.errors import CheckpointError

MEANT: Fields = {"norm_eps": 1e-6, "activation": "gelu-tanh", "position_resize": "official"}
TOWERS = ("opt/target/", "params/img/", "params/")  # prefixes of a training state and of an image tower
ATTENTION = {part: f"{part}/kernel*" for part in ("query", "key", "value", "out")}
MLP = {"up": "Dense_0/kernel*", "down": "Dense_1/kernel*"}


def flax_block(norm1: str, attention: str, norm2: str, mlp: str) -> list[tuple[str, str]]:
    start = "Transformer/encoderblock_{i}/"
    norms = block(start, norm1=f"{norm1}/scale*", norm2=f"{norm2}/scale*")
    return [*norms, *block(f"{start}{attention}/", **ATTENTION), *block(f"{start}{mlp}/", **MLP)]


UNIT, OUR_UNIT = "block{s}/unit{u}", "stem.stages.{s}.{u}"  # counted from 1 in the file, from 0 here: see _counted
NAMES = NameMap(
    ("conv_root/kernel", "stem.root.weight"),
    ("gn_root/scale*", "stem.norm.*"),
    (f"{UNIT}/conv{{n}}/kernel", f"{OUR_UNIT}.conv{{n}}.weight"),
    (f"{UNIT}/gn{{n}}/scale*", f"{OUR_UNIT}.norm{{n}}.*"),
    (f"{UNIT}/conv_proj/kernel", f"{OUR_UNIT}.shortcut.0.weight"),
    (f"{UNIT}/gn_proj/scale*", f"{OUR_UNIT}.shortcut.1.*"),
    ("embedding/kernel*", "patches.*"),
    ("cls", "class_token"),
    ("Transformer/posembed_input/pos_embedding", "positions.learned"),
    *flax_block("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"),
    *flax_block("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"),  # flax since linen
    ("Transformer/encoder_norm/scale*", "norm.*"),
    ("pre_logits/kernel*", "head.pre_logits.*"),
    ("head/kernel*", "head.classifier.*"),
)


def matches(opened: Opened) -> bool:
    marks = ("Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel", "Transformer/posembed_input/pos_embedding")
    return any(name.endswith(marks) for name in opened.tensors)


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    notes: list[str] = []
    named = opened.tensors.tower(TOWERS, "embedding/kernel", notes).renamed(lambda name: NAMES.ours(_counted(name, -1)))
    named.need("positions.learned", 3)
    return read_flax(named, options, notes, _in_file, [1, 0])


def write(checkpoint: Checkpoint) -> Written:
    config, tensors = writing.held(checkpoint, "Google's format", **writing.PAPER | {"positioned_prefix": "all"})
    notes = writing.not_kept(config, "Google's format", MEANT, "official", pillow=False)
    return Written(to_flax(tensors, config.heads, _in_file), notes)


def _counted(name: str, change: int) -> str:
    """With other numbers of block and unit."""
    return re.sub(r"(?<=^block)\d+|(?<=/unit)\d+", lambda match: str(int(match[0]) + change), name)


def _in_file(name: str) -> str:
    return _counted(NAMES.theirs(name), 1)


def read_flax(
    named: LazyTensors, options: ModelOptions, notes: list[str], in_file: Callable[[str], str], prefixes: list[int]
) -> Checkpoint:
    """From tensors with our names in flax's layout; `prefixes` as in `reading.image_size_of`."""
    by_head = named.need("encoder.blocks.0.attention.query.weight", 3)[1:]  # H K
    tensors = named.converted(partial(_from_flax, by_head)).fused()
    patch, _, fields = reading.body_of(tensors, "official")
    fields["heads"] = by_head[0]
    fields["pooling"] = "map" if "head.pool.probe" in tensors else "cls" if fields["class_token"] else "mean"
    if "positions.learned" in tensors:
        size, prefix = reading.image_size_of(tensors, prefixes, patch, options.image_size)
    else:
        size, prefix = reading.assumed_size(patch, options.image_size, notes), 0
        fields["positions"] = "sincos-2d"
    fields |= {"image_size": size, "positioned_prefix": "all" if prefix else "none"}
    notes += reading.rare(fields)
    notes.append("preprocessing: not in the file, Google's (squashed to the size, pixels -1 to 1) is assumed")
    fields |= {**MEANT, "preprocessing": {"interpolation": "bilinear-plain"}}
    return reading.make_checkpoint(tensors, options, notes, in_file, **fields)


def _from_flax(by_head: tuple[int, ...], name: str, tensor: Tensor) -> Tensor:
    shape, axis = tuple(tensor.shape), _head_axis(name)
    if name in WITH_LEADING_AXIS:
        return without_leading_axis(name, tensor)
    if axis is not None:
        if shape[axis : axis + 2] != by_head:
            raise CheckpointError(f"the tensor for {name!r} has shape {shape}, which is not flax's layout for it")
        tensor = tensor.flatten(axis, axis + 1)
    if tensor.ndim == 4:  # some hybrids keep the GroupNorm's values as (1, 1, 1, C)
        norm = shape[:3] == (1, 1, 1) and ("norm" in name or ".shortcut.1." in name)
        return tensor.flatten() if norm else tensor.permute(3, 2, 0, 1).contiguous()
    return tensor.T.contiguous() if tensor.ndim == 2 else tensor


def _head_axis(name: str) -> int | None:
    """Where flax has two axes, heads and their channels, and PyTorch one; None: nowhere."""
    match = re.fullmatch(r"(?:.*\.attention|head\.pool)\.(query|key|value|out)\.(weight|bias)", name)
    if match is None or match.groups() == ("out", "bias"):
        return None
    return int(match[1] != "out" and match[2] == "weight")


def to_flax(tensors: dict[str, Tensor], heads: int, in_file: Callable[[str], str]) -> dict[str, Tensor]:
    """The inverse of `_from_flax`."""
    foreign = {}
    for name, tensor in split(tensors).items():
        if name in WITH_LEADING_AXIS:
            tensor = tensor[None]
        elif tensor.ndim in (2, 4):
            tensor = tensor.permute(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T
        axis = _head_axis(name)
        foreign[in_file(name)] = tensor if axis is None else tensor.unflatten(axis, (heads, -1))
    return foreign
