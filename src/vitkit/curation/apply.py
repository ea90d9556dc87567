"""`issues.csv`, gone through by a person -> a new list of the set. The set itself is never touched.

Rows that are left in the file count; with a column `action`, only those that say `accept`. A row whose suggestion is
`drop` leaves its image out; a row of the issue `label` gives its image the suggested label.
"""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path

from vitkit.curation.catalogue import Catalogue, open_catalogue
from vitkit.curation.clean import COLUMNS, DROP, ISSUES, Cleaning, Issue
from vitkit.data.source import PackedSource
from vitkit.errors import DataError, did_you_mean
from vitkit.io import csv_cell, open_text, read_json, write_json, write_text
from vitkit.progress import SILENT, Progress

ACTIONS = ("accept", "reject", "")


@dataclass(frozen=True)
class Applied:
    kept: int
    dropped: int
    relabelled: int


def write_issues(path: Path, issues: list[Issue]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([csv_cell(cell) for cell in issue.row()] for issue in issues)
    write_text(path, text.getvalue())


def write_cleaning(folder: Path, found: Cleaning, classes_from: str) -> None:
    """issues.csv, and clean.json that says whose they are."""
    write_issues(folder / "issues.csv", found.issues)
    about = {"data": found.data, "index": found.index, "images": found.images, "classes_from": classes_from}
    write_json(folder / "clean.json", {**about, "counts": found.counts(), "notes": found.notes})


def read_issues(path: Path) -> list[dict[str, str]]:
    """The rows that count."""
    try:
        with open_text(path, "utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as e:
        raise DataError(f"{path} cannot be read ({e}); `vitkit data clean` writes it") from e
    columns = list(rows[0]) if rows else list(COLUMNS)
    if missing := [c for c in ("path", "issue", "suggestion") if c not in columns]:
        raise DataError(f"{path} has no column {missing[0]}; keep the header {','.join(COLUMNS)}")
    for number, row in enumerate(rows, start=2):
        if row["issue"] not in ISSUES:
            raise DataError(f"{path}, row {number}: no issue is called {row['issue']!r}; one of {', '.join(ISSUES)}")
        if (action := (row.get("action") or "").strip()) not in ACTIONS:
            raise DataError(f"{path}, row {number}: the action {action!r} must be accept or reject, or empty")
    return [row for row in rows if "action" not in row or (row["action"] or "").strip() == "accept"]


def apply(issues: str | Path, to: str | Path, data: str | None = None, progress: Progress = SILENT) -> Applied:
    """Write the list `to` (.csv with path, label and split) of what is left of the set, with its new labels.

    data  the set; by default what `clean.json` beside the issues says
    """
    path, target = Path(issues), Path(to)
    if target.suffix.lower() != ".csv":
        raise DataError(f"--to {target} must end with .csv")
    catalogue = _catalogue(path, data, progress)
    known = {as_written: row for row, name in enumerate(catalogue.paths) for as_written in (csv_cell(name), name)}
    labels: dict[int, str] = {}
    dropped: set[int] = set()
    for row in read_issues(path):
        if not row["path"] or not row["suggestion"]:
            continue
        if row["path"] not in known and row["issue"] != "junk":
            raise DataError(f"{row['path']} is not in {catalogue.source.name}; give --data the set that was cleaned")
        if row["suggestion"] == DROP and row["issue"] != "label":
            dropped |= {known[row["path"]]} if row["path"] in known else set()
        elif row["issue"] == "label":
            labels[known[row["path"]]] = _known_class(row["suggestion"], catalogue)
    labels = {row: label for row, label in labels.items() if row not in dropped}
    _write(target, catalogue, labels, dropped)
    return Applied(len(catalogue) - len(dropped), len(dropped), len(labels))


def _known_class(name: str, catalogue: Catalogue) -> str:
    known = {as_written: given for given in catalogue.classes for as_written in (csv_cell(given), given)}
    if name not in known:
        hint = did_you_mean(name, catalogue.classes)
        raise DataError(
            f"{catalogue.source.name} has no class {name!r}.{hint} Correct the suggestion, or remove the row"
        )
    return known[name]


def _catalogue(issues: Path, data: str | None, progress: Progress) -> Catalogue:
    classes_from: str | int = "auto"
    if data is None:
        try:
            about = read_json(issues.parent / "clean.json")
            data, classes_from = about["data"], about.get("classes_from", "auto")
            if not isinstance(data, str) or not isinstance(classes_from, str | int):
                raise ValueError("it holds something else")
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise DataError(f"nothing says which set {issues} is about; add --data DATA") from e
    return open_catalogue(data, progress, classes_from)


def _write(target: Path, catalogue: Catalogue, labels: dict[int, str], dropped: set[int]) -> None:
    source = catalogue.source
    if source.pixels is not None or isinstance(source, PackedSource):
        raise DataError(f"the images of {source.name} are no files that a list could name; write them as files first")
    if source.label_kind == "values":
        raise DataError(f"{source.name} has values, not classes; leave the rows out of its own list")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", "labels" if source.multi_label else "label", "split"])
    base = target.absolute().parent
    for row in range(len(source)):
        if row not in dropped:
            name = os.path.relpath(os.path.abspath(source.names[row]), base)
            name = name if csv_cell(name) == name else os.path.join(".", name)  # no formula for a spreadsheet
            split = catalogue.splits[row] if catalogue.splits[row] != "all" else ""
            writer.writerow([name, labels.get(row, source.label_name(row)), split])
    write_text(target, text.getvalue())
