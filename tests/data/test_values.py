"""Numbers to be predicted: columns of lists and of Parquet become values, and wrong ones are named."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import making
import numpy as np
import pytest
import torch

from vitkit.data import BadFiles, Loader, class_weights, open_data, preset
from vitkit.data.check import check
from vitkit.data.sheet import contact_sheet, training_sheet
from vitkit.errors import ConfigError, DataError
from vitkit.model.config import Preprocessing

PRE = Preprocessing(size=(16, 16))


def write_csv(root: Path, **columns: list[object]) -> Path:
    count = len(next(iter(columns.values())))
    making.write_folder(root, {"x": count})
    with open(root / "list.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", *columns))
        writer.writerows(zip((f"x/{i:03}.jpg" for i in range(count)), *columns.values(), strict=True))
    return root / "list.csv"


def test_named_columns_are_values(tmp_path: Path) -> None:
    path = write_csv(tmp_path, label=list("abab"), age=[1, 2.5, "3", "-4e1"], height=[10, 20, 30, 40])
    assert open_data(path).label_kind == "classes"
    dataset = open_data(path, target=("age", "height"))
    assert (dataset.label_kind, dataset.targets, dataset.classes) == ("values", ("age", "height"), ())
    source = dataset.split("all")
    assert source.labels.dtype == np.float32
    by_name = {Path(source.where(i)).name: source.labels[i].tolist() for i in range(4)}
    assert by_name["003.jpg"] == [-40, 40]
    assert source.label_name(0).startswith("age ")
    assert open_data(path, target="age").split("all").labels.shape == (4, 1)
    batch = next(iter(Loader(source, PRE, 4)))
    assert batch.labels.dtype == torch.float32
    assert batch.labels.tolist() == source.labels.tolist()


@pytest.mark.parametrize(
    ("columns", "targets"),
    [
        ({"target": [0.5, 1, 2]}, ("target",)),
        ({"value": [1, 2, 3]}, ("value",)),
        ({"target_x": [1, 2, 3], "note": list("abc"), "target_y": [4, 5, 6]}, ("target_x", "target_y")),
        ({"target": [0, 1, 2]}, ()),  # whole numbers are classes, as ever
        ({"target": list("abc")}, ()),
        ({"label": [0.5, 1, 2], "value": [1, 2, 3]}, ()),
    ],
)
def test_columns_that_say_by_their_name_that_they_are_values(
    tmp_path: Path, columns: dict[str, list[object]], targets: tuple[str, ...]
) -> None:
    dataset = open_data(write_csv(tmp_path, **columns))
    assert dataset.targets == targets
    assert dataset.label_kind == ("values" if targets else "classes")


@pytest.mark.parametrize("bad", ["", "tall", "nan", "inf"])
def test_what_is_no_number_is_named_by_row_and_column(tmp_path: Path, bad: str) -> None:
    with pytest.raises(DataError, match=r"row 4: the column 'age' must hold a finite number"):
        open_data(write_csv(tmp_path, age=[1, 2, bad, 4]), target=("age",))


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    path = write_csv(tmp_path, age=[1, 2])
    with pytest.raises(DataError, match=r"no column 'aeg'\. Did you mean age"):
        open_data(path, target="aeg")
    with pytest.raises(ConfigError, match="no columns for target=age"):
        open_data(making.write_folder(tmp_path / "photos", {"a": 2}), target="age")


@pytest.mark.parametrize("inside", [True, False])
def test_values_in_parquet_and_jsonl(tmp_path: Path, inside: bool) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    making.write_folder(tmp_path, {"x": 6})
    images = [tmp_path / "x" / f"{i:03}.jpg" for i in range(6)]
    if inside:
        rows = [{"image": image.read_bytes(), "age": i / 2} for i, image in enumerate(images)]
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "list.parquet")
    else:
        lines = (json.dumps({"path": str(image), "age": i / 2}) for i, image in enumerate(images))
        (tmp_path / "list.jsonl").write_text("\n".join(lines))
    dataset = open_data(tmp_path / ("list.parquet" if inside else "list.jsonl"), target="age")
    assert dataset.label_kind == "values"
    assert sorted(dataset.split("all").labels[:, 0].tolist()) == [0, 0.5, 1, 1.5, 2, 2.5]


def test_a_replacement_brings_its_own_value(tmp_path: Path) -> None:
    path = write_csv(tmp_path, age=[1, 2, 3, 4])
    (tmp_path / "x" / "001.jpg").write_bytes(b"damaged")
    source = open_data(path, target="age").split("all")
    (row,) = (i for i in range(4) if source.where(i).endswith("001.jpg"))
    batch = next(iter(Loader(source, PRE, 4, preset("none"), bad_files=BadFiles(total=4, max_bad=1))))
    replaced = batch.labels[batch.indices.tolist().index(row), 0].item()
    assert replaced in (1, 3, 4)
    assert batch.bad[0].label == "age 2"


def test_values_can_be_looked_at(tmp_path: Path) -> None:
    dataset = open_data(write_csv(tmp_path, age=[1, 2, 3, 40]), target="age")
    assert dataset.notes == ("values to be predicted: age, from 1 to 40",)
    assert check(dataset).classes == {}
    source = dataset.split("all")
    assert contact_sheet(source).width > 100
    assert training_sheet(source, PRE, preset("strong"), rows=2).width > 100


def test_what_needs_classes_says_so(tmp_path: Path) -> None:
    source = open_data(write_csv(tmp_path, age=[1, 2, 3, 4]), target="age").split("all")
    with pytest.raises(DataError, match=r"has values \(age\), not classes"):
        class_weights(source.counts)
    with pytest.raises(ConfigError, match="needs one class per image"):
        next(iter(Loader(source, PRE, 2, preset("none"), balanced=True)))
