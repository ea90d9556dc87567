"""The ResNet in front of a hybrid, recognised by the shapes of its tensors under our names."""

from __future__ import annotations

import re
from typing import Literal

from vitkit.checkpoints.layout import LazyTensors, need
from vitkit.errors import CheckpointError, ConfigError
from vitkit.model.config import StemConfig

_UNIT = re.compile(r"stem\.stages\.(\d+)\.(\d+)\.conv1\.weight")


def stem_from_shapes(tensors: LazyTensors, numerics: Literal["official", "timm"]) -> StemConfig | None:
    """None when there is no stem."""
    if "stem.root.weight" not in tensors:
        return None
    width, _, kernel, _ = need(tensors, "stem.root.weight", 4)
    units: dict[int, int] = {}
    for name in tensors:
        if match := _UNIT.fullmatch(name):
            stage, unit = int(match[1]), int(match[2])
            units[stage] = max(units.get(stage, 0), unit + 1)
    if sorted(units) != list(range(len(units))) or len(units) > 8 or sum(units.values()) > len(tensors):
        raise CheckpointError(f"the stages of the ResNet stem are numbered {sorted(units)}: some are missing")
    try:
        root: Literal["imagenet", "small"] = "imagenet" if kernel == 7 else "small"
        return StemConfig(tuple(units[i] for i in range(len(units))), width, root, numerics)
    except ConfigError as e:
        raise CheckpointError(f"the ResNet stem cannot be built: {e}") from e
