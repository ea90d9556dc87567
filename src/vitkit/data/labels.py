"""Labels as they are written -> numbers: classes, several labels per image, or values to be predicted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from vitkit.errors import DataError, as_text, did_you_mean
from vitkit.io import parse_json
from vitkit.storage import RemoteFolder, beside

_LABEL_COLUMNS = ("label", "labels", "class", "classes", "target", "category")
UNLABELLED = ("",)  # the classes of images that nobody labelled: one without a name
_WHOLE = re.compile(r"-?\d{1,18}")
Column = Callable[[str], Sequence[object]]  # the name of a column -> its cells
Encode = Callable[[str, Sequence[object]], tuple[list[str], np.ndarray]]  # a column of labels -> classes, numbers


def read_labels(
    path: Path,
    columns: Sequence[str],
    column: Column,
    wanted: Sequence[str],
    encode: Encode,
    without: list[str] | None = None,
) -> tuple[list[str], tuple[str, ...], np.ndarray]:
    """Names of classes, names of values, and the labels of a table; one of the names is empty.

    Where images alone are enough, labels that cannot be used are none, and `without` is told why.
    """
    try:
        return _read_labels(path, columns, column, wanted, encode)
    except DataError as e:
        if without is None or wanted:
            raise
        without.append(f"read without labels: {e}")
        return [*UNLABELLED], (), np.zeros(len(column(columns[0])), np.int64)


def _read_labels(
    path: Path, columns: Sequence[str], column: Column, wanted: Sequence[str], encode: Encode
) -> tuple[list[str], tuple[str, ...], np.ndarray]:
    names = _value_columns(path, columns, column, wanted)
    if not names:
        label = find_column(path, columns, _LABEL_COLUMNS, "labels")
        classes, labels = encode(label, column(label))
        return classes, (), labels
    values = []
    for name in names:
        numbers = [_number(cell) for cell in column(name)]
        if None in numbers:
            row = numbers.index(None)
            raise DataError(
                f"{path}, row {row + 2}: the column {name!r} must hold a finite number, not {column(name)[row]!r}; "
                f"correct it or leave the row out"
            )
        values.append(np.array(numbers, dtype=np.float32))
    return [], names, np.stack(values, axis=1)


def find_column(path: Path, columns: Sequence[str], known: Sequence[str], what: str) -> str:
    """The first known column, ignoring case."""
    found = _known_column(columns, known)
    if found is None:
        have = ", ".join(map(str, columns))
        raise DataError(f"{path} has no column of {what}: it has {have}; name one {known[0]!r}")
    return found


def _known_column(columns: Sequence[str], known: Sequence[str]) -> str | None:
    by_name = {c.strip().lower(): c for c in columns if c is not None}
    return next((by_name[name] for name in known if name in by_name), None)


def _value_columns(path: Path, columns: Sequence[str], column: Column, wanted: Sequence[str]) -> tuple[str, ...]:
    """The columns of numbers that are to be predicted; none when the set is about classes.

    Without `wanted` these are columns called target_..., value, or target if it holds fractions.
    """
    for name in wanted:
        if name not in columns:
            hint = did_you_mean(name, columns)
            raise DataError(f"{path} has no column {name!r}.{hint} It has {', '.join(map(str, columns))}")
    if wanted:
        return tuple(wanted)
    label = _known_column(columns, _LABEL_COLUMNS)
    if label is not None:
        cells = column(label) if label.strip().lower() == "target" else ()
        numbers = [number for number in map(_number, cells) if number is not None]
        fractions = any(not number.is_integer() for number in numbers) and 2 * len(numbers) > len(cells)
        return (label,) if fractions else ()
    several = tuple(c for c in columns if str(c).strip().lower().startswith("target_"))
    one = _known_column(columns, ("value",))
    return several or ((one,) if one is not None else ())


def _number(cell: object) -> float | None:
    """A finite number, or None."""
    try:
        number = float(cell) if isinstance(cell, (str, int, float)) and not isinstance(cell, bool) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def encode_labels(cells: Sequence[object], several: bool = False) -> tuple[list[str], np.ndarray]:
    """Labels as written -> (class names in order, class numbers (N,) or zeros and ones (N, classes)).

    `several` says that text may hold names joined with "|"; lists always mean several labels.
    """
    several = several or any(isinstance(v, (list, tuple)) for v in cells)
    sets = [_label_set(v, several) for v in cells]
    if not several and [""] in sets:
        row = sets.index([""]) + 2
        raise DataError(f"row {row} has no label; give every image a class, or use a `labels` column")
    written = {name for names in sets for name in names}  # class 10 comes after class 9
    by_number = all(_WHOLE.fullmatch(name) for name in written)
    classes = sorted(written, key=lambda name: (int(name) if by_number else 0, name))  # "01" before "1", always
    number = {name: i for i, name in enumerate(classes)}
    if not several:
        return classes, np.array([number[names[0]] for names in sets], dtype=np.int64)
    return classes, zeros_and_ones([[number[n] for n in names] for names in sets], len(classes))


def zeros_and_ones(numbers: Sequence[Sequence[int]], classes: int) -> np.ndarray:
    matrix = np.zeros((len(numbers), classes), dtype=np.uint8)
    for row, several in enumerate(numbers):
        matrix[row, several] = 1
    return matrix


def _label_set(cell: object, several: bool) -> list[str]:
    if isinstance(cell, (list, tuple)):
        return [as_text(v) for v in cell]
    text = "" if cell is None else as_text(cell).strip()
    if not several:
        return [text]
    if text.startswith("["):
        return [as_text(v) for v in _json_list(text)]
    return [part.strip() for part in text.split("|") if part.strip()]


def _json_list(text: str) -> list[object]:
    try:
        return list(parse_json(text))
    except (ValueError, TypeError, RecursionError) as e:
        raise DataError(f'the labels {text[:80]!r} are no JSON list ({e}); write ["a", "b"] or a|b') from e


_CLASS_LISTS = ("classes.txt", "synsets.txt", "synset_words.txt", "labels.txt", "names.txt")


def named_classes(folder: Path | str | RemoteFolder, classes: list[str]) -> list[str]:
    """Names from a list beside the set, one line per class, when labels are numbers; text is a URL."""
    if not all(_WHOLE.fullmatch(c) and c[0] != "-" for c in classes):
        return classes
    if not isinstance(folder, Path):
        listed = beside(folder, _CLASS_LISTS)
    else:
        listed = next((folder / name for name in _CLASS_LISTS if (folder / name).is_file()), None)
    if listed is None:
        return classes
    names = [
        as_text(line.strip()) for line in listed.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    ]
    numbers = [int(c) for c in classes]
    if len(set(numbers)) < len(numbers):
        raise DataError(f"the labels write a number in two ways, such as 1 and 01, and {listed} names it once; use one")
    if max(numbers) >= len(names):
        raise DataError(f"{listed} names {len(names)} classes, but a label is {classes[-1]}; give one line per class")
    return [names[number] for number in numbers]
