"""`vitkit data check` and `vitkit data show`, as a user meets them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import making
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vitkit.cli.data import app
from vitkit.data import open_data
from vitkit.data.check import check
from vitkit.errors import ConfigError, DataError


def run(*arguments: object, ok: bool = True) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert (result.exit_code == 0) == ok, result.output
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three readable splits with a leak, a contradiction, a plain duplicate and two damaged files."""
    for s, split in enumerate(("train", "val", "test")):
        for c, label in enumerate(("cat", "dog")):
            place = tmp_path / "set" / split / label
            place.mkdir(parents=True)
            for i in range(4):
                (place / f"{i}.jpg").write_bytes(making.encode(making.photo(100 * s + 10 * c + i, (70 + i, 50))))
    root = tmp_path / "set"
    shutil.copy(root / "train/cat/0.jpg", root / "test/cat/leak.jpg")
    shutil.copy(root / "train/cat/1.jpg", root / "train/dog/contradiction.jpg")
    shutil.copy(root / "train/cat/2.jpg", root / "train/cat/same.jpg")
    (root / "train/cat/cut\nshort.jpg").write_bytes((root / "train/cat/3.jpg").read_bytes()[:200])
    (root / "val/dog/empty.png").write_bytes(b"")
    (root / "train/nothing").mkdir()
    return root


def test_the_report(folder: Path) -> None:
    report = check(open_data(folder))
    assert report.splits == {"train": 11, "val": 9, "test": 9}
    assert report.classes == {"cat": {"train": 6, "val": 4, "test": 5}, "dog": {"train": 5, "val": 5, "test": 4}}
    assert report.empty_classes == ["nothing"]
    assert report.formats == {"JPEG": 27}
    assert report.sizes == {"smallest": [70, 50], "median": [71, 50], "largest": [73, 50]}
    assert [(Path(b.path).name, b.label) for b in report.bad] == [("cut\nshort.jpg", "cat"), ("empty.png", "dog")]
    assert [d.leaks for d in report.duplicates] == [True, False, False]
    assert [d.contradicts for d in report.duplicates] == [False, True, False]


def test_processes_find_the_same(folder: Path) -> None:
    assert check(open_data(folder), workers=2) == check(open_data(folder))


def test_the_table(folder: Path, tmp_path: Path) -> None:
    text = run("check", folder, "--out", tmp_path / "deep" / "sheet.png", ok=False)
    for expected in ("2 unreadable", "cut\\nshort.jpg", "leakage", "different labels", "exact duplicates", "nothing"):
        assert expected in text
    sheet = np.asarray(Image.open(tmp_path / "deep" / "sheet.png"))
    assert sheet.std() > 20


def test_json_is_json(folder: Path) -> None:
    report = json.loads(run("check", folder, "--json", ok=False))
    assert report["splits"] == {"train": 11, "val": 9, "test": 9}
    assert report["duplicates"][0]["leaks"] is True
    assert report["bad"][1]["reason"] == "the file is empty (0 bytes)"


def test_a_good_set_ends_with_code_0(tmp_path: Path) -> None:
    making.write_folder(tmp_path, {"a": 5, "b": 5})
    assert "no unreadable images, no duplicates" in run("check", tmp_path)


@pytest.mark.parametrize("arguments", [[], ["--augment"], ["--augment", "strong", "--rows", 3]])
def test_show(tmp_path: Path, arguments: list[object]) -> None:
    making.write_folder(tmp_path / "set", {"a": 12, "b": 12})
    first, second = tmp_path / "1.png", tmp_path / "2.png"
    run("show", tmp_path / "set", *arguments, "--out", first)
    run("show", tmp_path / "set", "--out", second, *arguments)
    assert first.read_bytes() == second.read_bytes()
    assert Image.open(first).width > 800


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_show_and_check_arrays(tmp_path: Path, channels: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, channels, 12, 10), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(40) % 3)
    run("show", tmp_path / "a.npz", "--augment", "strong", "--out", tmp_path / "a.png")
    run("check", tmp_path / "a.npz", "--out", tmp_path / "b.png")


def test_the_torture_folder(tmp_path: Path) -> None:
    root, damaged = making.torture_folder(tmp_path / "torture")
    report = check(open_data(root))
    assert {b.path for b in report.bad} == damaged
    assert report.empty_classes == ["empty class"]
    run("check", root, "--out", tmp_path / "sheet.png", ok=False)


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        run("check", tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no images"):
        run("check", tmp_path)
    with pytest.raises(ConfigError, match="no augmentation preset"):
        run("show", "digits", "--augment", "heavy")
    with pytest.raises(DataError, match=r"ending in \.png"):
        run("show", "digits", "--out", tmp_path / "x.nonsense")
    with pytest.raises(ConfigError, match="--size"):
        run("show", "digits", "--size", "big", "--out", tmp_path / "x.png")


def test_the_command_is_light() -> None:
    code = "import sys, vitkit.cli.data; print([m for m in ('torch', 'numpy', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_labels_joined_with_a_semicolon_are_pointed_out(tmp_path: Path, command) -> None:
    making.write_folder(tmp_path, {"x": 4})
    lines = [f"x/{i:03}.jpg,{label}" for i, label in enumerate(("cat;animal", "dog;animal", "cat;animal", "animal"))]
    (tmp_path / "list.csv").write_text("\n".join(["path,labels", *lines]))
    _, out, _ = command("data", "check", tmp_path / "list.csv")
    assert "a label is 'cat;animal': several labels are joined with |" in out
