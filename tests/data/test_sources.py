"""Every kind of DATA opens to the same few fields, and wrong ones say what to do."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from pathlib import Path

import making
import numpy as np
import pytest

from vitkit.data import BadFiles, Loader, Source, evaluation_split, open_data, preset
from vitkit.data.source import Names
from vitkit.data.sources.shards import expand
from vitkit.errors import DataError, MissingPackage
from vitkit.model.config import Preprocessing

PRE = Preprocessing(size=(16, 16))


def names_of(source: Source) -> set[str]:
    return {os.path.basename(source.where(i)) for i in range(len(source))}


# --- folders ---------------------------------------------------------------------------------------


def test_folder_of_classes_is_split_by_content(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"cat": 60, "dog": 60})
    parts = {s: open_data(tmp_path).split(s) for s in ("train", "val", "test")}
    assert parts["train"].classes == ("cat", "dog")
    assert parts["train"].splits == {s: len(p) for s, p in parts.items()}
    assert sum(parts["train"].splits.values()) == 120
    assert len(open_data(tmp_path).split("train+val")) == len(parts["train"]) + len(parts["val"])
    assert evaluation_split(parts["train"].splits) == "test"


def test_a_file_keeps_its_side_when_others_come_and_go(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"cat": 40, "dog": 40})
    before = {s: set(open_data(tmp_path).split(s).names) for s in ("train", "val", "test")}
    for path in list((tmp_path / "cat").iterdir())[::2]:
        path.unlink()
    making.write_folder(tmp_path, {"ant": 30})
    for split, names in before.items():
        after = set(open_data(tmp_path).split(split).names)
        assert {n for n in names if os.path.exists(n)} <= after


def test_renamed_files_and_copies_stay_together(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"cat": 30})
    for i in range(30):
        (tmp_path / "cat" / f"copy of {i}.jpg").write_bytes((tmp_path / "cat" / f"{i:03}.jpg").read_bytes())
    for split in ("val", "test"):
        names = names_of(open_data(tmp_path).split(split))
        assert sum(n.startswith("copy") for n in names) * 2 == len(names)


def test_folders_of_splits(tmp_path: Path) -> None:
    for split, count in {"Train": 20, "validation": 3, "test": 4}.items():
        making.write_folder(tmp_path / split, {"b": count, "a": count})
    assert open_data(tmp_path).split().splits == {"train": 40, "val": 6, "test": 8}
    assert open_data(tmp_path).split("val").classes == ("a", "b")


def test_train_without_val_gives_a_tenth(tmp_path: Path) -> None:
    making.write_folder(tmp_path / "train", {"a": 50})
    making.write_folder(tmp_path / "test", {"a": 5})
    splits = open_data(tmp_path).split().splits
    assert splits["test"] == 5
    assert splits["train"] + splits["val"] == 50
    assert 1 <= splits["val"] <= 12


def test_grey_folders_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(making.encode(making.photo().convert("L"), "PNG"))
    assert open_data(tmp_path).split("all").channels == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "holds no images"),
        (lambda p: (p / "empty").mkdir(), "holds no images"),
        (lambda p: (p / "x.jpg").write_bytes(b""), "holds 1 images but no folders of classes"),
    ],
)
def test_useless_folders(tmp_path: Path, make, message: str) -> None:
    make(tmp_path)
    with pytest.raises(DataError, match=message):
        open_data(tmp_path).split()


def test_wrong_names_and_splits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Did you mean mnist"):
        open_data("minst").split()
    with pytest.raises(DataError, match="no file or folder"):
        open_data(tmp_path / "nowhere").split()
    making.write_folder(tmp_path, {"a": 3})
    with pytest.raises(DataError, match="no split 'dev'"):
        open_data(tmp_path).split("dev")
    (tmp_path / "x.zip").write_bytes(b"")
    with pytest.raises(DataError, match="not a set of images"):
        open_data(tmp_path / "x.zip").split()


# --- manifests -------------------------------------------------------------------------------------


def write_manifest(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(r) for r in rows))
    elif path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        import csv

        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_manifests(tmp_path: Path, suffix: str) -> None:
    making.write_folder(tmp_path / "images", {"x": 6})
    rows = [
        {"path": f"images/x/{i:03}.jpg", "label": ["cat", "dog"][i % 2], "split": ["train", "train", "val"][i // 2]}
        for i in range(6)
    ]
    write_manifest(tmp_path / f"list{suffix}", rows)
    source = open_data(tmp_path / f"list{suffix}").split()
    assert source.splits == {"train": 4, "val": 2}
    assert source.classes == ("cat", "dog")
    assert source.labels.tolist() == [0, 1, 0, 1]
    assert source.image(1).size == (64, 48)


@pytest.mark.parametrize("several", ["a|b", '["a", "b"]', ["a", "b"]])
def test_several_labels(tmp_path: Path, several: object) -> None:
    making.write_folder(tmp_path, {"x": 2})
    suffix = ".jsonl" if isinstance(several, list) else ".csv"
    rows = [{"path": "x/000.jpg", "labels": several}, {"path": "x/001.jpg", "labels": [] if suffix == ".jsonl" else ""}]
    write_manifest(tmp_path / f"list{suffix}", rows)
    source = open_data(tmp_path / f"list{suffix}").split("all")
    assert source.multi_label
    assert source.classes == ("a", "b")
    by_name = {os.path.basename(source.where(i)): source.labels[i].tolist() for i in range(2)}
    assert by_name == {"000.jpg": [1, 1], "001.jpg": [0, 0]}
    batch = next(iter(Loader(source, PRE, 2)))
    assert batch.labels.shape == (2, 2)
    assert batch.labels.is_floating_point()


def test_numbered_classes_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"x": 3})
    write_manifest(tmp_path / "l.csv", [{"path": f"x/{i:03}.jpg", "label": n} for i, n in enumerate((10, 9, 2))])
    assert open_data(tmp_path / "l.csv").split("all").classes == ("2", "9", "10")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no images"),
        ("path,label\n", "lists no images"),
        ("name,label\nx,1\n", "no column of paths"),
        ("path,size\nx,1\n", "no column of labels"),
        ("path,label\n,1\n", "row 2"),
        ("path,label\nx,\n", "no label"),
        ("path,label,split\nx,1,later\n", "no split 'train'; it has later"),
        ("path,label,split\nx,1,train\nx,1,\n", "row 3 has no split"),
    ],
)
def test_wrong_manifests(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        open_data(tmp_path / "list.csv").split()


def test_a_manifest_may_name_files_that_are_gone(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"x": 3})
    write_manifest(tmp_path / "l.csv", [{"path": f"x/{i:03}.jpg", "label": "a"} for i in range(4)])
    record = BadFiles(total=4, max_bad=1)
    source = open_data(tmp_path / "l.csv").split("all")
    assert sum(len(b) for b in Loader(source, PRE, 2, bad_files=record)) == 4
    assert [b.reason for b in record] == ["the file has vanished"]


# --- arrays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(30, 9, 8), (30, 9, 8, 3), (30, 3, 9, 8), (30, 7, 9, 8), (30, 9, 8, 1), (30, 9, 8, 5), (30, 9, 8, 7)]
)
def test_arrays_of_any_layout(tmp_path: Path, shape: tuple[int, ...]) -> None:
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(30) % 3, classes=["x", "y", "z"])
    source = open_data(tmp_path / "a.npz").split("all")
    assert source.classes == ("x", "y", "z")
    assert source.pixels is not None
    assert tuple(source.pixels.shape[-2:]) == (9, 8)
    batch = next(iter(Loader(source, Preprocessing(size=(9, 8)), 8, preset("strong", policy="trivial"))))
    assert batch.images.shape == (8, source.channels, 9, 8)


@pytest.mark.parametrize("channels", [1, 3, 5, 13, 64, 200])
@pytest.mark.parametrize("last", [True, False])
def test_channels_of_square_arrays_are_found(tmp_path: Path, channels: int, last: bool) -> None:
    """Also where there are more of them than pixels in a row."""
    shape = (6, 16, 16, channels) if last else (6, channels, 16, 16)
    np.savez(tmp_path / "a.npz", images=np.zeros(shape, np.uint8), labels=np.arange(6) % 2)
    source = open_data(tmp_path / "a.npz").split("all")
    assert source.pixels is not None
    assert tuple(source.pixels.shape[1:]) == (channels, 16, 16)


@pytest.mark.parametrize(
    "names",
    [("x_train", "y_train", "x_test", "y_test"), ("train_images", "train_labels", "test_images", "test_labels")],
)
def test_arrays_with_splits(tmp_path: Path, names: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.random((50, 8, 8)), rng.integers(0, 4, (50, 1)), rng.random((7, 8, 8)), rng.integers(0, 4, (7, 1))]
    np.savez(tmp_path / "a.npz", **dict(zip(names, arrays, strict=True)))
    splits = open_data(tmp_path / "a.npz").split().splits
    assert splits["train"] + splits["val"] == 50
    assert splits["test"] == 7
    pixels = open_data(tmp_path / "a.npz").split("test").pixels
    assert pixels is not None
    assert int(pixels.max()) > 200  # 0..1 became 0..255


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": np.zeros((2, 4, 4))}, "holds pictures"),
        ({"images": np.zeros((2, 4, 4)), "labels": np.zeros(3, int)}, "must be the same"),
        ({"images": np.zeros((2, 4)), "labels": np.zeros(2, int)}, "must be N H W"),
        ({"images": np.zeros((2, 4, 4)), "labels": np.zeros(2)}, "whole numbers"),
        ({"images": np.zeros((2, 4, 4)), "labels": np.array([-1, 0])}, "number the classes"),
        (
            {"images": np.zeros((2, 4, 4)), "labels": np.array([0, 5]), "classes": np.array(["a"])},
            "beyond the 1 class names",
        ),
    ],
)
def test_wrong_arrays(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        open_data(tmp_path / "a.npz").split("all")


def test_files_that_are_no_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"not a zip file")
    with pytest.raises(DataError, match=r"cannot be read as \.npz"):
        open_data(tmp_path / "a.npz").split()


# --- Parquet with images -------------------------------------------------------------------------


def write_parquet(path: Path, count: int, first: int = 0, group: int = 4) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [
        {"image": {"bytes": making.encode(making.photo(first + i)), "path": None}, "label": i % 2} for i in range(count)
    ]
    rows[1]["image"]["bytes"] = None
    features = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"huggingface": json.dumps(features)})
    pyarrow.parquet.write_table(table, path, row_group_size=group)


def test_parquet_with_images(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-00000-of-00002.parquet", 20)
    write_parquet(tmp_path / "train-00001-of-00002.parquet", 20, first=20)
    write_parquet(tmp_path / "validation-00000-of-00001.parquet", 6, first=40)
    source = open_data(tmp_path).split()
    assert source.splits == {"train": 40, "val": 6}
    assert source.classes == ("cat", "dog")
    record = BadFiles(total=40, max_bad="50%")
    with Loader(source, PRE, 8, preset("light"), workers=1, bad_files=record) as loader:
        seen = [i for b in loader for i in b.indices.tolist()]
    assert sorted(seen) == list(range(40))
    assert {b.reason for b in record} == {"the file is empty (0 bytes)"}
    assert len(record) == 2


def test_order_keeps_row_groups_together(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", 64, group=4)
    write_parquet(tmp_path / "val.parquet", 4)
    source = open_data(tmp_path).split()
    from vitkit.data.order import epoch_order

    order = epoch_order(source, 0, 0, shuffle=True).indices
    assert source.blocks is not None
    for start in range(0, 64, 16):  # four groups of four at a time
        assert len(set(source.blocks[order[start : start + 16]])) == 4
    assert order.tolist() != sorted(order.tolist())


def test_one_parquet_file_is_split_by_content(tmp_path: Path) -> None:
    write_parquet(tmp_path / "everything.parquet", 40)
    assert sum(open_data(tmp_path / "everything.parquet").split().splits.values()) == 40


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackage, match="pip install"):
        open_data(tmp_path / "x.parquet").split()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingPackage, match="scikit-learn"):
        open_data("digits").split()


# --- shards ----------------------------------------------------------------------------------------


def write_shard(path: Path, first: int, count: int, label: str = "cls") -> None:
    with tarfile.open(path, "w") as tar:
        for i in range(first, first + count):
            text = str(i % 3) if label == "cls" else json.dumps({"label": ["cat", "dog"][i % 2]})
            for suffix, data in (("jpg", making.encode(making.photo(i))), (label, text.encode())):
                info = tarfile.TarInfo(f"{i:05}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def test_shards(tmp_path: Path) -> None:
    for s in range(6):
        write_shard(tmp_path / f"train-{s:04}.tar", 10 * s, 10)
    write_shard(tmp_path / "val-0000.tar", 100, 5)
    (tmp_path / "classes.txt").write_text("zero\none\ntwo\n")
    folder = open_data(tmp_path).split()
    assert folder.splits == {"train": 60, "val": 5}
    series = open_data(f"{tmp_path}/train-{{0000..0005}}.tar").split("all")
    assert len(series) == 60
    assert series.classes == ("zero", "one", "two")
    with Loader(series, PRE, 20, preset("light"), workers=2) as loader:
        batches = list(loader)
    assert sorted(i for b in batches for i in b.indices.tolist()) == list(range(60))
    assert len({series.where(i).split("/")[-2] for i in batches[0].indices.tolist()}) == 6  # of every shard
    assert "train-0000.tar/0000" in series.where(0)


def test_labels_in_json(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", 0, 8, label="json")
    assert open_data(tmp_path / "a.tar").split("all").classes == ("cat", "dog")


def test_a_shard_that_is_cut_short_gives_what_it_has(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-0.tar", 0, 10)
    data = (tmp_path / "train-0.tar").read_bytes()
    (tmp_path / "train-0.tar").write_bytes(data[: len(data) // 2])
    assert 2 <= len(open_data(tmp_path).split("all")) < 10
    (tmp_path / "train-0.tar").write_bytes(b"x" * 2000)
    with pytest.raises(DataError, match="cannot be read"):
        open_data(tmp_path).split()


def test_missing_shards_are_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-00.tar", 0, 2)
    with pytest.raises(DataError, match=r"2 of 3 shards do not exist, first .*train-01"):
        expand(f"{tmp_path}/train-{{00..02}}.tar")


# --- names -----------------------------------------------------------------------------------------


def test_packed_names_hold_anything() -> None:
    names = ["", "a", "日本語", "line\nbreak", "no text \udcff", "x" * 1000]
    packed = Names(names)
    assert list(packed) == names
    assert packed[-1] == names[-1]
    assert list(packed.take([2, 0])) == ["日本語", ""]
    with pytest.raises(IndexError):
        packed[6]
