"""One vocabulary of splits for every kind of set, and no sample is dropped because of its split's name."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import making
import numpy as np
import pytest

from vitkit.data import open_data
from vitkit.data.dataset import split_name

Write = Callable[[Path, dict[str, int]], Path]  # split word -> samples


@lru_cache
def photo(number: int) -> bytes:
    return making.encode(making.photo(number, (12, 9)), "PNG")


def numbered(counts: dict[str, int]) -> list[tuple[str, int]]:
    return [(word, 1000 * w + i) for w, (word, count) in enumerate(counts.items()) for i in range(count)]


def write_folder(root: Path, counts: dict[str, int]) -> Path:
    for word, i in numbered(counts):
        (root / word / f"c{i % 2}").mkdir(parents=True, exist_ok=True)
        (root / word / f"c{i % 2}" / f"{i}.png").write_bytes(photo(i))
    return root


def write_shards(root: Path, counts: dict[str, int]) -> Path:
    for word in counts:
        with tarfile.open(root / f"{word}-0000.tar", "w") as tar:
            for i in (i for w, i in numbered(counts) if w == word):
                for suffix, data in (("png", photo(i)), ("cls", f"c{i % 2}".encode())):
                    info = tarfile.TarInfo(f"{i}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return root


def write_parquet(root: Path, counts: dict[str, int]) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    for word in counts:
        rows = [{"image": photo(i), "label": f"c{i % 2}"} for w, i in numbered(counts) if w == word]
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), root / f"{word}-00000-of-00001.parquet")
    return root


def write_parquet_folders(root: Path, counts: dict[str, int]) -> Path:
    write_parquet(root, counts)
    for file in list(root.glob("*.parquet")):
        (root / file.name.split("-0")[0]).mkdir()
        file.rename(root / file.name.split("-0")[0] / "0000.parquet")
    return root


def write_csv(root: Path, counts: dict[str, int]) -> Path:
    with open(root / "list.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "label", "split"))
        for word, i in numbered(counts):
            (root / f"{i}.png").write_bytes(photo(i))
            writer.writerow((f"{i}.png", f"c{i % 2}", word))
    return root / "list.csv"


def write_jsonl(root: Path, counts: dict[str, int]) -> Path:
    rows = [{"path": f"{i}.png", "label": f"c{i % 2}", "split": word} for word, i in numbered(counts)]
    (root / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root / "list.jsonl"


def write_lists(root: Path, counts: dict[str, int]) -> Path:
    for word in counts:
        lines = [f"images/{i}.png {i % 2}" for w, i in numbered(counts) if w == word]
        (root / f"{word}.txt").write_text("\n".join(lines))
    return root


def write_npz(root: Path, counts: dict[str, int]) -> Path:
    rng = np.random.default_rng(0)
    arrays = {}
    for word, count in counts.items():
        arrays[f"x_{word}"] = rng.integers(0, 256, (count, 4, 4), dtype=np.uint8)
        arrays[f"y_{word}"] = np.arange(count) % 2
    np.savez(root / "a.npz", **arrays)
    return root / "a.npz"


FILES = [write_folder, write_shards, write_parquet]
NAMED = [*FILES, write_csv, write_jsonl, write_npz]


@pytest.mark.parametrize("write", [*NAMED, write_lists])
@pytest.mark.parametrize("word", ["testing", "holdout"])
def test_train_beside_another_word_for_test_keeps_every_row(tmp_path: Path, write: Write, word: str) -> None:
    dataset = open_data(write(tmp_path, {"train": 200, word: 50}))
    assert dataset.splits["train"] + dataset.splits["val"] == 200
    assert dataset.splits["test"] == 50
    assert 5 < dataset.splits["val"] < 40
    assert len(dataset.split("all")) == 250


@pytest.mark.parametrize("write", [*NAMED, write_lists, write_parquet_folders])
@pytest.mark.parametrize("word", ["dev", "valid", "validation"])
def test_other_words_for_val(tmp_path: Path, write: Write, word: str) -> None:
    dataset = open_data(write(tmp_path, {"training": 20, word: 6, "testing": 4}))
    assert dataset.splits == {"train": 20, "val": 6, "test": 4}


@pytest.mark.parametrize("write", NAMED)
def test_a_name_outside_the_vocabulary_is_a_split_of_its_own(tmp_path: Path, write: Write) -> None:
    dataset = open_data(write(tmp_path, {"train": 20, "val": 6, "test": 4, "extra": 10}))
    assert dataset.splits == {"train": 20, "val": 6, "test": 4, "extra": 10}
    assert len(dataset.split("extra")) == 10
    assert len(dataset.split("train+extra")) == 30
    assert len(dataset.split("all")) == 40
    assert dataset.evaluation().split == "test"


@pytest.mark.parametrize("write", NAMED)
def test_train_beside_an_unknown_name_keeps_its_rows(tmp_path: Path, write: Write) -> None:
    dataset = open_data(write(tmp_path, {"train": 100, "extra": 10}))
    assert dataset.splits["train"] + dataset.splits["val"] == 100
    assert dataset.splits["extra"] == 10


@pytest.mark.parametrize("write", [write_shards, write_parquet])
def test_files_whose_names_say_nothing_are_split_by_content(tmp_path: Path, write: Write) -> None:
    dataset = open_data(write(tmp_path, {"part": 100, "piece": 100}))
    assert list(dataset.splits) == ["train", "val", "test"]
    assert sum(dataset.splits.values()) == 200


@pytest.mark.parametrize("write", [write_shards, write_parquet])
def test_files_without_train_are_the_training_images(tmp_path: Path, write: Write) -> None:
    dataset = open_data(write(tmp_path, {"part": 30, "val": 6, "test": 4}))
    assert dataset.splits == {"train": 30, "val": 6, "test": 4}


def test_a_shard_without_any_name_beside_train(tmp_path: Path) -> None:
    write_shards(tmp_path, {"train": 20, "val": 5, "x": 7})
    (tmp_path / "x-0000.tar").rename(tmp_path / "0001.tar")
    assert open_data(tmp_path).splits == {"train": 20, "val": 5, "unnamed": 7}


def test_words_for_splits() -> None:
    assert [split_name(w) for w in ("Training", " DEV ", "holdout", "Extra", None, "all")] == [
        *("train", "val", "test", "extra", "", "")
    ]


# --- what is left out is counted ---------------------------------------------------------------------


def test_a_folder_of_other_things_beside_the_splits_is_noted(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train": 20, "val": 4})
    (tmp_path / "masks" / "m").mkdir(parents=True)
    (tmp_path / "masks" / "m" / "1.png").write_bytes(photo(1))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "1.png").write_bytes(photo(2))
    dataset = open_data(tmp_path)
    assert dataset.splits == {"train": 20, "val": 4}
    assert dataset.classes == ("c0", "c1")
    assert any("masks is no split: its 1 images" in note for note in dataset.notes)
    assert any("1 images in" in note and "no folder of a class" in note for note in dataset.notes)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"bus": 3, "car": 3, "train": 3})
    assert open_data(tmp_path).classes == ("bus", "car", "train")


def test_rows_without_a_label_are_counted(tmp_path: Path) -> None:
    write_shards(tmp_path, {"train": 9, "val": 2})
    with tarfile.open(tmp_path / "train-0000.tar", "a") as tar:
        info = tarfile.TarInfo("alone.png")
        info.size = len(photo(5))
        tar.addfile(info, io.BytesIO(photo(5)))
    dataset = open_data(tmp_path)
    assert dataset.splits == {"train": 9, "val": 2}
    assert any("1 images of" in note and "no label" in note for note in dataset.notes)


def test_parquet_rows_without_a_label_are_counted(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [{"image": photo(i), "label": i % 2 if i < 8 else None} for i in range(10)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "all.parquet")
    dataset = open_data(tmp_path / "all.parquet")
    assert sum(dataset.splits.values()) == 8
    assert dataset.notes == ("2 rows have no label and are left out",)


def test_a_set_is_scanned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.data.sources import folder

    scans = []
    scan = folder._scan
    monkeypatch.setattr(folder, "_scan", lambda *a: (scans.append(a), scan(*a))[1])
    dataset = open_data(write_folder(tmp_path, {"train": 10, "val": 4}))
    assert dataset.split("train") is dataset.split("train")
    assert len(dataset.split("val")) == 4
    assert len(dataset.split("all")) == 14
    assert len(scans) == 1
