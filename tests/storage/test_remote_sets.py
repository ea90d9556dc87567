"""Every kind of set behind a URL is the set on disk, sample by sample, under other names."""

import csv
import dataclasses
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitkit.data import open_data
from vitkit.data.decode import BadImage
from vitkit.data.identity import identity
from vitkit.data.source import Source
from vitkit.errors import DataError, StorageError
from vitkit.prediction import open_inputs
from vitkit.storage import cache, remote


def png(seed: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(out, "PNG")
    return out.getvalue()


def make_sets(root: Path) -> None:
    """A folder of classes, lists, arrays, Parquet and shards with the same 24 images."""
    rows = []
    shards: dict[str, list[tuple[str, bytes, str]]] = {}
    for number in range(24):
        label, split = ("cat", "dog")[number % 2], ("train", "train", "val")[number % 3]
        name = f"{split}/{label}/{number:02d}.png"
        (root / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "images" / name).write_bytes(png(number))
        rows.append({"path": f"images/{name}", "label": label, "split": split})
        shards.setdefault(f"{split}-000{number % 2}", []).append((f"{number:02d}", png(number), label))
    with (root / "list.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["path", "label", "split"])
        writer.writeheader()
        writer.writerows(rows)
    (root / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "list.txt").write_text("".join(f"{row['path']} {row['label']}\n" for row in rows))
    pixels = np.random.default_rng(0).integers(0, 256, (12, 4, 4), dtype=np.uint8)
    np.savez(root / "arrays.npz", images=pixels, labels=np.arange(12) % 3)
    write_parquet(root / "packed" / "train.parquet")
    for shard, members in shards.items():
        (root / "shards").mkdir(exist_ok=True)
        with tarfile.open(root / "shards" / f"{shard}.tar", "w") as tar:
            for key, image, label in members:
                for name, content in ((f"{key}.png", image), (f"{key}.cls", label.encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def write_parquet(path: Path, where: str = "") -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": png(i), "path": where or f"{i}.png"} for i in range(8)]
    pq.write_table(pa.table({"image": images, "label": ["a", "b"] * 4}), path)


def upload(root: Path, url: str) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            remote.put_bytes(path.read_bytes(), f"{url}/{path.relative_to(root).as_posix()}")


def samples(source: Source) -> list[tuple[bytes, list[int]]]:
    return [(np.asarray(source.image(i)).tobytes(), source.labels[i].tolist()) for i in range(len(source))]


SETS = ["images", "list.csv", "list.jsonl", "list.txt", "arrays.npz", "packed", "packed/train.parquet", "shards"]
SETS += ["shards/train-{0000..0001}.tar"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    make_sets(root)
    return root


@pytest.mark.parametrize("name", SETS)
def test_a_set_behind_a_url_is_the_set_on_disk(memory: str, made: Path, name: str) -> None:
    upload(made, f"{memory}/some/sets")
    here, there = open_data(made / name), open_data(f"{memory}/some/sets/{name}")
    assert there.splits == here.splits
    assert there.classes == here.classes
    for split in filter(here.splits.get, here.splits):
        assert samples(there.split(split)) == samples(here.split(split))
        names = [there.split(split).where(i) for i in range(there.splits[split])]
        base = f"{memory}/some/sets/"
        assert all(n.startswith(base) for n in names)
        assert [n.removeprefix(base) for n in names] == [
            here.split(split).where(i).removeprefix(f"{made}/") for i in range(here.splits[split])
        ]


def test_sets_on_s3_and_what_they_consist_of(s3: str, made: Path) -> None:
    upload(made, f"{s3}/sets")
    for name in ("images", "list.csv", "shards", "shards/train-{0000..0001}.tar"):
        here, there = open_data(made / name), open_data(f"{s3}/sets/{name}")
        assert samples(there.split("train")) == samples(here.split("train"))
        before = identity(there)
        assert identity(open_data(f"{s3}/sets/{name}")) == before
    remote.put_bytes(png(99), f"{s3}/sets/images/train/cat/00.png")
    assert identity(open_data(f"{s3}/sets/images")) != identity(there)
    changed = open_data(f"{s3}/sets/list.csv").split("train")
    assert np.asarray(changed.image(0)).tobytes() == Image.open(io.BytesIO(png(99))).tobytes()


def test_images_for_prediction(memory: str, made: Path) -> None:
    upload(made, f"{memory}/sets")
    one = open_inputs([f"{memory}/sets/images/val/cat/02.png"])
    assert len(one) == 1
    assert np.asarray(one.image(0)).tobytes() == Image.open(io.BytesIO(png(2))).tobytes()
    many = open_inputs([f"{memory}/sets/images"])
    assert [many.where(i).rsplit("/", 1)[1] for i in range(len(many))] == [
        Path(p).name for p in sorted(map(str, (made / "images").rglob("*.png")))
    ]
    assert len(open_inputs([f"{memory}/sets/shards"])) == 24


def test_an_own_list_may_name_urls(memory: str, made: Path, tmp_path: Path) -> None:
    upload(made, f"{memory}/sets")
    near = made / "images/train/dog/01.png"
    (tmp_path / "mine.csv").write_text(f"path,label\n{memory}/sets/images/train/cat/00.png,a\n{near},b\n")
    opened = open_data(tmp_path / "mine.csv", labelled=False).split("all")
    found = {np.asarray(opened.image(i)).tobytes() for i in range(2)}
    assert found == {Image.open(io.BytesIO(png(i))).tobytes() for i in (0, 1)}


@pytest.mark.parametrize("row", ["/etc/passwd", "~/x.png", "../../../x.png", "s3://elsewhere/x.png", "http://h/x.png"])
def test_a_list_from_elsewhere_may_not_lead_elsewhere(memory: str, row: str) -> None:
    remote.put_bytes(f"path,label\n{row},a\n".encode(), f"{memory}/sets/list.csv")
    with pytest.raises(DataError, match=r"which is not in memory://bucket; .* copy it to this machine"):
        open_data(f"{memory}/sets/list.csv")


def test_a_packed_set_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(url: str) -> remote.FileSystem:
        raise AssertionError(f"{url} was asked for")

    monkeypatch.setattr(remote, "filesystem", refused)
    write_parquet(tmp_path / "set.parquet", where="http://169.254.169.254/latest/meta-data")
    opened = open_data(tmp_path / "set.parquet").split("all")
    assert len(samples(opened)) == 8


def test_what_is_gone_is_a_bad_image_and_a_silent_server_is_not(
    memory: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(made, f"{memory}/sets")
    opened = open_data(f"{memory}/sets/images").split("train")
    remote.remove(opened.where(0))
    cache.make_room(0)
    with pytest.raises(BadImage, match="vanished"):
        opened.image(0)

    def silent(url: str) -> remote.FileSystem:
        raise TimeoutError("no answer")

    monkeypatch.setattr(remote, "filesystem", silent)
    with pytest.raises(StorageError, match=r"could not be read in 8 attempts \(no answer\)"):
        opened.image(1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("memory://bucket/nothing", "there is nothing at memory://bucket/nothing; check the address"),
        ("memory://bucket/nothing.csv", "there is no file memory://bucket/nothing.csv; check the address"),
        ("memory://bucket/x-{0..3}.tar", "4 of 4 shards do not exist, first memory://bucket/x-0.tar"),
        ("http://127.0.0.1:9/folder", "web servers do not list folders; name a file"),
        ("s3n://bucket/set", "s3n:// is not read"),
    ],
)
def test_what_is_not_there_is_told_in_words(memory: str, data: str, words: str) -> None:
    with pytest.raises((StorageError, DataError), match=words):
        open_data(data)


def test_half_a_shard_is_told(memory: str, made: Path) -> None:
    whole = (made / "shards/train-0000.tar").read_bytes()
    remote.put_bytes(whole[: len(whole) * 2 // 3], f"{memory}/train-0.tar")
    opened = open_data(f"{memory}/train-{{0..0}}.tar")
    assert any("cut short" in line and f"{memory}/train-0.tar" in line for line in opened.lost)


def test_an_index_is_published_and_may_not_lead_elsewhere(memory: str, made: Path) -> None:
    from vitkit.curation import build_index, open_index

    upload(made, f"{memory}/sets")
    here = build_index(made / "images", out=made / "here.index")
    build_index(f"{memory}/sets/images", out=f"{memory}/sets/images.index")
    there = open_index(f"{memory}/sets/images.index")
    assert np.array_equal(here.features, there.features)
    assert len(there.catalogue()) == 24
    for what, url in (("data", "http://169.254.169.254/latest.csv"), ("model", "s3://elsewhere/model.safetensors")):
        changed = dataclasses.replace(there, about={**there.about, what: url})
        with pytest.raises(DataError, match="may not lead elsewhere"):
            changed.catalogue() if what == "data" else changed.embedder()
