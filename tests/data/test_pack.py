"""`vitkit data pack`: what goes in comes out, for vitkit and for others who read such files."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from making import encode, photo

from vitkit.data import open_data
from vitkit.data import pack as packing
from vitkit.data.decode import decode
from vitkit.data.pack import pack
from vitkit.data.source import Source
from vitkit.errors import ConfigError, DataError
from vitkit.io import parse_bytes

KINDS = ["shards", "parquet"]
CLASSES = ("10", "9", "cat")


def write_folder(root: Path, classes: tuple[str, ...] = CLASSES, each: int = 8) -> Path:
    for number, name in enumerate(classes):
        for i in range(each):
            split = "val" if i == 7 else "train"
            (root / split / name).mkdir(parents=True, exist_ok=True)
            kind = ("JPEG", "PNG", "WEBP")[i % 3]
            (root / split / name / f"{i}.{kind.lower()}").write_bytes(encode(photo(10 * number + i, (40, 30)), kind))
    return root


def write_list(root: Path, column: Callable[[int], dict[str, object]]) -> Path:
    root.mkdir()
    for i in range(12):
        (root / f"{i}.jpg").write_bytes(encode(photo(i, (20, 30))))
    rows = [{"path": f"{i}.jpg", "split": "test" if i % 4 == 0 else "train", **column(i)} for i in range(12)]
    (root / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root / "list.jsonl"


def labelled(root: Path) -> Path:
    return write_list(root, lambda i: {"labels": [["x", "y"], ["z"], [], ["y"]][i % 4]})


def valued(root: Path) -> Path:
    return write_list(root, lambda i: {"target_age": i / 7, "target_height": 1e-4 * i})


def arrays(root: Path) -> Path:
    root.mkdir()
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (30, 6, 6), dtype=np.uint8)
    np.savez(root / "a.npz", images=images, labels=np.arange(30) % 3)
    return root / "a.npz"


def odd_names(root: Path) -> Path:
    return write_folder(root, ("two\nlines", "a|b", "é"))


def content(source: Source) -> list[tuple[str, str, bytes]]:
    """The split, label and pixels of every sample, in any order."""
    every = range(len(source))
    return sorted((source.split, source.label_name(i), np.asarray(source.image(i, 3)).tobytes()) for i in every)


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("write", [write_folder, labelled, valued, arrays, odd_names])
def test_what_goes_in_comes_out(tmp_path: Path, write: Callable[[Path], Path], to: str) -> None:
    data = open_data(write(tmp_path / "set"))
    packed = pack(data, tmp_path / "out", to, shard_size="12KB")
    found = open_data(tmp_path / "out", target=data.targets)
    assert (found.classes, found.targets, found.splits) == (data.classes, data.targets, data.splits)
    assert packed.splits == data.splits
    assert packed.files == len([*(tmp_path / "out").glob("*.tar"), *(tmp_path / "out").glob("*.parquet")]) > 1
    for split in data.splits:
        assert content(found.split(split)) == content(data.split(split))
    assert not found.lost
    if write is not arrays:
        own = {data.samples.encoded(i) for i in range(len(data.samples))}
        raw = {Path(str(p)).read_bytes() for p in own}
        assert {found.samples.encoded(i) for i in range(len(found.samples))} == raw  # byte for byte


def test_webdataset_reads_the_shards(tmp_path: Path) -> None:
    import webdataset as wds

    data = open_data(write_folder(tmp_path / "set"))
    pack(data, tmp_path / "out", shard_size="12KB")
    urls = sorted(str(p) for p in (tmp_path / "out").glob("train-*.tar"))
    names = (tmp_path / "out" / "classes.txt").read_text().splitlines()
    read = wds.WebDataset(urls, shardshuffle=False, empty_check=False).decode("pil")
    found = [(names[sample["cls"]], sample.get("jpg") or sample.get("png")) for sample in read]
    source = data.split("train")
    assert sorted(name for name, _ in found) == sorted(source.label_name(i) for i in range(len(source)))
    pixels = {np.asarray(image.convert("RGB")).tobytes() for _, image in found if image is not None}  # it knows no webp
    assert len(pixels) == 15
    assert pixels <= {np.asarray(source.image(i, 3)).tobytes() for i in range(len(source))}


@pytest.mark.parametrize("write", [write_folder, labelled, valued])
def test_pyarrow_and_datasets_read_the_parquet(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    import pyarrow.parquet as pq

    data = open_data(write(tmp_path / "set"))
    pack(data, tmp_path / "out", "parquet")
    path = next((tmp_path / "out").glob("train-*.parquet"))
    rows = pq.read_table(path).to_pylist()
    source = data.split("train")
    assert len(rows) == len(source)
    assert {r["image"]["bytes"] for r in rows} == {
        Path(str(source.encoded(i))).read_bytes() for i in range(len(source))
    }
    datasets = pytest.importorskip("datasets")
    features = datasets.Features.from_arrow_schema(pq.read_schema(path))
    assert isinstance(features["image"], datasets.Image)
    if write is write_folder:
        assert features["label"].names == list(data.classes)
    elif write is labelled:
        assert features["labels"].feature.names == list(data.classes)
        assert sorted(len(r["labels"]) for r in rows) == sorted(source.labels.sum(axis=1).tolist())
    else:
        assert features["target_age"].dtype == "float32"


def test_images_are_encoded_again_only_when_asked(tmp_path: Path) -> None:
    data = open_data(write_folder(tmp_path / "set"))
    small = open_data(pack_to(data, tmp_path / "small", size=15))
    assert {small.samples.image(i).size for i in range(24)} == {(20, 15)}
    assert all(small.samples.encoded(i).startswith(b"\xff\xd8") for i in range(24))
    same = open_data(pack_to(data, tmp_path / "same", size=30))
    assert {decode(same.samples.encoded(i)).size for i in range(24)} == {(40, 30)}
    assert not all(same.samples.encoded(i).startswith(b"\xff\xd8") for i in range(24))  # as they were
    coarse = open_data(pack_to(data, tmp_path / "coarse", quality=20))
    assert all(coarse.samples.encoded(i).startswith(b"\xff\xd8") for i in range(24))
    assert {coarse.samples.image(i).size for i in range(24)} == {(40, 30)}


def pack_to(data: object, out: Path, **how: object) -> Path:
    pack(data, out, **how)
    return out


def test_bad_files_are_listed_and_left_out(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    write_folder(tmp_path / "set")
    (tmp_path / "set" / "train" / "cat" / "bad.jpg").write_bytes(b"no image")
    code, out, _ = command("data", "pack", tmp_path / "set", "--to", "shards", tmp_path / "out")
    assert code == 0
    assert "train 21, val 3" in out
    assert "1 unreadable" in out
    with (tmp_path / "out" / "bad-files.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(Path(r["path"]).name, r["class"]) for r in rows] == [("bad.jpg", "cat")]
    code, _, err = command("data", "pack", tmp_path / "set", tmp_path / "out2", "--max-bad", "0")
    assert code == 2
    assert "bad.jpg" in err


def test_images_without_labels(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    for i in range(5):
        (tmp_path / "flat").mkdir(exist_ok=True)
        (tmp_path / "flat" / f"{i}.png").write_bytes(encode(photo(i, (8, 8)), "PNG"))
    for to in KINDS:
        code, out, err = command("data", "pack", tmp_path / "flat", tmp_path / to, "--to", to, "--unlabelled", "--json")
        assert code == 0, err
        assert sum(json.loads(out)["splits"].values()) == 5
        assert len(open_data(tmp_path / to, labelled=False).samples) == 5


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".tar", ".parquet", ".txt")}


@pytest.mark.parametrize("to", KINDS)
def test_an_interrupted_pack_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    data = open_data(write_folder(tmp_path / "set"))
    pack(data, tmp_path / "whole", to, shard_size="12KB")
    written: list[str] = []
    write, pattern = packing.WRITERS[to]

    def dying(path: Path, *how: object) -> object:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path.name)
        return write(path, *how)

    with monkeypatch.context() as patched:
        patched.setitem(packing.WRITERS, to, (dying, pattern))
        with pytest.raises(KeyboardInterrupt):
            pack(data, tmp_path / "out", to, shard_size="12KB")
    with pytest.raises(DataError, match="a pack of another set or with other options; choose an empty folder"):
        pack(data, tmp_path / "out", to, shard_size="12KB", size=8)
    after: list[str] = []
    monkeypatch.setitem(packing.WRITERS, to, (lambda p, *how: (after.append(p.name), write(p, *how))[1], pattern))
    again = pack(data, tmp_path / "out", to, shard_size="12KB")
    assert not set(after) & set(written)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert not (tmp_path / "out" / ".pack").exists()
    after.clear()
    assert pack(data, tmp_path / "out", to, shard_size="12KB") == again  # finished: nothing to do
    assert not after


def test_what_cannot_be_packed_is_told(tmp_path: Path) -> None:
    data = open_data(write_folder(tmp_path / "set"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(DataError, match="holds something else"):
        pack(data, tmp_path / "full")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["letter.txt"]
    with pytest.raises(ConfigError, match="choose shards or parquet"):
        pack(data, tmp_path / "out", "zip")
    with pytest.raises(ConfigError, match="1GB"):
        pack(data, tmp_path / "out", shard_size="much")
    odd = open_data(write_folder(tmp_path / "odd", (" blank ", "b")))
    with pytest.raises(DataError, match="' blank ' begins or ends with a blank"):
        pack(odd, tmp_path / "out")
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 5, 8, 8), np.uint8), labels=np.arange(4) % 2)
    with pytest.raises(DataError, match="5 channels"):
        pack(tmp_path / "a.npz", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [parse_bytes(t) for t in ("1GB", "500 mb", "1.5k", 7)] == [10**9, 5 * 10**8, 1500, 7]


def test_shards_hold_equal_numbers(tmp_path: Path) -> None:
    pack("digits", tmp_path / "out", shard_size="100KB")
    counts = []
    for path in (tmp_path / "out").glob("train-*.tar"):
        with tarfile.open(path) as tar:
            counts.append(len(tar.getnames()) // 2)
    assert len(counts) % 8 == 0
    assert max(counts) - min(counts) <= 1


@pytest.mark.slow
def test_a_killed_pack_continues(tmp_path: Path) -> None:
    """SIGKILL with two processes at work, again and again, until it gets through."""
    write_folder(tmp_path / "set", each=40)
    whole = pack(tmp_path / "set", tmp_path / "whole", shard_size="4KB")
    code = "import sys; from vitkit.data.pack import pack; pack(*sys.argv[1:], shard_size='4KB', workers=2)"
    for kill in range(20):
        process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "set", tmp_path / "out"])
        seen = len(list((tmp_path / "out").glob("*.tar")))
        while process.poll() is None and kill < 19:
            if len(list((tmp_path / "out").glob("*.tar"))) > seen + 4:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.01)
        if process.wait() == 0:
            break
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert open_data(tmp_path / "out").splits == whole.splits
