"""timm's names and layouts of tensors <-> ours: a two-column map, and what is joined, split or turned on the way.

Shapes: D width, M mlp_width, H heads, h x w grid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from vitkit.checkpoints import writing
from vitkit.checkpoints.tensors import LazyTensors, NameMap, Row, block, without_leading_axis

BLOCK, UNIT, OURS = "blocks.{i}.", "stages.{s}.blocks.{u}", "encoder.blocks.{i}."
BRANCH = "encoder.blocks.{i}.branches.{b}."
_POOL = {"q": "query", "kv": "key_value", "proj": "out", "norm": "norm", "mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"}
_WHOLE: list[Row] = [
    ("cls_token", "class_token"),
    ("dist_token", "distillation_token"),
    ("reg_token", "registers"),
    ("register_tokens", "registers"),  # DINOv2's own code
    ("pos_embed", "positions.learned"),
    ("patch_embed.proj.*", "patches.*"),
    ("patch_embed.norm.*", "patches.norm_after.*"),
    ("norm_pre.*", "pre_norm.*"),
    ("rope.freqs", "rotary.frequencies"),
    ("norm.*", "norm.*"),
    ("fc_norm.*", "head.norm.*"),
    ("attn_pool.latent", "head.pool.probe"),
    *((f"attn_pool.{theirs}.*", f"head.pool.{ours}.*") for theirs, ours in _POOL.items()),
    ("pre_logits.fc.*", "head.pre_logits.*"),
    ("head.*", "head.classifier.*"),
    ("linear_head.*", "head.classifier.*"),  # of DINOv2's and DINOv3's classifiers
    ("head_dist.*", "head.distilled.*"),
]
_INSIDE: list[Row] = [  # a block's attention and MLP, behind {BLOCK}attn. and {BLOCK}mlp.
    ("attn.qkv.*", "attention.qkv.*"),
    ("attn.q_proj.*", "attention.query.*"),
    ("attn.k_proj.*", "attention.key.*"),
    ("attn.v_proj.*", "attention.value.*"),
    ("attn.q_bias", "attention.query_bias"),
    ("attn.v_bias", "attention.value_bias"),
    ("attn.q_norm.*", "attention.query_norm.*"),
    ("attn.k_norm.*", "attention.key_norm.*"),
    ("attn.norm.*", "attention.norm.*"),
    ("attn.proj.*", "attention.out.*"),
    ("mlp.fc1.*", "mlp.up.*"),
    ("mlp.fc1_g.*", "mlp.gate.*"),
    ("mlp.fc1_x.*", "mlp.value.*"),
    ("mlp.norm.*", "mlp.norm.*"),
    ("mlp.fc2.*", "mlp.down.*"),
]
_BLOCKS: list[Row] = [
    *((BLOCK + theirs, OURS + ours) for theirs, ours in _INSIDE),
    *((f"{BLOCK}{norm}.*", f"{OURS}{norm}.*") for norm in ("norm1", "norm2")),
    *block(BLOCK, scale1="ls1.gamma", scale2="ls2.gamma"),
    *block(BLOCK, scale1="gamma_1", scale2="gamma_2"),  # Eva, Beit, DeiT III's own code
    *block(BLOCK, up="mlp.w12.*", down="mlp.w3.*"),  # DINOv2's own code
    (f"{BLOCK}attn.rel_pos.mlp.fc1.*", f"{OURS}relative.mlp.up.*"),
    (f"{BLOCK}attn.rel_pos.mlp.fc2.*", f"{OURS}relative.mlp.down.*"),
    ("shared_rel_pos.mlp.fc1.*", "positions.relative.mlp.up.*"),
    ("shared_rel_pos.mlp.fc2.*", "positions.relative.mlp.down.*"),
]
# Attention and MLP side by side (ParallelScalingBlock), and several of each (ParallelThingsBlock).
_PARALLEL: list[Row] = [
    (f"{BLOCK}in_norm.*", f"{OURS}norm1.*"),
    (f"{BLOCK}q_norm.*", f"{OURS}attention.query_norm.*"),
    (f"{BLOCK}k_norm.*", f"{OURS}attention.key_norm.*"),
    (f"{BLOCK}attn_out_proj.*", f"{OURS}attention.out.*"),
    (f"{BLOCK}mlp_out_proj.*", f"{OURS}mlp.down.*"),
    (f"{BLOCK}mlp_bias", f"{OURS}mlp.up.bias"),
    (f"{BLOCK}ls.gamma", f"{OURS}scale1"),
]
_THINGS: list[Row] = [
    *((f"{BLOCK}{'attns' if t.startswith('attn') else 'ffns'}.{{b}}.{t}", BRANCH + o) for t, o in _INSIDE),
    (f"{BLOCK}attns.{{b}}.norm.*", f"{BRANCH}norm1.*"),
    (f"{BLOCK}ffns.{{b}}.norm.*", f"{BRANCH}norm2.*"),
    (f"{BLOCK}attns.{{b}}.ls.gamma", f"{BRANCH}scale1"),
    (f"{BLOCK}ffns.{{b}}.ls.gamma", f"{BRANCH}scale2"),
]
_STEM: list[Row] = [  # the ResNet of a hybrid
    ("patch_embed.backbone.stem.conv.weight", "stem.root.weight"),
    ("patch_embed.backbone.stem.norm.*", "stem.norm.*"),
    (f"patch_embed.backbone.{UNIT}.conv{{n}}.weight", "stem.stages.{s}.{u}.conv{n}.weight"),
    (f"patch_embed.backbone.{UNIT}.norm{{n}}.*", "stem.stages.{s}.{u}.norm{n}.*"),
    (f"patch_embed.backbone.{UNIT}.downsample.conv.weight", "stem.stages.{s}.{u}.shortcut.0.weight"),
    (f"patch_embed.backbone.{UNIT}.downsample.norm.*", "stem.stages.{s}.{u}.shortcut.1.*"),
    # R+Ti/16: a stem without stages
    ("patch_embed.backbone.conv.weight", "stem.root.weight"),
    ("patch_embed.backbone.norm.*", "stem.norm.*"),
]
_UNIT_D, _OURS_D = "patch_embed.backbone.layer{s}.{u}.", "stem.stages.{s}.{u}."
_NORMS_D = [("conv1.1", "norms.0"), ("conv1.4", "norms.1"), ("bn1", "norms.2")]
_RESNET_D: list[Row] = [  # its stages are counted from 1: `_from_zero` moves them
    *((f"patch_embed.backbone.conv1.{3 * i}.weight", f"stem.root.{i}.weight") for i in range(3)),
    (f"{_UNIT_D}conv{{n}}.weight", f"{_OURS_D}conv{{n}}.weight"),
    (f"{_UNIT_D}downsample.1.weight", f"{_OURS_D}shortcut.1.weight"),
]
for _part in ("weight", "bias", "running_mean", "running_var"):
    _RESNET_D += [(f"patch_embed.backbone.{theirs}.{_part}", f"stem.{ours}.{_part}") for theirs, ours in _NORMS_D]
    _RESNET_D += [(f"{_UNIT_D}bn{{n}}.{_part}", f"{_OURS_D}norm{{n}}.{_part}")]
    _RESNET_D += [(f"{_UNIT_D}downsample.2.{_part}", f"{_OURS_D}shortcut.2.{_part}")]
NAMES = NameMap(*_WHOLE, *_BLOCKS, *_PARALLEL, *_THINGS, *_STEM)
RESNET_D = NameMap(*_WHOLE, *_BLOCKS, *_RESNET_D)
# Where one of our names has several of theirs, the first row is written.
GAMMAS = NameMap(*block(BLOCK, scale1="gamma_1", scale2="gamma_2"), *_WHOLE, *_BLOCKS)
PARALLEL = NameMap(*_WHOLE, *_PARALLEL)

TABLE = "relative_position_bias_table"

Recipes = dict[str, tuple[Sequence[str], Callable[..., Tensor]]]


def to_ours(foreign: LazyTensors, side: Callable[[int], int]) -> LazyTensors:
    """`side` says how many offsets a table of so many has along its rows."""
    if "patch_embed.backbone.conv1.0.weight" in foreign:
        foreign = foreign.renamed(_from_zero)
    named = foreign.renamed(lambda name: RESNET_D.ours(NAMES.ours(name))).converted(without_leading_axis).fused()
    return named.rebuilt(_parted(named) | _tables(named, side))


def _from_zero(name: str) -> str | None:
    """Stages of a ResNet-D by our count; the number of batches that a norm has seen changes nothing."""
    moved = re.sub(r"(?<=backbone\.layer)\d+", lambda match: str(int(match[0]) - 1), name)
    return None if name.endswith("num_batches_tracked") else moved


def _from_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {re.sub(r"(?<=backbone\.layer)\d+", lambda m: str(int(m[0]) + 1), n): t for n, t in tensors.items()}


def _parted(tensors: LazyTensors) -> Recipes:
    """The one matrix of a parallel block: the MLP's first layer, then queries, keys and values."""
    recipes: Recipes = {}
    for name in tensors:
        if match := re.fullmatch(r"(blocks\.\d+\.)in_proj\.(weight|bias)", name):
            ours, kind = f"encoder.{match[1]}", match[2]
            hidden = tensors.need(f"{ours}mlp.down.weight", 2)[1]
            recipes[f"{ours}mlp.up.{kind}"] = ((name,), partial(_rows, stop=hidden))
            recipes[f"{ours}attention.qkv.{kind}"] = ((name,), partial(_rows, start=hidden))
    return recipes


