"""An open index owns what it read: its files may be overwritten, cut or replaced, and a stranger may have made them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.making import photo
from vitkit.curation import build_index, looks, open_index, stored
from vitkit.curation.apply import apply, write_issues
from vitkit.curation.catalogue import open_catalogue
from vitkit.curation.clean import Issue
from vitkit.curation.leaks import leak_warning
from vitkit.curation.map import build_map
from vitkit.curation.stored import read_rows
from vitkit.data import open_data
from vitkit.errors import DataError
from vitkit.io import sha256


def resigned(folder: Path) -> None:
    """A stranger writes digests that fit."""
    about = json.loads((folder / "about.json").read_text())
    for name in about["files"]:
        about["files"][name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    (folder / "about.json").write_text(json.dumps(about))


@pytest.fixture(params=["in memory", "beyond memory"])
def index(request: pytest.FixtureRequest, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "beyond memory":
        monkeypatch.setattr(stored, "IN_MEMORY", 1000)
    return build_index(photos, out=tmp_path / "i").path


def test_an_open_index_does_not_see_its_file_again(index: Path) -> None:
    opened = open_index(index)
    before = np.array(opened.features)
    file = index / "features.npy"
    with file.open("r+b") as f:  # in place, and then shorter: a map would change, and end the process by SIGBUS
        f.write(bytes(file.stat().st_size))
        f.truncate(0)
    np.testing.assert_array_equal(opened.features, before)
    with pytest.raises(DataError, match="is damaged"):
        open_index(index)


def test_an_update_reads_the_old_rows_of_either_kind(index: Path, photos: Path) -> None:
    before = (index / "features.npy").read_bytes()
    (photos / "train" / "a" / "02.png").touch()
    build_index(photos, out=index)
    assert (index / "features.npy").read_bytes() == before


def test_thumbnails_are_not_mapped(photos: Path, tmp_path: Path) -> None:
    found = build_index(photos, out=tmp_path / "i").looks()
    digests = found["digest"]
    piece = tmp_path / "i" / "looks" / "000000.npy"
    content = piece.read_bytes()
    with piece.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(DataError, match="changed while it was read"):
        found["digest"]
    with pytest.raises(DataError, match="changed while it was read"):
        found.thumbnails(np.array([3]))
    piece.write_bytes(content)
    assert (found["digest"] == digests).all()
    assert found.thumbnails(np.array([3, 1, 3])).shape == (3, 64, 64, 3)


def test_of_thumbnails_only_those_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs have rows far apart: reading whole pieces for each would read the set again and again."""
    folder = tmp_path / "set"
    folder.mkdir()
    for i in range(7):
        Image.new("RGB", (20, 20), (30 * i, 0, 0)).save(folder / f"{i}.png")
    monkeypatch.setattr(looks, "_PIECE", 2)
    found = build_index(folder, out=tmp_path / "i").looks()
    assert len(found.pieces) == 4
    read: list[int] = []

    def counted(path: Path, kind: np.dtype, count: int, rows: np.ndarray) -> np.ndarray:
        read.extend(rows.tolist())
        return read_rows(path, kind, count, rows)

    monkeypatch.setattr(looks, "read_rows", counted)
    monkeypatch.setattr(looks, "read_array", None)
    shown = found.thumbnails(np.array([6, 1, 6, 2]))
    assert shown[:, 5, 5, 0].tolist() == [180, 30, 180, 60]
    assert len(read) == 4


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("name", ["features.npy", "samples.jsonl", "about.json"])
def test_a_pipe_in_an_index_is_refused_and_not_waited_for(name: str, photos: Path, tmp_path: Path) -> None:
    build_index(photos, out=tmp_path / "i")
    (tmp_path / "i" / name).unlink()
    os.mkfifo(tmp_path / "i" / name)
    with pytest.raises(DataError, match=r"damaged|is no index"):
        open_index(tmp_path / "i")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pipe_among_the_looks_is_made_again(photos: Path, tmp_path: Path) -> None:
    made = build_index(photos, out=tmp_path / "i")
    (tmp_path / "i" / "looks").mkdir()
    os.mkfifo(tmp_path / "i" / "looks" / "000000.npy")
    assert len(made.looks()["digest"]) == 20


@pytest.mark.parametrize("shape", [(2**40, 692), (20, 2**40), (-20, 692), (20,), (20, 692, 1)])
def test_a_header_may_claim_any_shape(shape: tuple[int, ...], photos: Path, tmp_path: Path) -> None:
    features = build_index(photos, out=tmp_path / "i").path / "features.npy"
    values = features.read_bytes()[128:]
    with features.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        file.write(values)
    resigned(tmp_path / "i")
    with pytest.raises(DataError, match="is damaged"):
        open_index(tmp_path / "i")


def test_a_number_that_is_none_is_refused(photos: Path, tmp_path: Path) -> None:
    features = build_index(photos, out=tmp_path / "i").path / "features.npy"
    content = bytearray(features.read_bytes())
    content[-4:] = np.array([np.nan], "<f4").tobytes()
    features.write_bytes(content)
    resigned(tmp_path / "i")
    with pytest.raises(DataError, match="no finite numbers"):
        open_index(tmp_path / "i")


