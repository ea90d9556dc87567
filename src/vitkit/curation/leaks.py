"""What an index knows about images that are evaluated and in train too: for the start of a training, and `evaluate`.

After `vitkit data clean` it knows the copies that were compared closely; before, those whose features are the same to
three digits, which costs a matrix product.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitkit.curation.duplicates import Group
from vitkit.curation.index import Index, default_place, open_index
from vitkit.curation.search import nearest
from vitkit.errors import DataError, shell_word
from vitkit.io import read_json, write_json

_SAME = 0.999  # cosine of features
_CHEAP = 2e9  # pairs that are compared before a training, at most


def keep_leaks(index: Index, groups: list[Group]) -> None:
    """Into the index, for `train` and `evaluate`: the images outside train that show what train shows."""
    leaked = [
        index.paths[row]
        for group in groups
        if group.leaks and any(index.splits[r] == "train" for r in group.rows)
        for row in group.rows
        if index.splits[row] != "train"
    ]
    write_json(index.path / "leaks.json", {"digest": index.about["digest"], "leaked": sorted(leaked)})


def leaked(index: Path) -> list[str] | None:
    """The evaluated images that are in train too, as `clean` found; None where it has not looked at this index."""
    try:
        found, about = (read_json(index / f) for f in ("leaks.json", "about.json"))
        return list(map(str, found["leaked"])) if found["digest"] == about["digest"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def leak_warning(data: str) -> str:
    """For the start of a training: what the index of a set knows; "" when nothing."""
    place = default_place(data)
    found, shows = leaked(place), "show what train shows"
    if found is None:
        found, shows = _same_features(place), "have the features of an image of train"
    if not found:
        return ""
    many = f"{len(found):,} images that are evaluated {shows}, such as {found[0]}"
    command = f"vitkit data clean {shell_word(data)} --index {shell_word(place)}"
    return f"warning: {many}: accuracy will look too high. `{command}` lists them"


def _same_features(place: Path) -> list[str]:
    """[] also where there is no index, or more to compare than is cheap."""
    try:
        index = open_index(place)
    except DataError:
        return []
    trained = np.array(index.splits) == "train"
    known, asked = np.flatnonzero(trained), np.flatnonzero(~trained)
    if not len(known) or not len(asked) or len(known) * len(asked) > _CHEAP:
        return []
    _, scores = nearest(np.asarray(index.features[known]), np.asarray(index.features[asked]), 1)
    return [index.paths[row] for row in asked[scores[:, 0] > _SAME]]
