"""Web servers: signed addresses, servers that deny what is not there, and names that mean something in a URL."""

import csv
import io
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from PIL import Image

import vitkit
from remote_servers import SIGNATURE, signed
from vitkit.data import open_data
from vitkit.data.pack import pack
from vitkit.errors import Denied
from vitkit.model.config import ViTConfig
from vitkit.prediction import open_inputs
from vitkit.storage import address

NAMES = ["a b", "ü", "100%", "a%20b", "x#y", "q?z", "plus+and&", "[0]", "日本語"]


def png(seed: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 6), dtype=np.uint8)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Images under names that mean something in a URL, a list of them, a shard with numbers as labels, a model."""
    root = tmp_path / "site"
    rows = [(f"a set/{name}.png", f"class {number % 2}") for number, name in enumerate(NAMES)]
    (root / "a set").mkdir(parents=True)
    for number, (path, _) in enumerate(rows):
        (root / path).write_bytes(png(number))
    with (root / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    pack(root / "list.csv", root / "shards")
    (root / "shards" / "shards.index").unlink()
    config = ViTConfig(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_width=16, classes=2)
    vitkit.save(vitkit.create(config), root / "model.safetensors")
    return root


@pytest.fixture
def web(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_rows_of_a_list_are_paths_whatever_is_in_them(site: Path, web: str) -> None:
    here, there = open_data(site / "list.csv").samples, open_data(f"{web}/list.csv").samples
    for row in range(len(NAMES)):
        assert np.array_equal(np.asarray(here.image(row)), np.asarray(there.image(row))), there.where(row)


def test_an_image_by_its_address_as_a_person_writes_it(site: Path, web: str) -> None:
    for address_, name in (("a set/ü.png", "ü"), ("a%20set/100%25.png", "100%"), ("a%20set/[0].png?size=3", "[0]")):
        image = open_inputs(f"{web}/{address_}").image(0)
        assert np.array_equal(np.asarray(image)[..., 0], np.asarray(Image.open(site / "a set" / f"{name}.png")))


def test_signed_addresses(site: Path) -> None:
    with signed(site) as host:
        shard = open_data(f"{host}/shards/train-00000.tar?{SIGNATURE}")
        local = open_data(site / "shards" / "train-00000.tar")
        assert shard.splits == local.splits
        assert shard.classes == ("0", "1"), "nothing else may be read there, their names neither"
        assert np.array_equal(np.asarray(shard.samples.image(0)), np.asarray(local.samples.image(0)))
        model = vitkit.load(f"{host}/model.safetensors?{SIGNATURE}")
        assert model.config == vitkit.load(site / "model.safetensors").config
        image = open_inputs(f"{host}/a%20set/%C3%BC.png?{SIGNATURE}").image(0)
        assert image.size == (6, 6)
        with pytest.raises(Denied, match=r"denied.*a signed address ends after a time"):
            vitkit.load(f"{host}/model.safetensors")


def test_an_index_of_signed_shards(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows them by their names, without signatures."""
    monkeypatch.setattr("vitkit.data.sources.shardtable._WORTH", 1)
    with signed(site) as host:
        for _ in range(2):
            shard = open_data(f"{host}/shards/train-00000.tar?{SIGNATURE}")
            assert len(shard.samples) == len(open_data(site / "shards" / "train-00000.tar").samples)


@pytest.mark.parametrize(
    ("url", "bare"),
    [
        ("https://h/a/b.tar?x=1/2", "https://h/a/b.tar"),
        ("s3://b/what?.tar", "s3://b/what?.tar"),
        ("a/b?.tar", "a/b?.tar"),
    ],
)
def test_what_follows_a_question_mark(url: str, bare: str) -> None:
    assert address.plain(url) == bare
    assert address.suffix(url) == ".tar"
