"""Tensors by name that are read when they are asked for, and the two-column maps that rename them.

Shapes can be looked at before memory is taken, and each tensor is read once, when it is used.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, cat

from vitkit.errors import CheckpointError

Tensors = Mapping[str, Tensor]
Rename = Callable[[str], str | None]


class LazyTensors(UserDict[str, Tensor]):
    """Names, shapes and dtypes are known, as tensors on the meta device; numbers are read when they are asked for."""

    def __init__(self, outlines: Tensors, read: Callable[[str], Tensor]) -> None:
        super().__init__(outlines)
        self.outlines, self._read = self.data, read

    @classmethod
    def of(cls, tensors: Tensors) -> LazyTensors:
        return cls({name: tensor.to("meta") for name, tensor in tensors.items()}, tensors.__getitem__)

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def need(self, name: str, ndim: int) -> tuple[int, ...]:
        """The shape of a tensor that the layout cannot do without."""
        if name not in self:
            raise CheckpointError(f"the tensor {name!r} is missing: the file is incomplete; fetch it again")
        shape = tuple(self.outlines[name].shape)
        if len(shape) != ndim or 0 in shape:
            raise CheckpointError(f"the tensor {name!r} has shape {shape}, but should have {ndim} axes, none empty")
        return shape

    def rows(self, name: str) -> int:
        """How many rows a matrix has; 0 when there is none."""
        return self.need(name, 2)[0] if name in self else 0

    def renamed(self, rename: Rename, notes: list[str] | None = None, what: str = "") -> LazyTensors:
        """Under other names; those whose new name is None are left out, with a note of `what` they are."""
        back = {new: old for old in self if (new := rename(old)) is not None}
        if notes is not None and (rest := [old for old in self if rename(old) is None]):
            notes.append(f"left out: {len(rest)} tensors {what}, such as {rest[0]!r}")
        return LazyTensors({new: self.outlines[old] for new, old in back.items()}, lambda name: self[back[name]])

    def within(self, prefix: str, notes: list[str] | None = None) -> LazyTensors:
        """Those whose names begin with `prefix`, without it."""
        kept = {name: name.removeprefix(prefix) for name in self if name.startswith(prefix)}
        return self.renamed(kept.get, notes, f"outside {prefix!r}")

    def tower(self, prefixes: Sequence[str], part: str, notes: list[str]) -> LazyTensors:
        """What lies behind the first of `prefixes` that has `part`; all where none has it."""
        return self.within(next((prefix for prefix in prefixes if f"{prefix}{part}" in self), ""), notes)

    def converted(self, convert: Callable[[str, Tensor], Tensor]) -> LazyTensors:
        """Each converted when it is read."""
        outlines = {name: convert(name, outline) for name, outline in self.outlines.items()}
        return LazyTensors(outlines, lambda name: convert(name, self[name]))

    def rebuilt(self, recipes: Mapping[str, tuple[Sequence[str], Callable[..., Tensor]]]) -> LazyTensors:
        """New tensors, each made of several old ones by a function, in the place of the old ones."""
        used = {old for olds, _ in recipes.values() for old in olds}
        outlines = {name: outline for name, outline in self.outlines.items() if name not in used}
        outlines |= {new: make(*(self.outlines[old] for old in olds)) for new, (olds, make) in recipes.items()}

        def read(name: str) -> Tensor:
            olds, make = recipes.get(name, ((name,), lambda tensor: tensor))
            return make(*(self[old] for old in olds))

        return LazyTensors(outlines, read)

    def fused(self) -> LazyTensors:
        """Query, key and value, or the halves of a gated MLP, which are apart in some families, as ours has them.

        Where no key of the whole file has a bias, those of queries and values stay apart.
        """
        keyless = not any(name.endswith("attention.key.bias") for name in self)
        found: dict[str, set[str]] = {}
        for name in self:
            found.setdefault(_apart(name) if keyless else _whole(name), set()).add(name)
        outlines, parts_of = {}, {w: _parts(w) if names != {w} else [w] for w, names in found.items()}
        for whole, parts in parts_of.items():
            if missing := [part for part in parts if part not in self]:
                raise CheckpointError(f"parts of {whole!r} are missing: {', '.join(missing)}; fetch it again")
            outlines[whole] = _joined([self.outlines[part] for part in parts])
        return LazyTensors(outlines, lambda whole: _joined([self[part] for part in parts_of[whole]]))


def _joined(parts: list[Tensor]) -> Tensor:
    if len({(part.shape, part.dtype) for part in parts}) > 1:
        raise CheckpointError("query, key and value do not have the same shape: the file is damaged; fetch it again")
    return cat(parts) if len(parts) > 1 else parts[0]


def split(tensors: Tensors, gated: bool = False) -> dict[str, Tensor]:
    """The inverse of `LazyTensors.fused`, as views; MLPs are parted only where they are `gated`."""
    parted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = _parts(name) if gated or ".mlp." not in name else [name]
        parted |= zip(parts, tensor.chunk(len(parts)) if len(parts) > 1 else [tensor], strict=True)
    return parted


_FUSED = {"attention.qkv": ("query", "key", "value"), "head.pool.key_value": ("key", "value")}
_FUSED |= {"mlp.up": ("gate", "value")}


def _whole(part: str) -> str:
    for whole, kinds in _FUSED.items():
        owner, name = whole.rsplit(".", 1)
        part = re.sub(rf"(?<=\b{owner})\.({'|'.join(kinds)})(?=\.(weight|bias)$)", f".{name}", part)
    return part


def _apart(part: str) -> str:
    """As `_whole`, but biases of queries and values by themselves."""
    return _whole(re.sub(r"(attention\.(query|value))\.bias$", r"\1_bias", part))


def _parts(whole: str) -> list[str]:
    if alone := re.search(r"attention\.(query|value)_bias$", whole):
        return [whole.replace(alone[0], alone[0].replace("_", "."))]
    for name, kinds in _FUSED.items():
        if re.search(rf"\b{name}\.(weight|bias)$", whole):
            return [whole.replace(name, f"{name.rsplit('.', 1)[0]}.{kind}") for kind in kinds]
    return [whole]


Row = tuple[str, str]
_BLOCK = {"norm1": "norm1.*", "norm2": "norm2.*", "scale1": "scale1", "scale2": "scale2"}
_BLOCK |= {part: f"attention.{part}.*" for part in ("qkv", "query", "key", "value", "out")}
_BLOCK |= {part: f"mlp.{part}.*" for part in ("up", "down", "gate")} | {"gated": "mlp.value.*"}


def block(prefix: str, **parts: str) -> list[Row]:
    """Rows for the parts of a block, by our short names: qkv="attn.qkv.*"."""
    return [(prefix + theirs, f"encoder.blocks.{{i}}.{_BLOCK[ours]}") for ours, theirs in parts.items()]


class NameMap:
    """Rows of (theirs, ours). {i} stands for a number, and .* at the end for .weight and .bias.

    Flax calls a weight kernel or scale: ("embedding/kernel*", "patches.*") stands for /kernel and /bias.
    """

    def __init__(self, *rows: Row) -> None:
        self.rows = rows
        pairs = [pair for theirs, ours in rows for pair in _weight_and_bias(theirs, ours)]
        self.ours = _translator(pairs)
        self.theirs = _translator([(ours, theirs) for theirs, ours in pairs])


def _weight_and_bias(theirs: str, ours: str) -> list[Row]:
    if not ours.endswith(".*"):
        return [(theirs, ours)]
    weight = next((word for word in ("kernel", "scale") if theirs.endswith(f"{word}*")), "weight")
    stem = theirs.removesuffix("*").removesuffix(weight)
    return [(stem + weight, ours[:-1] + "weight"), (f"{stem}bias", ours[:-1] + "bias")]


def _translator(rows: Sequence[Row]) -> Callable[[str], str]:
    """A name that no row knows is kept, and loading reports it. In 'blocks.{i}.norm1.weight' {letter} is a number."""
    patterns = [re.sub(r"\\\{(\w)\\\}", r"(?P<\1>\\d{1,6})", re.escape(old)) for old, _ in rows]
    compiled = [(re.compile(pattern), new) for pattern, (_, new) in zip(patterns, rows, strict=True)]

    def translate(name: str) -> str:
        matches = ((pattern.fullmatch(name), new) for pattern, new in compiled)
        return next((new.format(**match.groupdict()) for match, new in matches if match), name)

    return translate


WITH_LEADING_AXIS = ("class_token", "distillation_token", "registers", "positions.learned", "head.pool.probe")


def without_leading_axis(name: str, tensor: Tensor) -> Tensor:
    """Tokens and positions as other systems hold them, (1, N, width) -> (N, width); all else as it is."""
    if name not in WITH_LEADING_AXIS:
        return tensor
    if tensor.ndim != 3 or len(tensor) != 1:
        raise CheckpointError(f"the tensor for {name!r} has shape {tuple(tensor.shape)}, but should have (1, N, width)")
    return tensor[0]
