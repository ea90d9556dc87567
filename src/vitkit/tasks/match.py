"""Which output of a model stands for which class of a set: by name, else by index, never by chance.

The rule is that of every command: a class is a name where there is such a name, else an index. Names that match
nothing are an error; `--map` says what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import nn

from vitkit.data import Source
from vitkit.errors import ConfigError, DataError
from vitkit.io import read_json
from vitkit.model.base import find_class
from vitkit.tasks.trainee import unwrapped

_LISTED = 5  # classes that an error names
_INSTEAD = "evaluate its features with --probe knn"


def matched(model: nn.Module, source: Source) -> tuple[np.ndarray | None, str]:
    """For every class of the set the model's output (None: the same order); and what is worth knowing about it."""
    inner, known = unwrapped(model), source.classes
    count, ours = inner.config.classes, _names_of(model)
    if not count:
        lacks = "the model has no classifier (classes=0), so it names no classes"
        raise ConfigError(f"{lacks}; --probe knn or --probe fewshot evaluates its features instead")
    if source.label_kind == "values":
        has = f"{source.name} has values ({', '.join(source.targets)}), and the model predicts classes"
        raise ConfigError(f"{has}; give it classes, or train with --target")
    if tuple(ours) == tuple(known):
        return None, ""
    place, note = {name: i for i, name in enumerate(ours)}, ""
    columns = [place.get(name, -1) for name in known]
    if max(columns) < 0 and all(name.isascii() and name.isdecimal() and len(name) < 9 for name in known):
        columns, note = [int(name) for name in known], f"the classes of {source.name} are taken as the model's indices"
    elif not ours:
        columns, note = (
            list(range(len(known))),
            f"the model has no class names: those of {source.name} are taken in order",
        )
    if sorted(columns) != list(range(count)):
        raise ConfigError(_differences(ours, count, source))
    return (None if columns == list(range(count)) else np.array(columns)), note


def columns_of(model: nn.Module, source: Source) -> np.ndarray | None:
    """For every class of the set, the model's output that stands for it; None when the order is the same."""
    return matched(model, source)[0]


def map_classes(model: nn.Module, source: Source, names: Mapping[str, str]) -> Source:
    """The set with its classes called as the model calls them: `names` are data -> model, by name or index."""
    if not names:
        return source
    ours, count = _names_of(model), unwrapped(model).config.classes
    indices = {theirs: find_class(name, ours, count) for theirs, name in names.items()}
    return source.renamed({theirs: ours[i] if ours else str(i) for theirs, i in indices.items()})


def parse_map(texts: Sequence[str]) -> dict[str, str]:
    """DATA=MODEL each, or a .json file with an object of such pairs."""
    names: dict[str, str] = {}
    for text in texts:
        theirs, equals, name = text.rpartition("=")
        if text.endswith(".json") and Path(text).is_file():
            names |= _read_map(Path(text))
        elif equals and theirs and name:
            names[theirs] = name
        else:
            raise ConfigError(
                f"--map {text!r} is no pair and no file; write DATA=MODEL, or name a .json with such pairs"
            )
    return names


def _read_map(path: Path) -> dict[str, str]:
    try:
        found = read_json(path)
        return {str(theirs): str(name) for theirs, name in dict(found).items()}
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise DataError(f'{path} is no map of classes ({e}); write an object: {{"zero": "0", ...}}') from e


def _names_of(model: nn.Module) -> tuple[str, ...]:
    """The model's class names; none where they are those that Hugging Face makes up: LABEL_0, LABEL_1 ..."""
    names = tuple(getattr(unwrapped(model), "class_names", None) or ())
    return () if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def _differences(ours: Sequence[str], count: int, source: Source) -> str:
    known = source.classes
    if not ours:
        has = f"the model has {count} classes and {source.name} has {len(known)}: {_some(known)}"
        return f"{has}. Give the data the model was trained for, or {_INSTEAD}"
    if len(set(ours)) < len(ours):
        twice = next(name for name in ours if ours.count(name) > 1)
        return f"the model has two classes called {twice!r}, so names cannot tell them apart; number the data's classes"
    only = {"model": [n for n in ours if n not in known], "data": [n for n in known if n not in ours]}
    said = "; ".join(f"only the {who} has {_some(names)}" for who, names in only.items() if names)
    other = f"the model's {len(ours)} classes are not the {len(known)} of {source.name}: {said}"
    return f"{other}. Say which is which with --map DATA=MODEL, rename the data's classes, or {_INSTEAD}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
