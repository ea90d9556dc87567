"""Home-made ViTs whose parts are standard -> vitkit, by a map that the user writes: their names, ours.

    [names]                       # theirs = ours; {i} is the number of a block, .* is .weight and .bias, "" leaves out
    "blocks.{i}.ln1.*" = "encoder.blocks.{i}.norm1.*"
    [config]                      # what tensors do not say: fields of ViTConfig
    heads = 8
    [layout]                      # the order of rows and columns that have several meanings, as einops writes it
    qkv = "h d qkv"

Nothing that changes a result is guessed: what neither the tensors nor the map say is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from einops import rearrange
from torch import Tensor

from vitkit.checkpoints import nearest, reading
from vitkit.checkpoints.family import Checkpoint, Fields, Opened
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import LazyTensors, NameMap
from vitkit.errors import CheckpointError, did_you_mean
from vitkit.io import read_regular
from vitkit.model.config import Size, ViTConfig, as_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]

SHOWN = 30  # patterns of names in an error
NEEDED = ("patches.weight", "encoder.blocks.0.norm1.weight", "encoder.blocks.0.mlp.down.weight")
# What no tensor shows, with the commonest value and what else there is.
ASKED = {
    "heads": "8  # attention heads",
    "activation": '"gelu"  # nn.GELU(); "gelu-tanh", "relu", "silu", "quick-gelu"',
    "norm_eps": "1e-5  # nn.LayerNorm's own; the official code has 1e-6",
    "block": '"pre-norm"  # x + f(norm(x)); "post-norm" is x + norm(f(x)); "post-ln", norm(x + f(x))',
    "score_scale": '"head"  # scores / sqrt(channels per head); "width": / sqrt(width); or "after-softmax"',
    "pooling": '"cls"  # the class token; "mean" of the patches, "mean-all" with the class token',
}
REFUSED = {  # words for what tutorials have and vitkit has not -> the reason
    ("score_scale", "after-softmax"): "softmax(q k^T) / sqrt(width) leaves the scores unscaled and shrinks the "
    "outputs instead: a mistake of tutorials that is another function, for which vitkit has no attention "
    "(docs/mistakes.md). Move the scale inside the softmax and train again",
    ("block", "post-ln"): "norm(x + f(x)), the original Transformer and the default of nn.TransformerEncoderLayer, "
    "norms the residual path itself, which no ViT does. Train with norm_first=True",
}
LAYOUTS = {"qkv": ("qkv", "h", "d"), "patches": ("p", "q", "c")}
EXAMPLES = {
    "qkv": '"qkv h d"  # timm, nn.MultiheadAttention, .chunk(3); "h d qkv": rearrange \'b n (h d qkv) -> ...\'',
    "patches": '"p q c"  # rearrange \'... (p1 p2 c)\'; "c p q": nn.Unfold, or a reshape of channels first',
}


@dataclass(frozen=True)
class UserMap:
    names: Mapping[str, str] = field(default_factory=dict)  # theirs -> ours
    config: Fields = field(default_factory=dict)
    layout: Mapping[str, str] = field(default_factory=dict)
    source: str = "the map"  # for errors


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    user, notes = parse(options.map), list[str]()
    names = NameMap(*((theirs, ours) for theirs, ours in user.names.items() if ours))
    foreign = _without_left_out(opened.tensors, user, notes)
    _check_names(foreign, names, user)
    stated = {**user.config, **options.stated}
    tensors = foreign.renamed(names.ours).converted(_two_axes).fused()
    if missing := [name for name in NEEDED if name not in tensors]:
        raise CheckpointError(f"{user.source} gives no tensor the name {missing[0]!r}; every ViT has one: add its row")
    _ask(tensors, user, stated, names)
    tensors = _in_our_layout(tensors, user, stated)
    patch, width, fields = reading.body_of(tensors)
    fields |= _attention_of(tensors, width, stated)
    fields |= _positions(tensors, patch, stated, options, notes)
    fields |= {"pooling": "mean", "position_resize": "official"}
    notes += [
        "preprocessing: not in the file; state it under [config.preprocessing] where yours is not (x - 0.5) / 0.5"
    ]
    return reading.make_checkpoint(tensors, options, notes, names.theirs, **{**fields, **stated})


def parse(given: object) -> UserMap:
    """A .toml file, or the same tables as a dictionary."""
    source, tables = "the map", given
    if isinstance(given, (str, Path)):
        source = str(given)
        try:
            tables = tomllib.loads(read_regular(given).decode())
        except OSError as e:
            raise CheckpointError(f"the map {source!r} cannot be read ({e.strerror}); give a .toml file") from e
        except (ValueError, RecursionError) as e:
            raise CheckpointError(f"{source} is not a TOML file ({e}); names with dots stand in quotes") from e
    if not isinstance(tables, Mapping) or not tables.keys() <= {"names", "config", "layout"}:
        found = ", ".join(map(str, tables)) if isinstance(tables, Mapping) else type(tables).__name__
        raise CheckpointError(f"{source} holds {found}; a map has the tables [names], [config] and [layout]")
    for name, table in tables.items():
        words = name == "config" or (isinstance(table, Mapping) and all(isinstance(v, str) for v in table.values()))
        if not isinstance(table, Mapping) or not words:
            raise CheckpointError(f'{source}: [{name}] must hold rows such as "theirs" = "ours"')
    user = UserMap(**{**tables, "source": source})
    _check_map(user)
    return user


def _check_map(user: UserMap) -> None:
    for name in user.config.keys() - ViTConfig.__dataclass_fields__.keys():
        near = did_you_mean(name, ViTConfig.__dataclass_fields__)
        raise CheckpointError(f"{user.source}: [config] has {name!r}, which is no field of ViTConfig.{near}")
    known = nearest.our_names()
    for theirs, ours in user.names.items():
        pattern = ours.replace("blocks.0.", "blocks.{i}.")
        if (
            ours
            and pattern not in known
            and not any(pattern == name[:-2] + end for name in known for end in nearest.ENDS)
        ):
            near = did_you_mean(ours, known)
            raise CheckpointError(f"{user.source}: {theirs!r} = {ours!r}, but vitkit has no such name.{near}")
    for name, order in user.layout.items():
        if sorted(order.split()) != sorted(LAYOUTS.get(name, ())):
            rows = "; ".join(f"{key} = {example}" for key, example in EXAMPLES.items())
            raise CheckpointError(f"{user.source}: [layout] {name} = {order!r} is not an order of axes; write {rows}")
    for (name, word), reason in REFUSED.items():
        if user.config.get(name) == word:
            raise CheckpointError(f"{name}={word!r} is not supported: {reason}")


def _without_left_out(tensors: LazyTensors, user: UserMap, notes: list[str]) -> LazyTensors:
    gone = NameMap(*((theirs, "left out") for theirs, ours in user.names.items() if not ours))
    stars = [theirs.removesuffix("*") for theirs, ours in user.names.items() if not ours and theirs.endswith("*")]
    kept = {n: n for n in tensors if gone.ours(n) != "left out" and not n.startswith(tuple(stars))}
    return tensors.renamed(kept.get, notes, "that the map leaves out")


def _check_names(tensors: LazyTensors, names: NameMap, user: UserMap) -> None:
    """Every name of the file has one of ours, and no two have the same."""
    shapes = {name: tuple(outline.shape) for name, outline in tensors.outlines.items()}
    ours: dict[str, str] = {}
    for name in shapes:
        if (other := ours.setdefault(names.ours(name), name)) != name:
            raise CheckpointError(f"{user.source} gives {other!r} and {name!r} the same name, {names.ours(name)!r}")
    marked = NameMap(*((theirs, f"={ours}") for theirs, ours in user.names.items()))  # a name may stay as it is
    if not (unknown := {name: shape for name, shape in shapes.items() if marked.ours(name) == name}):
        return
    width, taken = nearest.width_of(shapes.values()), [name for name in user.names.values() if name]
    taken += [name[:-2] + end for name in taken if name.endswith(".*") for end in nearest.ENDS]
    rows = []
    for pattern, group in nearest.patterns(unknown).items():
        shape = shapes[group[0]]
        likely = nearest.candidates(pattern, shape, width, taken)[:3]
        many = f" in {len(group)} blocks" if len(group) > 1 else ""
        rows.append(f'  "{pattern}" {shape}{many}: {" or ".join(likely) or "no part of a standard ViT has this shape"}')
    more = f"\n  ... and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    action = '[names] wants rows "theirs" = "ours" ("" leaves a tensor out). By their shapes they may be:'
    listed = "\n".join(rows[:SHOWN])
    raise CheckpointError(f"{user.source} says nothing of {len(unknown)} tensors of the file. {action}\n{listed}{more}")


def _two_axes(name: str, tensor: Tensor) -> Tensor:
    """Tokens and tables as (N, width), whatever axes they have on disk."""
    tables = ("class_token", "distillation_token", "registers", "positions.learned")
    return tensor.reshape(-1, tensor.shape[-1]) if name in tables and tensor.ndim else tensor


def _ask(tensors: LazyTensors, user: UserMap, stated: Fields, names: NameMap) -> None:
    """Stop with every question that is open, in the form of the rows that answer them."""
    questions = [f"  {name} = {row}" for name, row in ASKED.items() if name not in stated]
    if "class_token" not in tensors:  # then there is only the mean
        questions = [row for row in questions if not row.startswith("  pooling")]
    if tensors.outlines["patches.weight"].ndim == 2 and "patch_size" not in stated:
        questions.append("  patch_size = 16  # the patch embedding is a matrix, which does not show it")
    if "positions.learned" not in tensors and "positions" not in stated:
        questions.append('  positions = "none"  # no position table is mapped; "sincos-2d", "rope-2d"')
    fused = names.theirs(qkv := "encoder.blocks.0.attention.qkv.weight")
    known = fused == qkv or fused.endswith("in_proj_weight")  # three matrices, or nn.MultiheadAttention's one
    orders = [] if known else ["qkv"]
    orders += ["patches"] if tensors.outlines["patches.weight"].ndim == 2 else []
    layout = [f"  {name} = {EXAMPLES[name]}" for name in orders if name not in user.layout]
    lines = [*(["[config]", *questions] if questions else []), *(["[layout]", *layout] if layout else [])]
    if lines:
        why = f"the file does not say everything; {user.source} must, in these rows with your model's values:"
        raise CheckpointError("\n".join([why, *lines]))


def _in_our_layout(tensors: LazyTensors, user: UserMap, stated: Fields) -> LazyTensors:
    """Fused queries, keys and values as (qkv h d), patches as a convolution."""
    p, q = as_size(stated.get("patch_size", 1), "patch_size")
    heads, qkv, patches = stated["heads"], user.layout.get("qkv"), user.layout.get("patches")

    def convert(name: str, tensor: Tensor) -> Tensor:
        try:
            if qkv and ".attention.qkv." in name:
                return rearrange(tensor, f"({qkv}) ... -> (qkv h d) ...", qkv=3, h=heads)
            if patches and name == "patches.weight" and tensor.ndim == 2:
                return rearrange(tensor, f"d ({patches}) -> d c p q", p=p, q=q)
            if patches and name.startswith("patches.norm_before."):
                return rearrange(tensor, f"({patches}) -> (c p q)", p=p, q=q)
        except Exception as e:
            shape, sizes = tuple(tensor.shape), f"heads={heads}, patch_size={p}x{q}"
            raise CheckpointError(f"{name} of shape {shape} cannot be divided as {user.source} says ({sizes})") from e
        return tensor

    return tensors.converted(convert)


def _attention_of(tensors: LazyTensors, width: int, stated: Fields) -> Fields:
    """Heads of another width than width / heads, and no output projection, are shown by shapes."""
    wide = tensors.need("encoder.blocks.0.attention.qkv.weight", 2)[0] // 3
    heads = stated["heads"]
    if not isinstance(heads, int) or heads < 1 or wide % heads:
        raise CheckpointError(f"heads={heads!r} must divide the {wide} channels that queries have in all heads")
    has_out = "encoder.blocks.0.attention.out.weight" in tensors
    fields: Fields = {"head_width": 0 if wide == width else wide // heads, "attention_out": has_out}
    return fields if has_out else fields | {"out_bias": True}


def _positions(tensors: LazyTensors, patch: Size, stated: Fields, options: ModelOptions, notes: list[str]) -> Fields:
    """The image size, and how many of the tokens before the patches the position table counts."""
    wanted = as_size(stated["image_size"]) if "image_size" in stated else options.image_size
    if "positions.learned" not in tensors:
        return {"image_size": reading.assumed_size(patch, wanted, notes)}
    first, registers = ("class_token" in tensors) + ("distillation_token" in tensors), tensors.rows("registers")
    counts = {first + registers: "all", first: "class", 0: "none"}
    counts |= {first + registers: "all"}
    size, prefix = reading.image_size_of(tensors, list(counts), patch, wanted)
    return {"image_size": size, "positioned_prefix": counts[prefix]}
