"""The index beside shards: the same set with it and without, noticed when it is stale, never believed when damaged."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from making import encode, photo

from vitkit.data import open_data
from vitkit.data.dataset import Dataset
from vitkit.data.sources import shardtable, tarscan
from vitkit.data.sources.shardindex import open_index
from vitkit.data.sources.tarscan import scan
from vitkit.errors import DataError


@pytest.fixture(autouse=True)
def every_set_is_worth_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shardtable, "_WORTH", 0)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))


def write_shard(path: Path, first: int, count: int, labels: str = "ab", **extra: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for i in range(first, first + count):
            label = labels[i % len(labels)].encode()
            for suffix, data in {"png": encode(photo(i, (8, 8)), "PNG"), "cls": label, **extra}.items():
                info = tarfile.TarInfo(f"{i:05}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(4):
        write_shard(tmp_path / "set" / f"train-{number}.tar", 10 * number, 10)
    write_shard(tmp_path / "set" / "val-0.tar", 100, 5)
    return tmp_path / "set"


def contents(data: Dataset) -> list[object]:
    every = data.split("all")
    rows = [(every.where(i), every.label_name(i), every.encoded(i), every.length(i)) for i in range(len(every))]
    return [rows, data.classes, data.splits, data.lost, {s: r.tolist() for s, r in data.rows.items()}]


def without_index(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    with monkeypatch.context() as patched:
        patched.setattr(shardtable, "_WORTH", 1 << 60)
        patched.setattr(shardtable, "open_index", lambda path: None)
        return contents(open_data(path))


def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards whose headers are read from now on."""
    seen: list[str] = []
    monkeypatch.setattr(shardtable, "scan", lambda path: (seen.append(Path(path).name), scan(path))[1])
    return seen


def test_the_set_is_the_same_with_and_without_an_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = without_index(folder, monkeypatch)
    assert not (folder / "shards.index").exists()
    seen = scans(monkeypatch)
    assert contents(open_data(folder)) == expected  # made
    assert sorted(p.name for p in folder.iterdir() if p.suffix != ".tar") == ["shards.index"]
    assert len(seen) == 5
    assert contents(open_data(folder)) == expected  # read
    assert len(seen) == 5


