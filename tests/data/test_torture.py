"""Training over the worst folder there is finishes, and names exactly what is wrong with it."""

from __future__ import annotations

import csv
from pathlib import Path

import making
import numpy as np
import pytest

from vitkit.data import BadFiles, Loader, open_data, preset
from vitkit.errors import DataError
from vitkit.model.config import Preprocessing

PRE = Preprocessing(size=(32, 32))


@pytest.fixture(scope="module")
def torture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    return making.torture_folder(tmp_path_factory.mktemp("torture"))


def listed(path: Path) -> list[str]:
    with open(path, newline="", encoding="utf-8") as file:
        return [row["path"] for row in csv.DictReader(file)]


@pytest.mark.parametrize("workers", [0, 2])
def test_training_finishes_and_lists_exactly_the_damaged(
    torture: tuple[Path, set[str]], tmp_path: Path, workers: int
) -> None:
    folder, damaged = torture
    source = open_data(folder).split("all")
    assert source.classes == ("dritte\nKlasse", "first class", "zweite Klasse ü")
    record = BadFiles(tmp_path / "bad-files.csv", len(source), max_bad="90%")
    with Loader(source, PRE, 16, preset("medium"), workers=workers, bad_files=record) as loader:
        for _ in range(2):
            for batch in loader:
                assert batch.images.shape == (16, 3, 32, 32)
    with Loader(source, PRE, 16, workers=workers, bad_files=record) as everything:
        assert sum(len(b) for b in everything) == len(source)
    found = listed(tmp_path / "bad-files.csv")
    assert len(found) == len(set(found))
    assert set(found) == damaged


def test_a_replacement_is_of_the_same_class_and_always_the_same(torture: tuple[Path, set[str]]) -> None:
    source = open_data(torture[0]).split("all")
    seen = []
    for _ in range(2):
        record = BadFiles(total=len(source), max_bad="90%")
        loader = Loader(source, PRE, 32, bad_files=record)
        batches = list(loader)
        labels = np.concatenate([b.labels.numpy() for b in batches])
        indices = np.concatenate([b.indices.numpy() for b in batches])
        assert np.array_equal(labels, source.labels[indices])
        seen.append([b.images.numpy().tobytes() for b in batches])
    assert seen[0] == seen[1]


def test_too_many_bad_files_stop_the_run_and_are_named(torture: tuple[Path, set[str]], tmp_path: Path) -> None:
    source = open_data(torture[0]).split("all")
    record = BadFiles(tmp_path / "bad-files.csv", len(source), max_bad="5%")
    with pytest.raises(DataError, match=r"more than max_bad=5%") as caught:
        list(Loader(source, PRE, 16, preset("light"), bad_files=record))
    first = listed(tmp_path / "bad-files.csv")[0]
    assert first in str(caught.value)
    assert "--max-bad" in str(caught.value)


def test_a_class_with_no_readable_image_is_an_error_that_names_it(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"good": 4, "bad": 3})
    for path in (tmp_path / "bad").iterdir():
        path.write_bytes(b"")
    source = open_data(tmp_path).split("all")
    with pytest.raises(DataError, match="no image of the class 'bad'"):
        list(Loader(source, PRE, 7, bad_files=BadFiles(total=7, max_bad="100%")))
    with pytest.raises(DataError, match="no image of the class 'bad'"):
        list(Loader(source, PRE, 7, workers=1, bad_files=BadFiles(total=7, max_bad="100%")))


def test_a_file_that_vanishes_while_training(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"a": 6, "b": 6})
    source = open_data(tmp_path).split("all")
    record = BadFiles(total=12, max_bad="50%")
    loader = Loader(source, PRE, 4, preset("none"), bad_files=record)
    list(loader)
    (tmp_path / "a" / "003.jpg").unlink()
    list(loader)
    assert [b.reason for b in record] == ["the file has vanished"]
