"""All studies by name: a table."""

from __future__ import annotations

from vitkit.study.studies.attention import HEADS
from vitkit.study.studies.embedding import PATCH_EMBED
from vitkit.study.studies.mistakes import ATTENTION_BUG, SCALE
from vitkit.study.studies.parts import DEPTH_WIDTH, DROPOUT, PATCH_SIZE, POOLING, POSITIONS
from vitkit.study.studies.priors import DATA_SIZE, SHIFT
from vitkit.study.studies.transfer import RESOLUTION
from vitkit.study.table import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        *(DATA_SIZE, SHIFT, POSITIONS, POOLING, PATCH_SIZE, PATCH_EMBED),
        *(ATTENTION_BUG, SCALE, RESOLUTION, HEADS, DEPTH_WIDTH, DROPOUT),
    )
}