def test_what_is_left_out_is_told_from_the_index_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(folder / "train-1.tar", "a") as tar:
        for name in ("bare.png", "00011.png"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    whole = (folder / "train-2.tar").read_bytes()
    (folder / "train-2.tar").write_bytes(whole[: len(whole) // 2])
    expected = without_index(folder, monkeypatch)
    lost = open_data(folder).lost
    assert open_data(folder).lost == lost
    assert contents(open_data(folder)) == expected
    assert "1 images of" in lost[0]
    assert any("cut short" in line for line in lost)
    assert (len(open_data(folder).samples), len(open_data(folder, labelled=False).samples)) == (42, 44)


def test_a_rewritten_shard_is_scanned_again_and_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_data(folder)
    seen = scans(monkeypatch)
    path = folder / "train-2.tar"
    before = path.stat()
    write_shard(path, 20, 10, labels="ba")  # as long as before
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # and as old
    assert path.stat().st_size == before.st_size
    assert contents(open_data(folder)) == without_index(folder, monkeypatch)
    assert seen == ["train-2.tar", *sorted(p.name for p in folder.glob("*.tar"))]  # the others by `without_index`
    seen.clear()
    open_data(folder)
    assert not seen


def test_shards_that_come_and_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    series = f"{folder}/train-{{0..1}}.tar"
    assert len(open_data(series).samples) == 20
    seen = scans(monkeypatch)
    assert len(open_data(folder).samples) == 45
    assert seen == ["train-2.tar", "train-3.tar", "val-0.tar"]
    (folder / "train-3.tar").unlink()
    write_shard(folder / "train-4.tar", 200, 3)
    assert len(open_data(folder).samples) == 38
    index = open_index(folder / "shards.index")
    assert index is not None
    assert list(index.shards) == ["train-0.tar", "train-1.tar", "train-2.tar", "train-4.tar", "val-0.tar"]


@pytest.mark.parametrize("at", ["magic", "head", "offsets", "keys", "end", "empty", "folder"])
def test_a_damaged_index_is_not_believed(folder: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    expected = contents(open_data(folder))
    path = folder / "shards.index"
    whole = bytearray(path.read_bytes())
    index = open_index(path)
    assert index is not None
    place = {"magic": 3, "head": 60, "offsets": index.column_starts[0] + 5, "keys": len(whole) - 3}
    if at in place:
        whole[place[at]] ^= 0x10
    path.unlink()
    if at == "folder":
        path.mkdir()
    else:
        path.write_bytes(whole[:-1] if at == "end" else b"" if at == "empty" else whole)
    if at == "keys":
        with pytest.raises(DataError, match=r"damaged.*remove this file, and it is made again"):
            contents(open_data(folder))
        path.unlink()
    assert contents(open_data(folder)) == expected


def test_a_folder_that_cannot_be_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardtable.os, "access", lambda path, mode: False)  # the superuser may write anywhere
    expected = contents(open_data(folder))
    assert not (folder / "shards.index").exists()
    assert len(list((tmp_path / "cache" / "shards").glob("*.index"))) == 1
    seen = scans(monkeypatch)
    assert contents(open_data(folder)) == expected
    assert not seen


def test_small_sets_need_no_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    open_data(folder)
    assert {p.suffix for p in folder.iterdir()} == {".tar"}


def test_labels_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, value in {"several": ["b", "a"], "values": {"age": 3.5, "height": 1e-3}, "number": 7}.items():
        text = json.dumps({"label": value}).encode()
        write_shard(tmp_path / kind / "train-0.tar", 0, 4, json=text, cls=b"")
        write_shard(tmp_path / kind / "val-0.tar", 9, 2, json=text, cls=b"")
        expected = without_index(tmp_path / kind, monkeypatch)
        for _ in range(2):
            assert contents(open_data(tmp_path / kind)) == expected
    assert open_data(tmp_path / "several").split("val").labels.tolist() == [[1, 1], [1, 1]]
    values = open_data(tmp_path / "values").split()
    assert values.targets == ("age", "height")
    assert np.array_equal(values.labels, np.float32([[3.5, 1e-3]] * 4))
    assert open_data(tmp_path / "values", target="height").split().labels.shape == (4, 1)


def test_memory_for_each_sample_and_a_copy_for_another_process(folder: Path) -> None:
    source = open_data(folder).split()
    table = source.shard_names.table
    assert (
        table.offsets.itemsize + table.sizes.itemsize + source.labels.itemsize + source.shard_names.rows.itemsize == 28
    )
    copy = pickle.loads(pickle.dumps(source))
    assert [copy.where(i) for i in range(len(copy))] == [source.where(i) for i in range(len(source))]
    write_shard(folder / "train-9.tar", 0, 2)
    gone = pickle.loads(pickle.dumps(source))
    open_data(folder)  # writes another index
    assert source.where(3).endswith("train-0.tar/00003")  # its own is still open
    with pytest.raises(DataError, match="another one has taken its place"):
        gone.where(3)


MAKE = """
import sys
from vitkit.data import open_data
from vitkit.data.sources import shardtable, tarscan
shardtable._WORTH = 0
print(len(open_data(sys.argv[1]).samples), flush=True)
"""
SLOWLY = """
import os, sys
from vitkit.data import open_data
from vitkit.data.sources import shardtable, tarscan
shardtable._WORTH = 0
scan, done = shardtable.scan, []
def scan_two(path):
    if len(done) == 2:
        print("two", flush=True)
        sys.stdin.read()
    done.append(path)
    return scan(path)
shardtable.scan = scan_two
open_data(sys.argv[1])
"""


@pytest.mark.slow
def test_a_kill_leaves_finished_shards_and_ranks_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is killed in the third of five shards; another waits for it, and scans the other three."""
    first = subprocess.Popen([sys.executable, "-c", SLOWLY, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == b"two\n"
    assert len(list((folder / ".shards.index.parts").glob("*.index"))) == 2
    second = subprocess.Popen([sys.executable, "-c", MAKE, folder], stdout=subprocess.PIPE)
    time.sleep(0.2)
    assert second.poll() is None
    kept = {p: p.stat().st_mtime_ns for p in (folder / ".shards.index.parts").glob("*.index")}
    assert len(kept) == 2
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert second.communicate(timeout=300)[0] == b"45\n"
    assert {p.name for p in folder.iterdir() if p.suffix != ".tar"} == {"shards.index"}
    seen = scans(monkeypatch)
    assert contents(open_data(folder))
    assert not seen


def test_finished_shards_are_not_scanned_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def dying(path: str) -> object:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(path)
        return scan(path)

    with monkeypatch.context() as patched:
        patched.setattr(shardtable, "scan", dying)
        with pytest.raises(KeyboardInterrupt):
            open_data(folder)
    seen = scans(monkeypatch)
    open_data(folder)
    assert seen == ["train-2.tar", "train-3.tar", "val-0.tar"]


@pytest.mark.slow
def test_processes_index_in_parallel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = without_index(folder, monkeypatch)
    monkeypatch.setattr(shardtable, "_PARALLEL", 0)
    assert contents(open_data(folder)) == expected
    (folder / "train-3.tar").write_bytes(b"x" * 2000)
    with pytest.raises(DataError, match=r"^the shard .*train-3.tar cannot be read.*leave it out of the range$"):
        open_data(folder)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("odd", ["", "x" * 120, "d/é", "folder", "cut", "spoilt"])
def test_headers_are_read_as_tarfile_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: int, odd: str) -> None:
    if len(odd) > 99 and form == tarfile.USTAR_FORMAT:
        pytest.skip("it has no place for such a name")
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=form) as tar:
        for i in range(6):
            key = f"{odd}{i}" if i == 3 and odd not in ("cut", "spoilt") else str(i)
            for suffix, data in (("png", encode(photo(i, (8, 8)), "PNG")), ("cls", b"ab"[i % 2 : i % 2 + 1])):
                info = tarfile.TarInfo(f"{'y' * 80}/{key}.{suffix}" if len(odd) > 99 else f"{key}.{suffix}")
                info.size = len(data)
                if odd == "folder" and i == 4:
                    info.type, info.size = tarfile.DIRTYPE, 0
                tar.addfile(info, io.BytesIO(data))
    whole = bytearray(path.read_bytes())
    if odd == "spoilt":
        whole[4 * 512 + 3] ^= 1
    path.write_bytes(whole[: len(whole) // 2] if odd == "cut" else whole)
    ours = scan(str(path))
    monkeypatch.setattr(tarscan, "_plain", lambda header: None)
    theirs = scan(str(path))
    for name in ("offsets", "sizes", "codes", "shares"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name))
    assert ([*ours.keys], ours.labels, ours.left_out) == ([*theirs.keys], theirs.labels, theirs.left_out)