def _rows(tensor: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    return tensor[start:stop].contiguous()


def _tables(tensors: LazyTensors, side: Callable[[int], int]) -> Recipes:
    """BEiT's and timm's scores by offset, (2h-1)(2w-1) rows of H and three more for the class token."""
    recipes: Recipes = {}
    for name in tensors:
        if match := re.fullmatch(rf"(?:(blocks\.\d+)\.attn|rel_pos_bias|shared_rel_pos)\.(?:rel_pos\.)?{TABLE}", name):
            ours = f"encoder.{match[1]}.relative" if match[1] else "positions.relative"
            extra = 3 if "class_token" in tensors else 0
            rows = side(tensors.need(name, 2)[0] - extra)
            recipes[f"{ours}.by_offset"] = ((name,), partial(_by_offset, rows=rows, extra=extra))
            if extra:
                recipes[f"{ours}.with_prefix"] = ((name,), _with_prefix)
    return recipes


def _by_offset(table: Tensor, rows: int, extra: int) -> Tensor:
    return table[: len(table) - extra].T.unflatten(1, (rows, -1)).contiguous()  # H 2h-1 2w-1


def _with_prefix(table: Tensor) -> Tensor:
    return table[[-2, -3, -1]].T.contiguous()  # ours: patch to class, class to patch, class to class


def to_theirs(tensors: Mapping[str, Tensor], kind: str, apart: bool) -> dict[str, Tensor]:
    """For a class of timm; `apart`: the gates of an MLP are a layer of their own."""
    tensors = _table_rows(dict(tensors), "rel_pos_bias" if kind == "Beit" else "shared_rel_pos", kind == "Beit")
    if apart:
        for name in [n for n in tensors if ".blocks." in n and ".mlp.up." in n]:
            gate, value = tensors.pop(name).chunk(2)
            tensors |= {name.replace(".up.", ".gate."): gate, name.replace(".up.", ".value."): value}
    if kind == "ParallelScalingBlock":
        for name in [n for n in tensors if n.endswith((".attention.qkv.weight", ".attention.qkv.bias"))]:
            ours, _, rest = name.partition("attention.qkv.")
            both = torch.cat([tensors.pop(f"{ours}mlp.up.{rest}"), tensors.pop(name)])
            tensors[f"{ours.removeprefix('encoder.')}in_proj.{rest}"] = both
    if "stem.root.0.weight" in tensors:
        return _from_one(writing.under(RESNET_D, tensors))
    names = {"Eva": GAMMAS, "Beit": GAMMAS, "ParallelScalingBlock": PARALLEL}.get(kind, NAMES)
    return writing.under(names, tensors)


def _table_rows(tensors: dict[str, Tensor], shared: str, beit: bool) -> dict[str, Tensor]:
    """The inverse of `_tables`."""
    for name in [n for n in tensors if n.endswith("relative.by_offset")]:
        table, ours = tensors.pop(name).flatten(1).T, name.removesuffix(".by_offset")
        if (prefix := tensors.pop(f"{ours}.with_prefix", None)) is not None:
            table = torch.cat([table, prefix.T[[1, 0, 2]]])
        block = ours.removeprefix("encoder.").removesuffix(".relative")
        theirs = shared if ours == "positions.relative" else f"{block}.attn" + ("" if beit else ".rel_pos")
        tensors[f"{theirs}.{TABLE}"] = table.contiguous()
    return tensors
