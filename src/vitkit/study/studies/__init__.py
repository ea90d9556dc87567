"""All studies by name: a table."""

from __future__ import annotations

from vitkit.study.studies.attention import AttentionBug, AttentionDistance, Heads, Scale
from vitkit.study.studies.batches import Accumulation
from vitkit.study.studies.parts import DepthWidth, Dropout, Pooling, Positions
from vitkit.study.studies.patches import PatchEmbed, PatchSize, Resolution
from vitkit.study.studies.priors import DataSize, Scaling, Shift
from vitkit.study.studies.scores import HowManyHeads, WhySqrt
from vitkit.study.studies.tokens import AddOrConcatenate, HeadType, PositionsByPatchSize, Registers, WhyClassToken
from vitkit.study.studies.transfer import AugmentationVsData, SelfSupervision, Transfer
from vitkit.study.table import Study

_DATA: list[type[Study]] = [DataSize, Scaling, Shift, Transfer, SelfSupervision, AugmentationVsData]
_TOKENS: list[type[Study]] = [Positions, PositionsByPatchSize, AddOrConcatenate, Pooling, HeadType, WhyClassToken]
_PATCHES: list[type[Study]] = [PatchSize, PatchEmbed, Resolution, Registers]
_ATTENTION: list[type[Study]] = [AttentionBug, Scale, WhySqrt, HowManyHeads, Heads, AttentionDistance]
_REST: list[type[Study]] = [DepthWidth, Dropout, Accumulation]
STUDIES: dict[str, Study] = {s.name: s() for s in (*_DATA, *_TOKENS, *_PATCHES, *_ATTENTION, *_REST)}
