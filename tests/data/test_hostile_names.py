"""Names of files and classes are a stranger's text: terminals, spreadsheets and XML show them and obey nothing."""

from __future__ import annotations

import ast
import csv
import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import making
import numpy as np
import pytest
import torch

import vitkit
from peers import randomize
from vitkit.data import open_data
from vitkit.data.badfiles import BadFile, BadFiles
from vitkit.data.check import leakage
from vitkit.data.sources.shards import expand
from vitkit.errors import printable
from vitkit.io import csv_cell, json_text
from vitkit.model.base import Outputs
from vitkit.progress import Bar

Command = Callable[..., tuple[int, str, str]]
ESCAPE = "\x1b]0;owned\x07\x1b[2J"  # names the window and clears the screen
FORMULA = "=cmd|'calc'!A0"
NOT_TEXT = os.fsdecode(b"caf\xe9")  # Latin-1, as it comes from the file system
CLASSES = [f"a{ESCAPE}", FORMULA, NOT_TEXT]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("set")
    for number, name in enumerate(CLASSES):
        for split in ("train", "test"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i, file in enumerate(("0.jpg", f"{ESCAPE}.jpg", f"{NOT_TEXT}.jpg")):
                seed = 10 * number + i + (100 if split == "test" else 0)
                (folder / file).write_bytes(making.encode(making.photo(seed, (20, 16))))
    (root / "test" / FORMULA / f"=bad{ESCAPE}{NOT_TEXT}.jpg").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def model(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    made = randomize(vitkit.create("mu", image_size=16, classes=3), scale=0.4)
    made.class_names = open_data(photos).classes
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    vitkit.save(made, path)
    return path


def is_harmless(text: str) -> bool:
    return printable(text, keep="\n\t") == text


@pytest.mark.parametrize("bad", ["\x1b[31m", "\r", "\x00", "\x9b2J", "\x7f", "\u202e", "\u2028", "\udcff"])
def test_control_characters_are_shown_with_backslashes(bad: str) -> None:
    shown = printable(f"a{bad}b")
    assert shown.startswith("a\\")
    assert shown.encode()
    assert shown == printable(shown)
    assert json.loads(json_text([f"a{bad}b"])) == [f"a{bad}b"]  # JSON loses nothing
    assert is_harmless(json_text([f"a{bad}b"]))


def test_letters_stay() -> None:
    for text in ("日本語", "naïve café", "👩‍👩‍👧", "می‌خواهم", "a=b", "x-1"):
        assert printable(text) == text
        assert csv_cell(text) == text


def test_formulas_are_text_and_numbers_stay_numbers() -> None:
    for text in (FORMULA, "+1+2", "-2+3", "@SUM(A1)", "  =1", "＝1"):
        assert csv_cell(text) == f"'{text}"
    for same in ("-1", "+2.5", "-3,5", "a=1", "", 0.25, None):
        assert csv_cell(same) == same


def test_data_check_prints_and_writes_only_text(photos: Path, command: Command) -> None:
    code, out, err = command("data", "check", photos)
    assert code == 1
    assert "=bad" in out
    assert is_harmless(out + err)
    code, out, _ = command("data", "check", photos, "--json")
    found = json.loads(out)
    assert is_harmless(out)
    assert found["bad"][0]["path"].endswith(f"=bad{ESCAPE}{NOT_TEXT}.jpg")


def test_class_names_are_text_everywhere(photos: Path) -> None:
    assert "caf\\udce9" in open_data(photos).classes
    assert Outputs(names=("a\ud800",)).names == ("a\\ud800",)


def test_evaluate_and_predict_of_hostile_names(
    photos: Path, model: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos)
    code, out, err = command("evaluate", model, photos)
    assert code == 0, err
    assert is_harmless(out + err)
    assert command("predict", model, f"train/{FORMULA}", f"test/{FORMULA}", "--out", tmp_path / "a.csv")[0] == 0
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    cells = [cell for row in rows[1:] for cell in row]
    assert all(is_harmless(cell) for cell in cells)
    assert not any(cell.startswith(("=", "@")) for cell in cells)
    assert f"'{FORMULA}" in cells  # the class
    code, out, err = command("predict", model, f"test/{FORMULA}")
    assert is_harmless(out + err)


def test_the_list_of_bad_files_holds_no_formula(tmp_path: Path) -> None:
    record = BadFiles(tmp_path / "bad-files.csv", 100)
    record.record(BadFile(FORMULA, CLASSES[0], "why"))
    BadFiles(tmp_path / "bad-files.csv", 100).record(BadFile(FORMULA, CLASSES[0], "why"))
    text = (tmp_path / "bad-files.csv").read_text()
    assert text.count("calc") == 1  # the same file again is the same line
    assert "\n'=cmd" in text
    assert is_harmless(text.replace("\r\n", "\n"))


@pytest.mark.parametrize("as_json", [False, True])
def test_explain_of_hostile_names(photos: Path, model: Path, tmp_path: Path, command: Command, as_json: bool) -> None:
    pytest.importorskip("matplotlib")
    images = [photos / "test" / name for name in CLASSES]
    more = ["--only", "worst", "--json"] if as_json else ["--only", "confusion"]
    code, out, err = command("explain", model, *images, "--data", photos, "--out", tmp_path / "e", *more)
    assert code == 0, err
    assert is_harmless(out + err)
    (figure,) = (tmp_path / "e" / "figures").glob("*.svg")
    ET.parse(figure)  # well-formed
    page = (tmp_path / "e" / "report.html").read_text(encoding="utf-8")
    assert is_harmless(page)


def test_figures_with_control_characters_are_well_formed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from vitkit.figures.style import new_figure, save, styled

    with styled():
        figure = new_figure(2)
        axes = figure.subplots()
        axes.set_title(f"raw {ESCAPE}")
        axes.set_yticks([0, 1], ["\x01", "\x0b"])
        inline = save(figure, tmp_path / "a", f"title {CLASSES}{ESCAPE}", f"alt {ESCAPE}\ud800")
    ET.parse(tmp_path / "a.svg")
    ET.fromstring(inline.replace("xlink:href", "href"))


def test_notes_and_errors_reach_the_terminal_as_text(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bar() as bar:
        bar.note(f"note {ESCAPE}{NOT_TEXT}")
    assert is_harmless(capsys.readouterr().err)
    code, out, err = command("data", "check", tmp_path / f"no{ESCAPE}{NOT_TEXT}.csv")
    assert code == 2
    assert is_harmless(out + err)


def test_one_function_prints() -> None:
    """Everything that commands print goes through `echo` of cli/options.py, which knows what a terminal obeys."""
    folder = Path(vitkit.__file__).parent / "cli"
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            from_typer = isinstance(node, ast.ImportFrom) and node.module in ("typer", "click")
            names = {alias.name for alias in node.names} if from_typer else set()
            assert path.name == "options.py" or not names & {"echo", "secho"}, path
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("print", "typer.echo", "sys.stdout.write"), path


# --- leakage -----------------------------------------------------------------------------------------


def test_training_tells_of_images_in_two_splits(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitkit.training.run._draw", lambda *_: None)  # takes longer than all the rest
    root = making.write_folder(tmp_path / "set", {f"{s}/{c}": 4 for s in ("train", "val") for c in ("a", "b")})
    assert leakage(open_data(root)) == ""
    copied = (root / "train" / "a" / "000.jpg").read_bytes()
    (root / "val" / "a" / "copy.jpg").write_bytes(copied)
    (root / "train" / "a" / "twin.jpg").write_bytes(copied)  # twice in one split leaks nothing more
    other = bytearray(copied)
    other[len(other) // 2] ^= 1  # as long, another image
    (root / "val" / "a" / "other.jpg").write_bytes(bytes(other))
    found = leakage(open_data(root))
    assert "1 images that are evaluated are in train too" in found
    assert "copy.jpg" in found
    small = ["--model", "mu", "--image-size", 16, "--steps", 1, "--batch-size", 4, "--workers", 0]
    code, _, err = command("train", root, *small, "--out", tmp_path / "run")
    assert code == 0, err
    assert err.count("are in train too") == 1


def test_arrays_leak_too(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (10, 4, 4), dtype=np.uint8)
    labels = np.arange(10) % 2
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels, x_test=images[:3], y_test=labels[:3])
    dataset = open_data(tmp_path / "a.npz")
    taken = {bytes(image) for image in dataset.split("val").pixels.numpy()} if dataset.splits["val"] else set()
    held = sum(bytes(image) not in taken for image in images[:3])  # those whose twin in train went to val
    assert f"{held} images that are evaluated" in leakage(dataset)
    np.savez(tmp_path / "b.npz", images=np.concatenate([images, images]), labels=np.tile(labels, 2))
    assert leakage(open_data(tmp_path / "b.npz")) == ""  # split by content: copies stay together


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ("{x}-{00..02}.tar", ["{x}-00.tar", "{x}-01.tar", "{x}-02.tar"]),
        ("{}{0..1}-{8..9}{0}.tar", ["{}0-8{0}.tar", "{}0-9{0}.tar", "{}1-8{0}.tar", "{}1-9{0}.tar"]),
        ("{x}.tar", ["{x}.tar"]),
    ],
)
def test_braces_that_are_no_range_are_part_of_the_names(tmp_path: Path, data: str, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert expand(str(tmp_path / data)) == [str(tmp_path / name) for name in names]
