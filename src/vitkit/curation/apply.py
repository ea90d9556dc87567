"""`issues.csv`, gone through by a person -> a new list of the set. The set itself is never touched.

Rows that are left in the file count; with a column `action`, only those that say `accept`. A row whose suggestion is
`drop` leaves its image out; a row of the issue `label` gives its image the suggested label. Spreadsheets save a file
with semicolons or tabs, and with a mark before the first column: both are read.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitkit.curation.catalogue import Catalogue, open_catalogue
from vitkit.curation.clean import COLUMNS, DROP, ISSUES, Cleaning, Issue
from vitkit.data.source import PackedSource
from vitkit.errors import DataError, as_text, did_you_mean
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


def read_issues(path: Path, wanted: Sequence[str] = COLUMNS) -> list[dict[str, str]]:
    """All rows of an issues.csv as text; empty where a row has no such cell."""
    try:
        with open_text(path, "utf-8-sig", newline="") as file:
            separator = next((c for c in ";\t" if c in file.readline()), ",")
            file.seek(0)
            reader = csv.DictReader(file, delimiter=separator, restval="")
            columns = reader.fieldnames or ()
            if missing := [name for name in wanted if name not in columns]:
                raise DataError(f"{path} has no column {missing[0]}; keep the header {','.join(COLUMNS)}")
            return [{name: as_text(row[name]) for name in columns} for row in reader]
    except UnicodeDecodeError as e:
        raise DataError(f"{path} is not UTF-8 text ({e}); save it as CSV in UTF-8") from e
    except (OSError, csv.Error) as e:
        raise DataError(f"{path} cannot be read ({e}); `vitkit data clean` writes it") from e


def accepted(path: Path) -> list[dict[str, str]]:
    """The rows that count, of which each says something that can be done."""
    rows = read_issues(path, ("path", "issue", "suggestion"))
    for number, row in enumerate(rows, start=2):
        row |= {name: row.get(name, "accept").strip().lower() for name in ("issue", "action")}
        where, row["suggestion"] = f"{path}, row {number}", row["suggestion"].strip()
        if row["issue"] not in ISSUES:
            raise DataError(f"{where}: no issue is called {row['issue']!r}; one of {', '.join(ISSUES)}")
        if row["action"] not in ACTIONS:
            raise DataError(f"{where}: the action {row['action']!r} must be accept or reject, or empty")
        if row["issue"] != "label" and row["suggestion"] not in (DROP, ""):
            raise DataError(f"{where}: the suggestion {row['suggestion']!r} must be {DROP}, or empty; leave it as is")
    return [row for row in rows if row["action"] == "accept" and row["path"] and row["suggestion"]]


def apply(issues: str | Path, to: str | Path, data: str | None = None, progress: Progress = SILENT) -> Applied:
    """Write the list `to` (.csv with path, label and split) of what is left of the set, with its new labels.

    data  the set; by default what `clean.json` beside the issues says
    """
    path, target = Path(issues), Path(to)
    if target.suffix.lower() != ".csv":
        raise DataError(f"--to {target} must end with .csv")
    catalogue = _catalogue(path, data, progress)
    known = {written: row for row, name in enumerate(catalogue.paths) for written in (str(csv_cell(name)), name)}
    labels: dict[int, str] = {}
    dropped: set[int] = set()
    for row in accepted(path):
        image = known.get(row["path"], known.get(os.path.abspath(row["path"])))
        if image is None:
            if row["issue"] == "junk":  # what cannot be read may be in no list
                continue
            raise DataError(f"{row['path']} is not in {catalogue.source.name}; give --data the set that was cleaned")
        if row["suggestion"] == DROP and (row["issue"] != "label" or DROP not in catalogue.classes):
            dropped.add(image)
        elif labels.setdefault(image, label := _known_class(row["suggestion"], catalogue)) != label:
            raise DataError(f"{row['path']} is to be {labels[image]!r} and {label!r}; remove one of these rows")
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
