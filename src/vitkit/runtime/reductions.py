"""What computes less of a model: fewer tokens from block to block, smaller images, and early exit of easy ones.

There are more ways to merge than anybody wants to measure in every runtime. For each number of tokens the methods
compete first, on few images and in PyTorch alone: after each round the worse half is out, and the rest sees twice as
many (successive halving). One of them has a number for each block, fitted to what merging there costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vitkit.model.base import VisionModel
from vitkit.model.config import ViTConfig
from vitkit.model.merge_plan import METHODS, MergePlan
from vitkit.runtime.base import Choice, build, grid_of
from vitkit.runtime.verify import Images, compare_outputs, outputs_of

SCALES = (1.0, 0.75, 0.5)  # of the sides of an image
_SHARES = (0.25, 0.5, 0.8)  # of all patches, that merging takes away in all
_SCHEDULES = ("constant", "late")
_FIRST = 16  # images that all methods see
_MOST = 2.5  # times the patches of an average block, at most, merge in one
_FEWEST_PATCHES = 4  # of a side, for smaller images


class Reduction(NamedTuple):
    merge: int | str = 0
    scale: float = 1.0


def merges(model: VisionModel) -> list[int]:
    """Patches per block that leave a third of them or more at the end, for models that can merge."""
    config = model.config
    if not model.mergeable or not isinstance(config, ViTConfig):
        return []
    shares = (config.grid[0] * config.grid[1] * part / config.depth for part in _SHARES)
    return sorted({round(share) for share in shares if round(share) >= 1})


def plain_reductions(model: VisionModel) -> list[Reduction]:
    """Nothing, token merging as it was first published, smaller images: from gentle to strong."""
    return [Reduction(), *map(Reduction, merges(model)), *_smaller(model)]


def _smaller(model: VisionModel) -> list[Reduction]:
    large = isinstance(model.config, ViTConfig) and min(grid_of(model.config)) >= _FEWEST_PATCHES
    return [Reduction(scale=scale) for scale in SCALES[1:]] if large else []


def reductions(
    model: VisionModel, images: Images, expected: Tensor, late: Callable[[int], bool] = lambda _: False
) -> list[Reduction]:
    """As `plain_reductions`, with the method that changes the outputs least for each number of tokens and schedule.

    expected  the outputs of the model itself
    late      whether no time is left to compute so many images: then the first of the methods is taken
    """
    methods = [method for method in METHODS if method != "prune" or getattr(model.config, "class_token", False)]
    found: list[Reduction] = []
    counts = merges(model)
    several = len(model.blocks) > 1  # nothing comes after the last
    few = min(_FIRST, len(images))
    known = bool(counts) and several and not late(few * len(model.blocks))
    harm = harms(model, counts[0], images, expected) if known else []
    for per_block in counts:
        for schedule in _SCHEDULES:
            specs = [MergePlan(per_block, method, schedule).spec for method in methods]
            if harm and schedule == "constant":
                specs.append(fitted(per_block, harm))
            no_time = late(2 * few * len(specs))  # half of them see twice as many, and so on
            found.append(Reduction(specs[0] if no_time else halved(model, specs, images, expected)))
    return [Reduction(), *dict.fromkeys(found), *_smaller(model)]


def halved(model: VisionModel, specs: list[int | str], images: Images, expected: Tensor) -> int | str:
    """The one of several that changes the outputs least."""
    count = _FIRST
    while len(specs) > 1:
        change = {spec: _change(model, spec, images, expected, count) for spec in specs}
        specs = sorted(specs, key=lambda spec: change[spec])[: (len(specs) + 1) // 2 if count < len(images) else 1]
        count *= 2
    return specs[0]


def _change(model: VisionModel, spec: int | str, images: Images, expected: Tensor, count: int) -> float:
    """Of the outputs for the first so many images."""
    part = replace(images[:count], labels=None)
    outputs = outputs_of(build(model, Choice(merge=spec)), part, model.config, 8)
    return compare_outputs(model, expected[: len(part)], outputs, part, exact=False).spread


def harms(model: VisionModel, per_block: int, images: Images, expected: Tensor) -> list[float]:
    """How much the outputs change when so many patches merge in one block alone: of each block."""
    depth = len(model.blocks)
    alone = [tuple(per_block * (i == j) for j in range(depth)) for i in range(depth)]
    return [_change(model, MergePlan(per_block, by_block=one).spec, images, expected, _FIRST) for one in alone]


def fitted(per_block: int, harm: list[float]) -> int | str:
    """As much work saved as by so many patches in every block, where it changes the outputs least.

    A patch that is gone saves its part of every later block. Changes grow with the number of patches and add up like
    independent errors: of the sum of (number x harm)^2 the smallest, at a given sum of number x saved, has numbers
    that are as saved / harm^2. For large numbers that is too good to be true, so there is a limit for each block.
    """
    saved = range(len(harm) - 1, -1, -1)  # later blocks
    wanted = [s / max(h, 0.01 * max(harm), 1e-6) ** 2 for s, h in zip(saved, harm, strict=True)]

    def counts(share: float) -> tuple[int, ...]:
        return tuple(min(round(share * w), round(_MOST * per_block)) for w in wanted)

    low, high = 0.0, _MOST * per_block / min(w for w in wanted if w)
    for _ in range(60):  # by halves
        middle = (low + high) / 2
        enough = sum(s * n for s, n in zip(saved, counts(middle), strict=True)) >= per_block * sum(saved)
        low, high = (low, middle) if enough else (middle, high)
    return MergePlan(per_block, by_block=counts(high)).spec


def sure_enough(first: Tensor, second: Tensor, truth: Tensor, max_drop: float) -> float | None:
    """The lowest probability from which a first answer may stand, or None where none may.

    first, second  outputs of both looks, B C
    max_drop       share of all images that may be lost to a second look at everything, however many leave early
    """
    probability, answer = first.softmax(dim=-1).max(dim=-1)
    order = probability.argsort(descending=True, stable=True)
    lost = (second.argmax(dim=-1) == truth).long() - (answer == truth).long()  # 1, 0, or -1 where it is better
    drop = lost[order].cumsum(0) / len(order)  # when so many leave
    leave = int((drop <= max_drop + 1e-9).long().cumprod(0).sum())
    after = probability[order][leave] if leave < len(order) else torch.zeros(())
    sure = float(torch.ceil(after * 1000 + 0.5)) / 1000  # above that of the next, in digits that a name can show
    return sure if leave and sure <= 1 else None
