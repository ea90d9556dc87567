"""Files all or nothing, and what a killed writer leaves behind."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import vitkit.io as files
from vitkit.errors import WriteError


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    out = tmp_path / "a.txt"
    left = [tmp_path / ".a.txt.0123abcd.part", tmp_path / ".a.txt.0123abce.part"]
    other = [tmp_path / ".a.txt.part", tmp_path / ".b.txt.0123abcd.part", tmp_path / ".a.txt.0123abcx.part"]
    left[0].write_text("half")
    left[1].mkdir()
    for path in other:
        path.write_text("not ours")
    with files.replacing(out) as file:
        file.write(b"slow")
        files.write_text(out, "fast")  # another writer of the same name cleans up meanwhile
        assert len(list(tmp_path.glob(".a.txt.????????.part"))) == 2, (
            "the first writer and a name that is no hexadecimal"
        )
    assert out.read_text() == "slow"
    assert all(path.exists() for path in other)
    assert not any(path.exists() for path in left)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_a_full_disk_is_noticed_by_small_arrays_too() -> None:
    """numpy.save writes through a buffer of its own and does not look whether that could be emptied."""
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "wb") as file:
        files.write_npy(file, np.zeros((16, 16)))


@pytest.mark.parametrize(
    "array", [np.zeros((0, 0)), np.arange(6.0).reshape(2, 3).T, np.int64(3), np.array(["a", "bc"])]
)
def test_arrays_are_written_as_numpy_writes_them(array: np.ndarray) -> None:
    ours, theirs = io.BytesIO(), io.BytesIO()
    files.write_npy(ours, array)
    np.save(theirs, np.ascontiguousarray(array))
    assert ours.getvalue() == theirs.getvalue()


def test_numbers_that_are_not_finite_are_null() -> None:
    value = {"a": [float("nan"), 1.5, (float("-inf"),)], "b": np.array([np.inf, 2.0]), "c": "NaN", "d": None, "e": True}
    text = files.dumps(value, default=np.ndarray.tolist)
    assert text == '{"a": [null, 1.5, [null]], "b": [null, 2.0], "c": "NaN", "d": null, "e": true}'
    assert json.loads(files.json_text({"x": float("nan")})) == {"x": None}


def test_a_folder_is_replaced_in_one_step(tmp_path: Path) -> None:
    out = tmp_path / "folder"
    for content in ("old", "new"):
        with files.replacing_folder(out) as new:
            (new / "x").write_text(content)
    assert (out / "x").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_folder_is_replaced_where_names_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    test_a_folder_is_replaced_in_one_step(tmp_path)


def test_a_folder_moved_aside_by_a_killed_process_comes_back(tmp_path: Path) -> None:
    (tmp_path / ".folder.0123abcd.old").mkdir()
    (tmp_path / ".folder.0123abcd.old" / "x").write_text("old")
    files.remove_leftovers(tmp_path / "folder")
    assert (tmp_path / "folder" / "x").read_text() == "old"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(WriteError), files.replacing_folder(tmp_path / "x"):
        pass
    assert (tmp_path / "x").read_text() == "mine"


@pytest.mark.parametrize("exchange", [True, False])
def test_files_are_added_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    out = tmp_path / "out"
    for content, others in (("1", []), ("2", []), ("3", ["theirs"])):
        for name in others:
            (out / name).write_text("theirs")
        with files.adding_to_folder(out) as new:
            (new / "deep").mkdir()
            (new / "deep" / "x").write_text(content)
        assert (out / "deep" / "x").read_text() == content
        assert all((out / name).read_text() == "theirs" for name in others)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_named_also_inside_torch_save(tmp_path: Path) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def flush(self) -> None: ...

    with pytest.raises(WriteError, match="No space left on device"), files.replacing(tmp_path / "x.pt"):
        torch.save({"x": torch.zeros(1000)}, Full())  # PyTorch raises a RuntimeError about positions
    assert not list(tmp_path.iterdir())


def _hold(path: str, started: object, end: object) -> None:
    with files.replacing(Path(path)):
        started.set()  # type: ignore[attr-defined]
        end.wait()  # type: ignore[attr-defined]


def test_a_killed_writer_is_cleaned_up_after(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started, end = context.Event(), context.Event()
    writer = context.Process(target=_hold, args=(str(tmp_path / "x"), started, end))
    writer.start()
    assert started.wait(30)
    files.write_text(tmp_path / "x", "one")
    assert len(list(tmp_path.iterdir())) == 2, "the writer lives"
    writer.kill()
    writer.join()
    files.write_text(tmp_path / "x", "two")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
