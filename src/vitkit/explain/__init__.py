"""What a Vision Transformer has learned: arrays first, pictures apart.

Every figure is a pure function from a model (and pictures) to arrays, in the module of its name;
`figures` draws them, `report` puts them on one page, `build_report` does all of it:

    from vitkit.explain import attention_distance, build_report

Names are looked up when they are first used. Nothing here imports matplotlib until something is drawn.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "patch_filters": "filters",
    "position_similarity": "positions",
    "position_offsets": "positions",
    "row_column_score": "positions",
    "attention_distance": "distance",
    "mean_distance": "distance",
    "entropy": "distance",
    "uniform_distance": "distance",
    "attention_weights": "inside",
    "output_attention": "attention",
    "rollout": "attention",
    "class_relevance": "relevance",
    "query_attention": "query",
    "token_states": "tokens",
    "token_similarity": "tokens",
    "token_colours": "tokens",
    "occlusion_map": "occlusion",
    "faithfulness_curves": "faithfulness",
    "read_log": "training",
    "judge": "training",
    "load_pictures": "pictures",
    "build_report": "build",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"vitkit.explain.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'vitkit.explain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
