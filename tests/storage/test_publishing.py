"""A folder at a URL is the old one or the new one, and has one writer at a time."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from vitkit.errors import StorageError
from vitkit.locks import InUse
from vitkit.storage import Publisher, fetched_folder, publish, remote, search_above
from vitkit.storage.folders import read_manifest


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def seen(url: str) -> dict[str, str]:
    folder = fetched_folder(url, lambda name: True)
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_what_is_published_is_there_elsewhere(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{memory}/run"
    with Publisher(url).claimed() as mine:
        write(mine.folder, config="1", checkpoints__step__state="22", log="a")
        write(mine.folder, **{".hidden": "no"})
        mine.push()
        write(mine.folder, log="ab")
        mine.push()
    assert seen(url) == {"config": "1", "checkpoints/step/state": "22", "log": "ab"}
    assert remote.read(search_above(f"{url}/checkpoints/step/state") or "") == b"22"
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "elsewhere"))
    with Publisher(url).claimed() as other:
        assert (other.folder / "log").read_text() == "ab"
        write(other.folder, unconfirmed="x")
    with Publisher(url).claimed() as again:
        assert not (again.folder / "unconfirmed").exists(), "what was never published is not there"
    assert "lock.json" not in remote.find(url)


def test_a_kill_before_the_manifest_leaves_the_state_before(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url, put_bytes = f"{memory}/run", remote.put_bytes
    with Publisher(url).claimed() as mine:
        write(mine.folder, a="old", b="same")
        mine.push()

        def killed(content: bytes, url: str) -> None:
            raise KeyboardInterrupt

        write(mine.folder, a="new", c="more")
        monkeypatch.setattr(remote, "put_bytes", killed)
        with pytest.raises(KeyboardInterrupt):
            mine.push()
        monkeypatch.setattr(remote, "put_bytes", put_bytes)
    assert seen(url) == {"a": "old", "b": "same"}
    for text in ("newer", "newest", "last"):
        with Publisher(url).claimed() as mine:
            assert (mine.folder / "b").read_text() == "same"
            write(mine.folder, a=text)
            mine.push()
    assert seen(url) == {"a": "last", "b": "same"}
    assert len([path for path in remote.find(url) if path.startswith("objects/")]) == 3, (
        "of this state and the one before"
    )


def test_a_manifest_that_is_replaced_while_it_is_read_is_read_again(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size was asked for, then the writer published more."""
    url, stat_of, answers = f"{memory}/run", remote.stat_of, []
    with Publisher(url).claimed() as mine:
        write(mine.folder, a="1")
        mine.push()

        def published_meanwhile(info: dict) -> remote.Stat:
            answers.append(stat_of(info))
            if len(answers) == 1:
                monkeypatch.setattr(remote, "stat_of", stat_of)
                write(mine.folder, b="2", c="3")
                mine.push()
                monkeypatch.setattr(remote, "stat_of", published_meanwhile)
            return answers[-1]

        monkeypatch.setattr(remote, "stat_of", published_meanwhile)
        found = read_manifest(url)
        assert len(answers) == 2
    assert found is not None
    assert set(found.files) == {"a", "b", "c"}


def test_a_second_writer_is_refused(memory: str) -> None:
    url = f"{memory}/run"
    words = rf"{url} is in use by process {os.getpid()} on .*; wait until it ends"
    with Publisher(url).claimed(), pytest.raises(InUse, match=words):
        Publisher(url)._claim()


@pytest.mark.parametrize(
    ("writer", "free"), [("process 999999999 on {node}, ab", True), ("process 1 on elsewhere, ab", True)]
)
def test_the_lock_of_a_dead_writer_does_not_count(memory: str, writer: str, free: bool) -> None:
    url = f"{memory}/run"
    lock = {"writer": writer.format(node=os.uname().nodename), "count": 3}
    remote.put_bytes(json.dumps(lock).encode(), f"{url}/lock.json")
    with Publisher(url).claimed() as mine:
        write(mine.folder, a="1")
        mine.push()
    assert seen(url) == {"a": "1"}


