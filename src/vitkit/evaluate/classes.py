"""Which output of a model stands for which class of a set: by name where both have names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vitkit.data import Source
from vitkit.errors import ConfigError

_LISTED = 5


def unwrapped(model: Any) -> Any:
    """The model itself, inside what DistributedDataParallel wraps around it."""
    return getattr(model, "module", model)


def columns_of(model: Any, source: Source) -> np.ndarray | None:
    """For every class of the set, the model's output that stands for it; None when the order is the same."""
    model = unwrapped(model)
    count = model.config.classes
    if not count:
        raise ConfigError(
            "the model has no classifier (classes=0), so it names no classes; "
            "--probe knn or --probe fewshot judges its representation instead"
        )
    ours, theirs = _real_names(getattr(model, "class_names", None)), _real_names(source.classes)
    if ours is None or theirs is None:
        if count != len(source.classes):
            raise ConfigError(
                f"the model has {count} classes and {source.name} has {len(source.classes)}: {_some(source.classes)}. "
                f"Give the data the model was trained for, or judge its representation with --probe knn"
            )
        return None
    if ours == theirs:
        return None
    if set(ours) != set(theirs):
        raise ConfigError(_difference(ours, theirs, source.name))
    place = {name: i for i, name in enumerate(ours)}
    return np.array([place[name] for name in theirs])


def _real_names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """None for names that only count: 0, 1, 2 or LABEL_0, LABEL_1."""
    if names is None or all(name in (str(i), f"LABEL_{i}") for i, name in enumerate(names)):
        return None
    return tuple(names)


def _difference(ours: Sequence[str], theirs: Sequence[str], name: str) -> str:
    only_model = [n for n in ours if n not in set(theirs)]
    only_data = [n for n in theirs if n not in set(ours)]
    told = []
    if only_model:
        told.append(f"only the model has {_some(only_model)}")
    if only_data:
        told.append(f"only the data has {_some(only_data)}")
    return (
        f"the model's {len(ours)} classes are not the {len(theirs)} of {name}: {'; '.join(told)}. "
        f"Rename the data's classes to the model's, or judge its representation with --probe knn"
    )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
