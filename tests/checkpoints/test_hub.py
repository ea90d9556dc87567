"""hf: and timm: names, against a small imitation of the hub on loopback, and without any hub at all."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import peers
import vitkit
from vitkit.checkpoints import writing
from vitkit.checkpoints.load import open_checkpoint
from vitkit.errors import CheckpointError, MissingPackage

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """GET and HEAD /owner/name/resolve/revision/file, with the headers that huggingface_hub reads."""

    repositories: ClassVar[dict[str, Path]] = {}
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        self.asked.append(self.path)
        owner, name, _, revision, *rest = self.path.strip("/").split("/")
        repository = self.repositories.get(f"{owner}/{name}")
        if repository is None:
            return self._fail(404, "RepoNotFound")
        if revision not in ("main", "v2", COMMIT):
            return self._fail(404, "RevisionNotFound")
        file = repository / "/".join(rest)
        if not file.is_file():
            return self._fail(404, "EntryNotFound")
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)
        return None

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Path]:
    """A hub with two repositories; yields the folder they are in."""
    constants = pytest.importorskip("huggingface_hub.constants")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    # huggingface_hub reads its environment once, when it is imported
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    model = peers.randomize(vitkit.create("mu"))
    vitkit.save(model, tmp_path / "m.safetensors", list("abcdefghij"))
    checkpoint = open_checkpoint(tmp_path / "m.safetensors")
    writing.write(checkpoint, tmp_path / "repos/owner--vit", "huggingface")
    writing.write(checkpoint, tmp_path / "repos/timm--small", "timm")
    (tmp_path / "repos/owner--empty").mkdir()
    Hub.repositories = {p.name.replace("--", "/"): p for p in (tmp_path / "repos").iterdir()}
    Hub.asked = []
    yield tmp_path
    server.shutdown()
    server.server_close()


def test_hugging_face_and_timm_names(hub: Path) -> None:
    model = vitkit.load(hub / "m.safetensors")
    images = torch.randn(2, 3, 32, 32)
    for name in ("hf:owner/vit", "hf:owner/vit@v2", "timm:small", "hf:timm/small"):
        fetched = vitkit.load(name)
        assert torch.equal(fetched(images), model(images)), name
        assert fetched.class_names == tuple("abcdefghij")
    assert not any("pytorch_model.bin" in path for path in Hub.asked)  # only what is needed


def test_the_cache_serves_when_the_hub_is_gone(hub: Path, monkeypatch) -> None:
    from huggingface_hub import constants

    first = vitkit.load("hf:owner/vit")
    asked = len(Hub.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = vitkit.load("hf:owner/vit")
    assert len(Hub.asked) == asked
    assert torch.equal(again.norm.weight, first.norm.weight)
    with pytest.raises(CheckpointError, match="not in the cache"):
        vitkit.load("timm:small")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf:owner/nothing", "the hub has no 'owner/nothing'"),
        ("hf:owner/vit@v9", "no revision 'v9'"),
        ("hf:owner/empty", "holds none of model.safetensors"),
        ("timm:nothing", "the hub has no 'timm/nothing'"),
    ],
)
def test_what_the_hub_does_not_have(hub: Path, source: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as error:
        vitkit.load(source)
    assert source in str(error.value)


def test_a_damaged_download_is_refused(hub: Path) -> None:
    weights = hub / "repos/owner--vit/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        vitkit.load("hf:owner/vit")


def test_shards_are_fetched(hub: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = hub / "repos/owner--vit"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"one.safetensors": list(tensors)[:5], "two.safetensors": list(tensors)[5:]}
    for file, names in parts.items():
        save_file({n: tensors[n].clone() for n in names}, folder / file)
    index = {"weight_map": {n: file for file, names in parts.items() for n in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = vitkit.load(hub / "m.safetensors")
    assert torch.equal(vitkit.load("hf:owner/vit").norm.weight, whole.norm.weight)


def test_without_huggingface_hub(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", None)
    with pytest.raises(MissingPackage, match=r"pip install 'vitkit\[hub\]'"):
        vitkit.load("hf:owner/vit")