def test_a_writer_elsewhere_that_counts_is_alive(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{memory}/run"
    monkeypatch.setattr(publish.platform, "node", lambda: "elsewhere")
    with Publisher(url).claimed():
        monkeypatch.setattr(publish.platform, "node", lambda: "here")
        monkeypatch.setattr(publish, "PATIENCE", 30.0)
        with pytest.raises(InUse, match="on elsewhere"):
            Publisher(url)._claim()


def test_what_another_published_meanwhile_is_not_overwritten(memory: str) -> None:
    url = f"{memory}/run"
    with Publisher(url).claimed() as mine:
        write(mine.folder, a="1")
        mine.push()
        manifest = read_manifest(url)
        assert manifest is not None
        other = publish.Manifest(manifest.generation + 1, "process 1 on elsewhere, ab", manifest.files)
        remote.put_bytes(other.to_bytes(), f"{url}/manifest.json")
        write(mine.folder, a="2")
        with pytest.raises(InUse, match="was changed by process 1 on elsewhere since this began"):
            mine.push()
    assert seen(url) == {"a": "1"}


def test_a_damaged_object_is_noticed(memory: str) -> None:
    url = f"{memory}/run"
    with Publisher(url).claimed() as mine:
        write(mine.folder, a="right")
        mine.push()
    (name,) = [path for path in remote.find(url) if path.startswith("objects/")]
    remote.put_bytes(b"wrong", f"{url}/{name}")
    with pytest.raises(StorageError, match="is not what its manifest says"):
        seen(url)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a//b", "a/../../b", "a\\b"])
def test_a_manifest_names_files_of_its_own_folder(memory: str, name: str) -> None:
    piece = {"object": "objects/x", "bytes": 1, "sha256": "0" * 64}
    for files in ({name: piece}, {"a": {**piece, "object": name}}, {"a": {**piece, "object": f"objects/{name}"}}):
        about = {"format": "vitkit folder", "version": 1, "generation": 1, "writer": "", "files": files}
        remote.put_bytes(json.dumps(about).encode(), f"{memory}/run/manifest.json")
        with pytest.raises(StorageError, match="is not a manifest of vitkit"):
            read_manifest(f"{memory}/run")


def test_s3_stores_and_verifies(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RANGE", 1 << 20)
    content = os.urandom(3 << 20)
    (tmp_path / "large").write_bytes(content)
    remote.put(tmp_path / "large", f"{s3}/large")
    assert remote.stat(f"{s3}/large").version in remote._etags(tmp_path / "large")
    with open(tmp_path / "copy", "w+b") as file:
        remote.fetch(f"{s3}/large", remote.stat(f"{s3}/large"), file.fileno())
    assert (tmp_path / "copy").read_bytes() == content
    assert remote.create(b"x", f"{s3}/once")
    assert remote.create(b"x", f"{s3}/once"), "our own, when an answer was lost"
    assert not remote.create(b"y", f"{s3}/once")
    with pytest.raises(StorageError, match="there is no bucket s3://missing-bucket"):
        remote.find("s3://missing-bucket/x")
    with pytest.raises(StorageError, match="there is no bucket s3://missing-bucket"):
        remote.put(tmp_path / "large", "s3://missing-bucket/x")


def test_a_run_is_called_by_its_url(memory: str, tmp_path: Path, command) -> None:
    """Not by the folder in which it was made: that is gone on the next machine."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "set.npz", images=rng.integers(0, 256, (60, 8, 8, 3), dtype=np.uint8), labels=np.arange(60) % 2)
    small = ["--model", "vit-8px/2", "--steps", "1", "--batch-size", "8", "--set", "model.depth=1"]
    for name, words in (("train", "vitkit evaluate"), ("pretrain", "--init")):
        url = f"{memory}/{name}"
        code, out, err = command(name, tmp_path / "set.npz", "--out", url, *small)
        assert code == 0, err
        shown = " ".join(out.split())
        assert f"{url}/best.safetensors" in shown
        assert f"{words} {url}" in shown
        assert str(tmp_path / "cache") not in shown
        code, out, err = command(name, tmp_path / "set.npz", "--out", f"{url}-json", *small, "--json")
        assert code == 0, err
        assert json.loads(out)["out"] == f"{url}-json"


@pytest.mark.parametrize("name", ["train", "pretrain"])
def test_a_run_is_resumed_from_its_url_alone(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command, name: str
) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "set.npz", images=rng.integers(0, 256, (60, 8, 8, 3), dtype=np.uint8), labels=np.arange(60) % 2)
    small = ["--model", "vit-8px/2", "--steps", "1", "--batch-size", "8", "--set", "model.depth=1"]
    assert command(name, tmp_path / "set.npz", "--out", f"{memory}/run", *small)[0] == 0
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "another machine"))
    code, out, err = command(name, "--out", f"{memory}/run", "--resume")
    assert code == 0, err
    assert f"{memory}/run/best.safetensors" in " ".join(out.split())
    code, _, err = command(name, "--out", f"{memory}/new")
    assert code == 2
    assert f"vitkit {name} DATA" in err
