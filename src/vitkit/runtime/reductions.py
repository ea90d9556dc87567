"""What computes less of a model: fewer tokens from block to block, or smaller images. What `tune` tries of it.

There are more ways to merge than anybody wants to measure in every runtime. For each number of tokens the methods
compete first, on few images and in PyTorch alone: after each round the worse half is out, and the rest sees twice as
many (successive halving).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

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
    model: VisionModel, images: Images, expected: Tensor, late: Callable[[], bool] = lambda: False
) -> list[Reduction]:
    """As `plain_reductions`, with the method that changes the outputs least for each number of tokens and schedule.

    expected  the outputs of the model itself
    late      whether no time is left to compare: then the first of the methods is taken
    """
    methods = [method for method in METHODS if method != "prune" or getattr(model.config, "class_token", False)]
    found: list[Reduction] = []
    for per_block in merges(model):
        for schedule in _SCHEDULES:
            specs = [MergePlan(per_block, method, schedule).spec for method in methods]
            found.append(Reduction(specs[0] if late() else halved(model, specs, images, expected)))
    return [Reduction(), *dict.fromkeys(found), *_smaller(model)]


def halved(model: VisionModel, specs: list[int | str], images: Images, expected: Tensor) -> int | str:
    """The one of several that changes the outputs least."""
    count = _FIRST
    while len(specs) > 1:
        part = replace(images, pixels=images.pixels[:count], labels=None)

        def change(spec: int | str, part: Images = part) -> float:
            outputs = outputs_of(build(model, Choice(merge=spec)), part, model.config, 8)
            return compare_outputs(model, expected[: len(part)], outputs, part, exact=False).spread

        specs = sorted(specs, key=change)[: (len(specs) + 1) // 2 if count < len(images) else 1]
        count *= 2
    return specs[0]
