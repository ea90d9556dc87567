"""bad-files.csv: whole lines, once each, from every process."""

from __future__ import annotations

import csv
import multiprocessing
from pathlib import Path

import pytest

from vitkit.data.badfiles import BadFile, BadFiles, parse_limit
from vitkit.errors import ConfigError, DataError


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize(
    ("limit", "allowed"), [("5%", 10), (0.05, 10), ("0.05", 10), ("7", 7), (7, 7), ("0%", 0), (0, 0), ("100%", 200)]
)
def test_limits(limit: str | float, allowed: int) -> None:
    assert parse_limit(limit, 200) == allowed


@pytest.mark.parametrize("limit", ["many", "-1", "120%", -0.5])
def test_wrong_limits(limit: str | float) -> None:
    with pytest.raises(ConfigError, match="max_bad"):
        parse_limit(limit, 200)


def test_names_of_any_kind_come_back(tmp_path: Path) -> None:
    path = tmp_path / "run" / "bad-files.csv"
    names = ['with "quotes", commas', "line\nbreak", "日本語", "no text \udcff\udcfe"]
    BadFiles(path, 100).record(*(BadFile(n, "c", "why") for n in names[:2]))
    again = BadFiles(path, 100)
    assert len(again) == 2
    again.record(*(BadFile(n, "c", "why") for n in names))
    again.record(BadFile(names[3], "c", "why"))
    assert [r[0] for r in rows(path)] == ["path", *names[:3], "no text \\udcff\\udcfe"]


def test_what_a_full_disk_cut_short_is_written_again(tmp_path: Path) -> None:
    """At every byte, also within the header and within quotes, which would swallow what follows."""
    path, bad = (
        tmp_path / "bad-files.csv",
        [BadFile("a", "c", "why"), BadFile('b "1"\n', "c", "why"), BadFile("d", "c", "")],
    )
    BadFiles(path, 100).record(*bad)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        BadFiles(path, 100).record(*bad)
        assert path.read_bytes() == whole, cut


def _write(path: Path, first: int) -> None:
    record = BadFiles(path, 1000)
    for i in range(first, first + 20):
        record.record(BadFile(f"file {i}", "c", "why"))


def test_processes_write_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "bad-files.csv"
    writers = [multiprocessing.Process(target=_write, args=(path, 10 * n)) for n in range(4)]
    for w in writers:
        w.start()
    for w in writers:
        w.join(60)
        assert w.exitcode == 0
    assert sorted(r[0] for r in rows(path)[1:]) == sorted(f"file {i}" for i in range(50))


def test_the_limit_counts_what_others_have_found(tmp_path: Path) -> None:
    path = tmp_path / "bad-files.csv"
    here, there = (BadFiles(path, 100, "2%") for _ in range(2))
    here.record(BadFile("a", "c", "why"), BadFile("b", "c", "why"))
    with pytest.raises(DataError, match="3 of 100 images"):
        there.record(BadFile("c", "c", "why"))
