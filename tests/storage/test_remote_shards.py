"""Shards behind URLs: packed there with their index, opened without being read, and fetched before their turn."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vitkit.data import Augment, ImageBatches, Loader, loader, open_data
from vitkit.data.pack import pack
from vitkit.errors import DataError, StorageError
from vitkit.model.config import Preprocessing
from vitkit.model.zoo import config
from vitkit.storage import cache, remote

Fetched = Counter[str]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "set.npz"
    np.savez(path, images=rng.integers(0, 256, (96, 8, 8, 3), dtype=np.uint8), labels=np.arange(96) % 3)
    return path


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Fetched:
    """How often each file is fetched."""
    counts, fill = Counter[str](), cache.fetch

    def counted(url: str, known: remote.Stat, file: int) -> None:
        counts[url.rpartition("/")[2]] += 1
        fill(url, known, file)

    monkeypatch.setattr(cache, "fetch", counted)
    return counts


def elsewhere() -> None:
    """As a machine that has never seen the set."""
    for handle in cache._held.values():
        os.close(handle)
    cache._held.clear()
    cache._known.clear()
    shutil.rmtree(cache.folder(), ignore_errors=True)


@pytest.mark.parametrize("to", ["shards", "parquet"])
def test_a_set_is_packed_to_a_url(memory: str, images: Path, to: str, command: Callable) -> None:
    code, out, err = command("data", "pack", images, f"{memory}/packed", "--to", to, "--shard-size", "40KB", "--json")
    assert code == 0, err
    about = json.loads(out)
    assert about["out"] == f"{memory}/packed"
    elsewhere()
    here, there = open_data(images), open_data(f"{memory}/packed")
    assert there.splits == here.splits == about["splits"]
    assert there.classes == here.classes
    assert Counter(there.samples.labels.tolist()) == Counter(here.samples.labels.tolist())
    assert not os.path.exists("memory:")
    before = remote.find(f"{memory}/packed")
    assert command("data", "pack", images, f"{memory}/packed", "--to", to, "--shard-size", "40KB")[0] == 0
    assert remote.find(f"{memory}/packed") == before, "it is packed already"


def test_a_pack_that_was_stopped_continues(memory: str, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, sent = remote.put, list[str]()

    def failing(path: Path, url: str) -> None:
        if len(sent) == 2:
            raise StorageError("the network is gone; repeat the command")
        sent.append(path.name)
        put(path, url)

    with monkeypatch.context() as patched:
        patched.setattr(remote, "put", failing)
        with pytest.raises(StorageError):
            pack(images, f"{memory}/packed", shard_size="40KB")
    assert not {"shards.index"} & remote.find(f"{memory}/packed").keys()
    packed = pack(images, f"{memory}/packed", shard_size="40KB")
    assert packed.files == sum(name.endswith(".tar") for name in remote.find(f"{memory}/packed"))
    assert len(open_data(f"{memory}/packed").samples) == 96


def test_what_is_there_is_not_overwritten(memory: str, images: Path) -> None:
    remote.put_bytes(b"mine", f"{memory}/packed/notes.txt")
    with pytest.raises(DataError, match=r"holds something else.*choose an empty folder"):
        pack(images, f"{memory}/packed")
    pack(images, f"{memory}/other", shard_size="40KB")
    with pytest.raises(DataError, match="with other options; choose an empty folder"):
        pack(images, f"{memory}/other", shard_size="20KB")


@pytest.mark.parametrize("store", ["memory", "s3"])
def test_opening_fetches_the_index_and_no_shard(
    request: pytest.FixtureRequest, images: Path, fetched: Fetched, store: str
) -> None:
    url = f"{request.getfixturevalue(store)}/packed"
    packed = pack(images, url, shard_size="40KB")
    shards = sum(name.startswith("train-") for name in remote.find(url))
    assert shards > 2
    for data in (url, f"{url}/train-{{00000..{shards - 1:05d}}}.tar") if store == "s3" else (url,):
        elsewhere()
        fetched.clear()
        assert len(open_data(data).samples) == (96 if data == url else packed.splits["train"])
        tars = {name: n for name, n in fetched.items() if name.endswith(".tar")}
        assert len(tars) <= 1, "one, whose first images tell grey from colour"
        assert fetched["shards.index"] == 1


def test_an_index_of_other_shards_is_not_believed(memory: str, images: Path) -> None:
    pack(images, f"{memory}/packed", shard_size="40KB")
    name = sorted(n for n in remote.find(f"{memory}/packed") if n.startswith("train-"))[0]
    content = remote.read(f"{memory}/packed/{name}")
    half = len(content) // 2 // 512 * 512
    remote.put_bytes(content[:half] + bytes(len(content) - half), f"{memory}/packed/{name}")
    elsewhere()
    assert len(open_data(f"{memory}/packed").samples) < 96


@pytest.mark.parametrize("training", [True, False])
def test_shards_are_fetched_once_and_before_their_turn(
    memory: str, images: Path, fetched: Fetched, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    monkeypatch.setattr(loader, "SOON", 4)
    pack(images, f"{memory}/packed", shard_size="20KB")
    elsewhere()
    source = open_data(f"{memory}/packed").split("train")
    asked, prefetch = list[str](), cache.prefetch

    def noted(urls: list[str]) -> None:
        asked.extend(urls := list(urls))
        prefetch(urls)

    monkeypatch.setattr("vitkit.data.sources.shards.prefetch", noted)
    fetched.clear()
    if training:
        read = [i for batch in Loader(source, Preprocessing(size=(8, 8)), 8, Augment()) for i in batch.indices.tolist()]
    else:
        batches = ImageBatches(source, config("vit-8px/2")).batches([range(i, i + 4) for i in range(0, 64, 4)])
        read = [i for batch in batches for i in batch.indices]
    assert len(set(read)) == len(read) >= 64
    assert set(fetched.values()) <= {1}
    assert {url.rpartition("/")[2] for url in asked} >= set(fetched)


def test_what_cannot_be_prefetched_is_told_by_its_reader(
    memory: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put_bytes(b"content", f"{memory}/a")
    fill = cache._fill
    monkeypatch.setattr(cache, "_fill", lambda *about: (_ for _ in ()).throw(StorageError("gone")))
    cache.prefetch([f"{memory}/a"])
    (coming,) = cache._coming.values()
    assert isinstance(coming.exception(), StorageError)
    with pytest.raises(StorageError, match="gone"):
        cache.open_regular(f"{memory}/a")
    monkeypatch.setattr(cache, "_fill", fill)
    os.close(cache.open_regular(f"{memory}/a"))
