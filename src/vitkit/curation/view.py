"""What a page shows of a data set: a table of numbers with a column for each thing that is known of every image, names,
and the issues that were found. The server and the file for sharing are made from the same `View`.

Shapes: N images, K neighbours, C classes.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitkit.curation.apply import read_issues
from vitkit.curation.clean import COLUMNS as ISSUE_COLUMNS
from vitkit.curation.index import Index, open_index
from vitkit.curation.map import COLUMNS, TILE, Map, build_map
from vitkit.curation.search import nearest
from vitkit.data import Source
from vitkit.io import csv_cell
from vitkit.progress import SILENT, Progress


class Neighbour(NamedTuple):
    row: int
    similarity: float


@dataclass(frozen=True, eq=False)
class View:
    index: Index
    map: Map
    name: str
    issues: tuple[tuple[str, ...], ...] = ()  # rows of issues.csv

    @cached_property
    def rows_by_path(self) -> dict[str, int]:
        """Also as a table writes a path that looks like a formula."""
        return {written: row for row, path in enumerate(self.index.paths) for written in (str(csv_cell(path)), path)}

    def about(self) -> dict[str, object]:
        index, made = self.index, self.map
        folder = _common_folder(min(index.paths), max(index.paths))
        return {
            "name": self.name,
            "count": len(index),
            "digest": index.about["digest"][:16],
            "model": index.about["model"],
            "method": made.method,
            "prefix": len(folder.encode("utf-16-le")) // 2,  # characters that all names begin with, as a page counts
            "columns": list(self.columns),
            "values": self.values,
            "tile": TILE,
            "sheet_columns": COLUMNS,
            "sheets": made.sheets,
        }

    @cached_property
    def kinds(self) -> list[str]:
        """Of the issues, in the order in which they come."""
        return list(dict.fromkeys(row[1] for row in self.issues))

    @property
    def values(self) -> dict[str, list[str]]:
        """What the numbers of a column mean; -1 is none of them."""
        classes = list(self.index.classes)
        splits = list(dict.fromkeys(self.index.splits))
        return {"label": classes, "split": splits, "prediction": classes, "issue": self.kinds}

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """(N,) each."""
        index, made = self.index, self.map
        splits = {split: n for n, split in enumerate(self.values["split"])}
        found = {"x": made.places[:, 0], "y": made.places[:, 1], "slot": made.slots, "label": index.labels}
        found["split"] = np.array([splits[split] for split in index.splits])
        if len(index.classes) > 1:
            found["prediction"], found["loss"] = vote(index.labels[made.neighbours], index.labels, len(index.classes))
        if self.issues:
            found["issue"] = np.full(len(index), -1)
            for row, (_, kind, *_) in zip(reversed(self.issue_rows), reversed(self.issues), strict=True):
                found["issue"][row] = self.kinds.index(kind) if row >= 0 else found["issue"][row]
        return found

    def points(self) -> np.ndarray:
        """Columns x N float32: numbers up to 16 million are exact in it."""
        return np.stack([column.astype(np.float32) for column in self.columns.values()])

    def points_file(self) -> bytes:
        out = io.BytesIO()
        np.save(out, self.points().astype("<f4"), allow_pickle=False)
        return out.getvalue()

    @cached_property
    def issue_rows(self) -> list[int]:
        """The image that each issue is about; -1 where it is about none, or one that the index has not."""
        return [self.rows_by_path.get(row[0], -1) for row in self.issues]

    def issue_table(self) -> dict[str, object]:
        rows = [[at, *row] for at, row in zip(self.issue_rows, self.issues, strict=True)]
        return {"columns": list(ISSUE_COLUMNS), "rows": rows}

    def nearest_to(self, row: int, top: int) -> list[Neighbour]:
        """Exact, by the features."""
        own = np.asarray(self.index.features[row : row + 1])
        return [found for found in self.search(own, top + 1) if found.row != row][:top]

    def search(self, features: np.ndarray, top: int) -> list[Neighbour]:
        """1 D of any length -> the most alike images."""
        unit = features / max(float(np.linalg.norm(features)), 1e-12)
        rows, alike = nearest(self.index.features, unit, top)
        return [Neighbour(int(row), round(float(a), 4)) for row, a in zip(rows[0], alike[0], strict=True)]


def _common_folder(first: str, last: str) -> str:
    """Of all names, given the first and the last in order."""
    common = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return common[: common.rfind("/") + 1]


def open_view(
    index: Path, data: str | None = None, issues: Path | None = None, progress: Progress = SILENT
) -> tuple[View, Source]:
    """An index with its map, made or finished if need be, and its images; an error where the set is another now."""
    opened = open_index(index)
    catalogue = opened.catalogue(progress, data)
    rows = tuple(tuple(row[name] for name in ISSUE_COLUMNS) for row in read_issues(issues)) if issues else ()
    made = build_map(opened, catalogue.source, progress)
    view = View(opened, made, Path(str(data or opened.about["data"])).name, rows)
    if lost := sum(row < 0 and issue[0] != "" for row, issue in zip(view.issue_rows, rows, strict=True)):
        progress.note(f"note: {lost:,} rows of {issues} name images that are not in the index: on no map, but listed")
    return view, catalogue.source


def vote(of_neighbours: np.ndarray, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """What the K nearest others say: N K labels -> the class of most (ties: the nearer), and -log of the label's share.

    The label's share is (votes + 1/C) / (votes of all + 1). Images without a label have no vote; their loss is 0.
    """
    prediction, loss = np.full(len(labels), -1), np.zeros(len(labels), np.float32)
    for row, near in enumerate(of_neighbours):
        known = near[near >= 0]
        if len(known):
            votes = np.bincount(known, minlength=classes)
            prediction[row] = next(c for c in known if votes[c] == votes.max())
            if labels[row] >= 0:
                loss[row] = -np.log((votes[labels[row]] + 1 / classes) / (len(known) + 1))
    return prediction, loss
