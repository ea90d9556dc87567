"""Names that nothing translates -> patterns with {i} for the number of a block, and which of our names they may be.

A tensor's shape tells most of what it is once the width D is known, and D is the length that most vectors have.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping

Shape = tuple[int, ...]
BLOCK = "encoder.blocks.{i}."
# Our names and their shapes: "D" the width, "3D" three times that, "*" any length.
ROLES: dict[str, tuple[str, ...]] = {
    "patches.weight": ("D", "*"),
    "patches.bias": ("D",),
    "patches.norm_before.*": ("*",),
    "patches.norm_after.*": ("D",),
    "class_token": ("D",),
    "distillation_token": ("D",),
    "registers": ("*", "D"),
    "positions.learned": ("*", "D"),
    "pre_norm.*": ("D",),
    f"{BLOCK}norm1.*": ("D",),
    f"{BLOCK}attention.qkv.weight": ("3D", "D"),
    f"{BLOCK}attention.qkv.bias": ("3D",),
    f"{BLOCK}attention.query.weight": ("D", "D"),
    f"{BLOCK}attention.key.weight": ("D", "D"),
    f"{BLOCK}attention.value.weight": ("D", "D"),
    f"{BLOCK}attention.query.bias": ("D",),
    f"{BLOCK}attention.key.bias": ("D",),
    f"{BLOCK}attention.value.bias": ("D",),
    f"{BLOCK}attention.query_norm.*": ("*",),
    f"{BLOCK}attention.key_norm.*": ("*",),
    f"{BLOCK}attention.norm.*": ("D",),
    f"{BLOCK}attention.out.weight": ("D", "D"),
    f"{BLOCK}attention.out.bias": ("D",),
    f"{BLOCK}scale1": ("D",),
    f"{BLOCK}norm2.*": ("D",),
    f"{BLOCK}mlp.up.weight": ("*", "D"),
    f"{BLOCK}mlp.up.bias": ("*",),
    f"{BLOCK}mlp.norm.*": ("*",),
    f"{BLOCK}mlp.down.weight": ("D", "*"),
    f"{BLOCK}mlp.down.bias": ("D",),
    f"{BLOCK}scale2": ("D",),
    "norm.*": ("D",),
    "head.norm.*": ("D",),
    "head.pre_logits.weight": ("*", "D"),
    "head.pre_logits.bias": ("*",),
    "head.projection.weight": ("*", "D"),
    "head.classifier.weight": ("*", "D"),
    "head.classifier.bias": ("*",),
    "head.distilled.weight": ("*", "D"),
    "head.distilled.bias": ("*",),
}
RARE = re.compile(r"distill|registers|pre_norm|pre_logits|projection|scale\d|_norm\.|attention\.norm|mlp\.norm|norm_")
ENDS = (".weight", ".bias")


def our_names() -> list[str]:
    """Every name that a map may give, with .* for .weight and .bias."""
    return [*ROLES, *dict.fromkeys(re.sub(r"\.(weight|bias)$", ".*", name) for name in ROLES)]


def width_of(shapes: Iterable[Shape]) -> int:
    """The length that most vectors have: of every norm and of most biases."""
    lengths = Counter(shape[0] for shape in shapes if len(shape) == 1)
    return lengths.most_common(1)[0][0] if lengths else 0


def patterns(shapes: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Names -> groups that differ in one number alone and have one shape: the pattern with {i}, and its names."""
    groups: dict[tuple[str, Shape], list[str]] = {}
    for name, shape in shapes.items():
        for number in re.finditer(r"(?<![^./_])\d+(?![^./_])", name):
            pattern = f"{name[: number.start()]}{{i}}{name[number.end() :]}"
            groups.setdefault((pattern, shape), []).append(name)
    chosen: dict[str, list[str]] = {}
    left = dict.fromkeys(shapes)
    for (pattern, _), names in sorted(groups.items(), key=lambda group: -len(group[1])):
        if len(names) > 1 and all(name in left for name in names):
            chosen[pattern] = names
            for name in names:
                del left[name]
    return chosen | {name: [name] for name in left}


def candidates(pattern: str, shape: Shape, width: int, taken: Iterable[str] = ()) -> list[str]:
    """Which of our names a tensor of this shape may be, likeliest first: by shape, then by how alike they read."""
    ends = next((end for end in ENDS if pattern.endswith(end)), "")
    known, found = set(taken), []
    for role, wanted in ROLES.items():
        ours = role[:-2] + (ends or ".weight") if role.endswith(".*") else role
        score = _fit(wanted, shape, width)
        in_block = role.startswith(BLOCK) == ("{i}" in pattern)
        other_end = bool(ends) and ours.endswith(ENDS) and not ours.endswith(ends)
        if score and not other_end and ours not in known and (in_block or "{i}" not in pattern):
            alike = difflib.SequenceMatcher(None, pattern, ours).ratio()
            same_end = bool(ends) == ours.endswith(ENDS)
            found.append((score + in_block, same_end, not RARE.search(ours), alike, ours))
    return [ours for *_, ours in sorted(found, reverse=True)]


def _fit(wanted: tuple[str, ...], shape: Shape, width: int) -> int:
    """0: it cannot be; else the more the better. A leading axis of 1 and the axes of a kernel do not count."""
    while len(shape) > len(wanted) and shape[0] == 1:
        shape = shape[1:]
    if len(shape) == 4 and len(wanted) == 2:
        shape = (shape[0], shape[1] * shape[2] * shape[3])
    sizes, pairs = {"D": width, "3D": 3 * width}, list(zip(wanted, shape, strict=False))
    if len(shape) != len(wanted) or any(n != sizes.get(word, n) or (n == 1 and shape[1:]) for word, n in pairs):
        return 0
    return 1 + sum(2 if word in sizes else n != width for word, n in pairs)
