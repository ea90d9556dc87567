"""Train, be killed, resume elsewhere, predict, embed and index from URLs, with 5% of all requests going wrong:
the same bits as from local disk."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import vitkit
from remote_servers import FaultyProxy, faulty, has_nginx, nginx
from vitkit.storage import cache, remote
from vitkit.storage.folders import read_manifest

CHANGES = {"depth": 2, "width": 32, "heads": 2, "mlp_width": 32}
SETTINGS = {"model": "vit-8px/2", "changes": CHANGES, "steps": 8, "batch_size": 8, "evaluations": 2, "workers": 0}
SETTINGS |= {"image_size": 8, "optimizer": "adamw", "lr": 3e-3, "save_every": 0.0}


def make_images(root: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(60):
        split, label = ("train", "train", "val")[number % 3], ("dark", "light")[number % 2]
        path = root / split / label / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 128, (8, 8, 3), dtype=np.uint8) + 100 * (number % 2)).convert("RGB").save(path)


def upload(root: Path, url: str) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            remote.put_bytes(path.read_bytes(), f"{url}/{path.relative_to(root).as_posix()}")


def use_proxy(monkeypatch: pytest.MonkeyPatch, proxy: FaultyProxy) -> None:
    import fsspec

    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("VITKIT_TIMEOUT", "5")
    fsspec.filesystem("s3").clear_instance_cache()


def move_elsewhere(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Another folder, nothing cached, nothing remembered."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("VITKIT_CACHE", str(folder / "cache"))
    cache._known.clear()


def train_until_published(data: str, out: str, least: int = 2) -> None:
    """Train in a process of its own, and kill it once it has published a few times."""
    settings = {**SETTINGS, "data": data, "out": out}
    code = f"import vitkit; vitkit.train(vitkit.TrainConfig(**{settings!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 600
    while (manifest := read_manifest(out)) is None or manifest.generation < least:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def rows_of(path: Path | str, prefix: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return [{**row, "path": row["path"].removeprefix(prefix)} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_everything_from_s3_with_faults(
    s3: str, moto_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command
) -> None:
    make_images(tmp_path / "set")
    upload(tmp_path / "set", f"{s3}/set")
    local = vitkit.train(vitkit.TrainConfig(**SETTINGS, data=str(tmp_path / "set"), out=str(tmp_path / "run")))
    with faulty(moto_port, share=0.05, seed=1) as proxy:
        use_proxy(monkeypatch, proxy)
        train_until_published(f"{s3}/set", f"{s3}/run")
        move_elsewhere(monkeypatch, tmp_path / "elsewhere")
        again = vitkit.train(vitkit.TrainConfig(data="", out=f"{s3}/run"), resume=True)
        assert again.steps == local.steps
        assert again.validation == local.validation
        here, there = vitkit.load(tmp_path / "run"), vitkit.load(f"{s3}/run/best.safetensors")
        for name, tensor in here.state_dict().items():
            assert torch.equal(tensor, there.state_dict()[name]), name

        move_elsewhere(monkeypatch, tmp_path / "third")
        runs = {"here": (tmp_path / "run", tmp_path / "set", tmp_path), "there": (f"{s3}/run", f"{s3}/set", s3)}
        for model, data, out in runs.values():
            assert command("predict", model, data, "--out", f"{out}/rows.csv")[0] == 0
            assert command("embed", model, data, "--out", f"{out}/features.npz")[0] == 0
            assert command("index", data, "--model", model, "--out", f"{out}/set.index")[0] == 0
            assert command("predict", model, data, "--out", f"{out}/rows.csv")[0] == 2, "it is there already"
            assert command("predict", model, data, "--out", f"{out}/rows.csv", "--resume")[0] == 0
        (tmp_path / "fetched.csv").write_bytes(remote.read(f"{s3}/rows.csv"))
        mine, theirs = rows_of(tmp_path / "rows.csv", str(tmp_path)), rows_of(tmp_path / "fetched.csv", s3)
        assert mine == theirs
        assert len({row["path"] for row in theirs}) == 60, "no sample lost or doubled"
        (tmp_path / "fetched.npz").write_bytes(remote.read(f"{s3}/features.npz"))
        with np.load(tmp_path / "features.npz") as a, np.load(tmp_path / "fetched.npz") as b:
            assert np.array_equal(a["features"], b["features"])
            assert len(b["bad_paths"]) == 0
        from vitkit.curation import open_index

        first, second = open_index(tmp_path / "set.index"), open_index(f"{s3}/set.index")
        assert np.array_equal(first.features, second.features)
        code, out, err = command("search", f"{s3}/set.index", f"{s3}/set/val/dark/002.png", "--top", "1", "--json")
        assert code == 0, err
        assert json.loads(out)[0]["path"] == f"{s3}/set/val/dark/002.png"
    assert min(proxy.counts[fault] for fault in ("500", "silence", "short")) > 0, proxy.counts


@pytest.mark.slow
@pytest.mark.skipif(not has_nginx(), reason="nginx is not installed")
@pytest.mark.parametrize("ranges", [True, False])
def test_from_nginx_with_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command, ranges: bool) -> None:
    make_images(tmp_path / "www" / "set")
    listed = sorted((tmp_path / "www" / "set").rglob("*.png"))
    rows = [f"set/{p.relative_to(tmp_path / 'www' / 'set').as_posix()},{p.parent.name}" for p in listed]
    (tmp_path / "www" / "list.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    vitkit.train(
        vitkit.TrainConfig(**{**SETTINGS, "steps": 2}, data=str(tmp_path / "www/list.csv"), out=str(tmp_path / "run"))
    )
    (tmp_path / "www" / "model.safetensors").write_bytes((tmp_path / "run" / "best.safetensors").read_bytes())
    monkeypatch.setenv("VITKIT_TIMEOUT", "5")
    monkeypatch.setattr(remote, "RANGE", 1 << 14)
    with nginx(tmp_path / "www", tmp_path / "nginx", ranges) as port, faulty(port, share=0.05, seed=2) as proxy:
        base = f"http://127.0.0.1:{proxy.port}"
        for model, data, out in (
            (tmp_path / "run", tmp_path / "www/list.csv", tmp_path / "here.csv"),
            (f"{base}/model.safetensors", f"{base}/list.csv", tmp_path / "there.csv"),
        ):
            assert command("predict", model, data, "--out", out)[0] == 0
        assert rows_of(tmp_path / "here.csv", f"{tmp_path}/www") == rows_of(tmp_path / "there.csv", base)
        code, _, err = command("train", f"{base}/list.csv", "--out", f"{base}/run", "--steps", "1")
        assert code == 2
        assert "web servers are read" in err
        code, _, err = command("predict", f"{base}/nothing.safetensors", f"{base}/list.csv")
        assert code == 2
        assert "there is no file" in err


def write_list_and_shards(root: Path) -> None:
    listed = sorted((root / "set").rglob("*.png"))
    rows = [f"{p.relative_to(root).as_posix()},{p.parent.name},{p.parent.parent.name}" for p in listed]
    (root / "list.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    for shard in range(3):
        with tarfile.open(root / f"part-{shard}.tar", "w") as tar:
            for path in listed[shard::3]:
                label = path.parent.name.encode()
                for suffix, content in (("png", path.read_bytes()), ("cls", label)):
                    info = tarfile.TarInfo(f"{path.stem}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


@pytest.mark.slow
@pytest.mark.skipif(not has_nginx(), reason="nginx is not installed")
@pytest.mark.parametrize("data", ["list.csv", "part-{0..2}.tar"])
def test_train_and_index_from_nginx_with_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command, data: str
) -> None:
    """A list of images, and shards: the same weights and features as from local disk."""
    www = tmp_path / "www"
    make_images(www / "set")
    write_list_and_shards(www)
    monkeypatch.setenv("VITKIT_TIMEOUT", "5")
    monkeypatch.setattr(remote, "RANGE", 1 << 12)
    with nginx(www, tmp_path / "nginx") as port, faulty(port, share=0.05, seed=3) as proxy:
        found = {}
        for name, base in (("here", str(www)), ("there", f"http://127.0.0.1:{proxy.port}")):
            run, index = tmp_path / name / "run", tmp_path / name / "index"
            settings = {**SETTINGS, "steps": 4, "data": f"{base}/{data}", "out": str(run)}
            vitkit.train(vitkit.TrainConfig(**settings))
            code, _, err = command("index", f"{base}/{data}", "--model", run, "--out", index)
            assert code == 0, err
            found[name] = ((run / "model.safetensors").read_bytes(), np.load(index / "features.npy"))
            assert len(found[name][1]) == 60, "no sample lost or doubled"
        assert found["here"][0] == found["there"][0]
        assert np.array_equal(found["here"][1], found["there"][1])
        assert proxy.counts.total() > proxy.counts["none"] or data != "list.csv", "nothing went wrong"
