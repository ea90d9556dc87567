"""The list of files that could not be read: `bad-files.csv` in the folder of the run.

One line per file, whoever met it and however often: ranks write to the same list under a lock, a resumed run
continues it. When more than `max_bad` of the set is bad the run stops: something is wrong with the set, not a file.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vitkit.errors import ConfigError, DataError
from vitkit.io import csv_cell, locked

HEADER = ("path", "class", "reason")
_SHOWN = 5


@dataclass(frozen=True)
class BadFile:
    path: str
    label: str
    reason: str


def parse_limit(limit: str | float, total: int) -> int:
    """How many of `total` may be bad: "5%" and 0.05 are shares, "20" and 20 are numbers of files."""
    text = str(limit).strip()
    try:
        value = float(text.rstrip("%"))
    except ValueError:
        raise ConfigError(f"max_bad={limit!r} is not a limit; write a share such as 5% or a number of files") from None
    if text.endswith("%"):
        value /= 100
    elif value >= 1:
        return int(value)
    if not 0 <= value <= 1:
        raise ConfigError(f"max_bad={limit!r} must be between 0% and 100%, or a number of files")
    return int(value * total)


class BadFiles:
    """Records unreadable files; `path` None keeps the list in memory only."""

    def __init__(self, path: str | Path | None = None, total: int = 0, max_bad: str | float = "5%") -> None:
        self.path = Path(path) if path is not None else None
        self.limit, self.total, self.max_bad = parse_limit(max_bad, total), total, max_bad
        self._found: dict[str, BadFile] = {}
        if self.path is not None:
            with locked(self.path) as file:
                self._read(file)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[BadFile]:
        return iter(list(self._found.values()))

    def record(self, *bad: BadFile) -> None:
        """Add files to the list (once each) and stop the run when there are too many."""
        cells = [[str(csv_cell(text)) for text in (b.path, b.label, b.reason)] for b in bad]
        new = [BadFile(*texts) for texts in cells if texts[0] not in self._found]
        if self.path is None:
            self._found.update((b.path, b) for b in new)
        elif new:
            with locked(self.path) as file:
                self._read(file)  # what the other ranks have met meanwhile
                lines = io.StringIO(newline="")
                for b in new:
                    if b.path not in self._found:
                        csv.writer(lines).writerow((b.path, b.label, b.reason))
                        self._found[b.path] = b
                file.write(lines.getvalue().encode())  # one write: a kill leaves whole lines or none
                file.flush()
                os.fsync(file.fileno())
        if len(self) <= self.limit:
            return
        first = "\n".join(f"  {b.path}: {b.reason}" for b in list(self)[:_SHOWN])
        listed = f"all of them are in {self.path}" if self.path else "`vitkit data check DATA` lists them all"
        raise DataError(
            f"{len(self)} of {self.total} images cannot be read, more than max_bad={self.max_bad} allows. "
            f"The first are:\n{first}\n{listed}. Repair or remove them, or raise --max-bad"
        )

    def _read(self, file: BinaryIO) -> None:
        file.seek(0)
        whole = data = file.read()
        while whole and (not whole.endswith(b"\n") or whole.count(b'"') % 2):  # a line that a full disk cut short
            whole = whole[: whole.rfind(b"\n", 0, -1) + 1]
        if whole != data:
            file.truncate(len(whole))
        if not whole:
            file.write((",".join(HEADER) + "\r\n").encode())
        for row in list(csv.reader(io.StringIO(whole.decode(errors="replace"), newline="")))[1:]:
            if len(row) == len(HEADER):
                self._found.setdefault(row[0], BadFile(*row))