@pytest.mark.parametrize("name", ["layout.npy", "neighbours.npy"])
def test_what_a_stranger_put_into_a_map_is_made_again(name: str, photos: Path, tmp_path: Path) -> None:
    index = build_index(photos, out=tmp_path / "i")
    source = index.catalogue().source
    made = build_map(index, source, method="tsne")
    with (made.folder / name).open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (2**44,)})
    again = build_map(index, source, method="tsne")
    np.testing.assert_array_equal(again.places, made.places)
    if hasattr(os, "mkfifo"):
        (made.folder / name).unlink()
        os.mkfifo(made.folder / name)
        np.testing.assert_array_equal(build_map(index, source, method="tsne").neighbours, made.neighbours)


ODD = [
    ("bad", [{}]),
    ("bad", 3),
    ("model", 3),
    ("data", None),
    ("digest", [1]),
    ("classes", "ab"),
    ("classes_from", []),
]


@pytest.mark.parametrize(("name", "value"), ODD)
def test_fields_of_another_kind_are_refused(name: str, value: object, photos: Path, tmp_path: Path) -> None:
    path = build_index(photos, out=tmp_path / "i").path / "about.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(DataError, match="is damaged"):
        open_index(tmp_path / "i")


@pytest.mark.parametrize("row", [[3, 0, "train", "k"], ["a", 0.5, "train", "k"], ["a", 0, None, "k"], ["a", 10**30]])
def test_samples_of_another_kind_are_refused(row: list[object], photos: Path, tmp_path: Path) -> None:
    path = build_index(photos, out=tmp_path / "i").path / "samples.jsonl"
    path.write_text("\n".join([*path.read_text().splitlines()[:-1], json.dumps(row)]))
    resigned(tmp_path / "i")
    with pytest.raises(DataError, match="is damaged"):
        open_index(tmp_path / "i")


def test_files_that_are_not_ours_are_never_removed(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("about.json", "letter.txt"):
        (tmp_path / "mine" / name).write_text("{}")
    for force in (False, True):
        with pytest.raises(DataError, match=r"not of an index, such as letter.txt; choose another --out"):
            build_index(photos, out=tmp_path / "mine", force=force)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "{}"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pipe_for_leaks_does_not_stop_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set.index").mkdir()
    os.mkfifo(tmp_path / "set.index" / "leaks.json")
    assert leak_warning("set") == ""


def test_issues_about_names_that_look_like_formulas_are_applied(tmp_path: Path) -> None:
    """In issues.csv such names have an apostrophe before them; the list names files and classes as they are."""
    for number, name in enumerate(["=cmd", "@b"]):
        for i in range(3):
            path = tmp_path / "set" / name / f"-{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            photo(3 * number + i).save(path)
    first, *_, last = open_catalogue(tmp_path / "set").paths
    rows = [Issue(first, "label", "", "=cmd", "@b", 1.0), Issue(last, "junk", "", "@b", "drop", 1.0)]
    write_issues(tmp_path / "issues.csv", rows)
    assert "'@b" in (tmp_path / "issues.csv").read_text()
    done = apply(tmp_path / "issues.csv", tmp_path / "set" / "list.csv", data=str(tmp_path / "set"))
    assert (done.kept, done.dropped, done.relabelled) == (5, 1, 1)
    written = (tmp_path / "set" / "list.csv").read_text().splitlines()[1:]
    assert sorted(line.split(",")[1] for line in written) == ["=cmd", "=cmd", "@b", "@b", "@b"]
    assert all(line.startswith(("./=cmd/", "./@b/")) for line in written)
    assert sorted(open_data(tmp_path / "set" / "list.csv").classes) == ["=cmd", "@b"]


def test_a_header_that_never_ends_is_told_in_words(photos: Path, tmp_path: Path) -> None:
    """The reader of numpy raises an error of its own for it (found by fuzzing)."""
    features = build_index(photos, out=tmp_path / "i").path / "features.npy"
    features.write_bytes(features.read_bytes().replace(b"'shape': (20", b"'shape': (((", 1))
    resigned(tmp_path / "i")
    with pytest.raises(DataError, match="has no header that can be read"):
        open_index(tmp_path / "i")


def test_issues_beside_another_clean_json_ask_for_the_set(tmp_path: Path) -> None:
    write_issues(tmp_path / "issues.csv", [])
    for about in ({"data": ["set"] * 300}, {"data": "set", "classes_from": []}, [], "set"):
        (tmp_path / "clean.json").write_text(json.dumps(about))
        with pytest.raises(DataError, match="add --data DATA"):
            apply(tmp_path / "issues.csv", tmp_path / "list.csv")


def test_an_image_to_search_for_that_is_none_is_named(photos: Path, tmp_path: Path) -> None:
    index = build_index(photos, out=tmp_path / "i")
    with pytest.raises(DataError, match=r"photos cannot be read: .*; give the file of an image"):
        index.search(photos)
