"""Nested folders of classes, and lists of "path label" in .txt files."""

from __future__ import annotations

from pathlib import Path

import making
import pytest

from vitkit.data import open_data
from vitkit.errors import ConfigError, DataError

NESTED = {"Fruit/Apple/Golden": 3, "Fruit/Apple/Fuji": 3, "Fruit/Banana": 3, "Nut/Almond": 3}


def test_leaf_folders_are_the_classes(tmp_path: Path) -> None:
    making.write_folder(tmp_path / "train", NESTED)
    making.write_folder(tmp_path / "test", NESTED)
    dataset = open_data(tmp_path)
    assert dataset.classes == ("Almond", "Banana", "Fuji", "Golden")
    assert dataset.splits["test"] == 12
    assert any("4 innermost folders are taken as classes" in note for note in dataset.notes)
    assert open_data(tmp_path, classes_from="top").classes == ("Fruit", "Nut")
    assert open_data(tmp_path, classes_from=2).classes == ("Almond", "Apple", "Banana")
    assert open_data(tmp_path, classes_from="2").classes == ("Almond", "Apple", "Banana")


def test_equal_names_under_different_folders_are_different_classes(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"Fruit/Apple/Golden": 3, "Fruit/Pear/Golden": 3, "Fruit/Pear/Conference": 3})
    assert open_data(tmp_path).classes == ("Apple/Golden", "Conference", "Pear/Golden")


def test_images_further_up_belong_to_the_top_folder(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"cat": 3, "cat/young": 3, "dog": 3})
    dataset = open_data(tmp_path)
    assert dataset.classes == ("cat", "dog")
    assert any("2 outermost folders are taken as classes" in note for note in dataset.notes)
    assert open_data(tmp_path, classes_from="leaf").classes == ("cat", "dog", "young")


def test_one_folder_inside_each_class_is_no_class(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"n01/images": 3, "n02/images": 3})
    assert open_data(tmp_path).classes == ("n01", "n02")


def test_flat_folders_need_no_words(tmp_path: Path) -> None:
    assert open_data(making.write_folder(tmp_path, {"cat": 3, "dog": 3})).notes == ()


def test_levels_that_cannot_be(tmp_path: Path) -> None:
    making.write_folder(tmp_path, NESTED)
    with pytest.raises(DataError, match=r"classes_from=3, but images lie in .* already"):
        open_data(tmp_path, classes_from=3)
    for wrong in ("0", "middle"):
        with pytest.raises(ConfigError, match="must be auto, top, leaf or a level"):
            open_data(tmp_path, classes_from=wrong)
    with pytest.raises(ConfigError, match="is about folders of classes"):
        open_data("digits", classes_from="top")


# --- lists -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["{} {}", "{}\t{}", "{},{}", "{}, {}", '"{}" {}', "./{}   {}"])
def test_lists_of_paths_and_labels(tmp_path: Path, line: str) -> None:
    making.write_folder(tmp_path, {"my images": 6})
    names = ["golden retriever", "cat"]
    lines = [line.format(f"my images/{i:03}.jpg", names[i % 2]) for i in range(6)]
    (tmp_path / "list.txt").write_text("\n".join(lines) + "\n\n")
    source = open_data(tmp_path / "list.txt").split("all")
    assert source.classes == ("cat", "golden retriever")
    assert all(Path(source.where(i)).is_file() for i in range(6))
    assert {Path(source.where(i)).name: source.label_name(i) for i in range(6)}["001.jpg"] == "cat"


def test_numbers_are_named_by_a_file_beside(tmp_path: Path) -> None:
    making.write_folder(tmp_path / "train", {"n1": 4})
    making.write_folder(tmp_path / "val", {".": 2})
    (tmp_path / "train.txt").write_text("".join(f"n1/{i:03}.jpg {i % 3}\n" for i in range(4)))
    (tmp_path / "val.txt").write_text("".join(f"{i:03}.jpg {i}\n" for i in range(2)))
    (tmp_path / "synsets.txt").write_text("zero\none\ntwo\n")
    dataset = open_data(tmp_path)
    assert dataset.splits == {"train": 4, "val": 2}
    assert dataset.classes == ("zero", "one", "two")
    assert all(Path(dataset.split(s).where(0)).is_file() for s in ("train", "val"))
    (tmp_path / "synsets.txt").write_text("zero\none\n")
    with pytest.raises(DataError, match="names 2 classes, but a label is 2"):
        open_data(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("", "lists no images"), ("cat.jpg\n", "line 1: 'cat.jpg' is not")])
def test_wrong_lists(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        open_data(tmp_path / "list.txt")


def test_notes_in_a_folder_are_no_lists(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"cat": 3, "dog": 3})
    (tmp_path / "train.txt").write_text("These images were taken in 2019.\n")
    assert open_data(tmp_path).classes == ("cat", "dog")
