"""All studies by name: a table."""

from __future__ import annotations

from vitkit.study.studies.attention import AttentionBug, Heads, Scale
from vitkit.study.studies.parts import DepthWidth, Dropout, Pooling, Positions
from vitkit.study.studies.patches import PatchEmbed, PatchSize, Resolution
from vitkit.study.studies.priors import DataSize, Shift
from vitkit.study.table import Study

_FIRST: list[type[Study]] = [DataSize, Shift, Positions, Pooling, PatchSize, PatchEmbed]
_THEN: list[type[Study]] = [AttentionBug, Scale, Resolution, Heads, DepthWidth, Dropout]
STUDIES: dict[str, Study] = {study.name: study() for study in (*_FIRST, *_THEN)}
