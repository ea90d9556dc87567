"""Runs that meet a stranger's files, changed data, damage or another run: no code runs, nothing is lost silently."""

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from vitkit.errors import CheckpointError, DataError, TrainError
from vitkit.locks import InUse, only_one
from vitkit.training.checkpoint import damaged, seal
from vitkit.training.config import TrainConfig
from vitkit.training.loop import Loop
from vitkit.training.stopping import Stopped


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("last", ["config.json", "data.json"])
def test_a_kill_before_the_first_step_needs_no_repair(short: dict, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Whichever file was not written any more, the command that is due next works."""
    import vitkit.training.run as runs

    write = runs.write_json

    def cut(path: Path, value: object) -> None:
        if path.name == last:
            raise KeyboardInterrupt
        write(path, value)

    config = TrainConfig(**{**short, "steps": 2})
    with monkeypatch.context() as patched:
        patched.setattr(runs, "write_json", cut)
        with pytest.raises(KeyboardInterrupt):
            vitkit.train(config)
    vitkit.train(config, resume=(Path(config.out) / "config.json").exists())
    assert {"config.json", "data.json", "result.json"} <= {path.name for path in Path(config.out).iterdir()}


# --- sharded checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """What torch.distributed.checkpoint writes: tensors of two types, a number and a list."""
    import torch.distributed.checkpoint as dcp

    values = {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(2).half(), "groups": {"lr": 0.5, "on": [1, 2]}}
    dcp.save({"model": values}, checkpoint_id=str(tmp_path / "shards"))
    return tmp_path / "shards"


def read_shards(folder: Path) -> dict:
    from vitkit.checkpoints.sharded import load

    found = {"model": {"weight": torch.zeros(2, 3), "half": torch.zeros(2).half(), "groups": {"lr": 0.0, "on": [0, 0]}}}
    load(found, folder)
    return found["model"]


def test_sharded_checkpoints_are_read(shards: Path) -> None:
    found = read_shards(shards)
    assert torch.equal(found["weight"], torch.arange(6.0).view(2, 3))
    assert torch.equal(found["half"], torch.ones(2).half())
    assert found["groups"] == {"lr": 0.5, "on": [1, 2]}


def test_metadata_of_a_sharded_checkpoint_runs_no_code(shards: Path, tmp_path: Path) -> None:
    sound = (shards / ".metadata").read_bytes()
    (shards / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match="no checkpoint needs"):
        read_shards(shards)
    for cut in range(0, len(sound), 211):
        (shards / ".metadata").write_bytes(sound[:cut])
        with pytest.raises(CheckpointError, match="damaged"):
            read_shards(shards)
    assert not (tmp_path / "ran").exists()


def test_values_of_a_sharded_checkpoint_run_no_code(shards: Path, tmp_path: Path) -> None:
    """The bytes of one value replaced by a pickle, with the metadata to fit."""
    from vitkit.checkpoints.sharded import unpickled

    about = unpickled((shards / ".metadata").read_bytes())
    evil = io.BytesIO()
    torch.save(Evil(tmp_path / "ran"), evil)
    (shards / "evil").write_bytes(evil.getvalue())
    (place,) = [info for index, info in about.storage_data.items() if index.fqn == "model.groups.lr"]
    place.relative_path, place.offset, place.length = "evil", 0, len(evil.getvalue())
    (shards / ".metadata").write_bytes(pickle.dumps(about))
    with pytest.raises(CheckpointError, match="holds Python objects"):
        read_shards(shards)
    place.relative_path = str(shards / "evil")
    (shards / ".metadata").write_bytes(pickle.dumps(about))
    with pytest.raises(CheckpointError, match="not a file of this checkpoint"):
        read_shards(shards)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_names_its_own_files_only(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "state.pt").write_bytes(b"state")
    seal(tmp_path / "step", 1)
    assert damaged(tmp_path / "step") == ""
    about = tmp_path / "step" / "about.json"
    about.write_text(about.read_text().replace("state.pt", "/dev/zero"))
    assert "missing" in damaged(tmp_path / "step")


# --- the data of a run changes ----------------------------------------------------------------------------


def stopped(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is asked to stop after its third step."""
    step = Loop.train_step

    def third(self: Loop, *args: object) -> float:
        self.stop_asked = self.step >= 2
        return step(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "train_step", third)
        with pytest.raises(Stopped):
            vitkit.train(config)


@pytest.fixture
def folders(tmp_path: Path, short: dict, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, TrainConfig]:
    """A run on folders of classes, stopped at its third step."""
    random, data = np.random.default_rng(0), tmp_path / "data"
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (data / split / name).mkdir(parents=True)
            for i in range(8):
                pixels = random.integers(0, 256, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(data / split / name / f"{i}.png")
    config = TrainConfig(**{**short, "data": str(data), "steps": 6, "batch_size": 8, "workers": 0})
    stopped(config, monkeypatch)
    return data, config


def rename(data: Path) -> None:
    (data / "train" / "cat").rename(data / "train" / "x")
    (data / "train" / "dog").rename(data / "train" / "cat")
    (data / "train" / "x").rename(data / "train" / "dog")


CHANGES = {
    "renamed": (rename, r"train: cat: 8 images, but others"),
    "removed": (lambda data: (data / "train" / "cat" / "3.png").unlink(), r"train: cat: 8 images .* before, 7 images"),
    "added": (lambda data: Image.new("L", (8, 8)).save(data / "val" / "dog" / "new.png"), r"val: dog: .*9 images"),
    "replaced": (lambda data: Image.new("L", (8, 8)).save(data / "train" / "dog" / "0.png"), r"train: dog: 8 images"),
    "touched": (lambda data: os.utime(data / "train" / "dog" / "0.png", (1, 1)), r"train: dog: 8 images, but others"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_is_refused_until_it_is_accepted(folders: tuple[Path, TrainConfig], change: str) -> None:
    data, config = folders
    alter, words = CHANGES[change]
    alter(data)
    for _ in range(2):  # also the second time
        with pytest.raises(TrainError, match=f"(?s){words}.*--accept-changed-data"):
            vitkit.train(config, resume=True)
    assert vitkit.train(config, resume=True, accept_changed_data=True).steps == 6
    assert vitkit.train(config, resume=True).steps == 6, "what was accepted counts from then on"


def test_unchanged_data_is_resumed(folders: tuple[Path, TrainConfig]) -> None:
    assert vitkit.train(folders[1], resume=True).steps == 6


def test_changed_arrays_are_refused(short: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with np.load(short["data"]) as file:
        arrays = dict(file)
    np.savez(tmp_path / "set.npz", **arrays)
    config = TrainConfig(**{**short, "data": str(tmp_path / "set.npz"), "steps": 6})
    stopped(config, monkeypatch)
    arrays["x_train"][0, 0, 0] ^= 1
    np.savez(tmp_path / "set.npz", **arrays)
    with pytest.raises(TrainError, match="is not what it was"):
        vitkit.train(config, resume=True)


# --- two runs in one folder -------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from vitkit.locks import only_one
with only_one(Path(sys.argv[1]), "the run", "x"):
    print("held", flush=True)
    time.sleep(100)
"""


def test_two_runs_in_one_folder(short: dict, tmp_path: Path) -> None:
    lock = Path(short["out"]) / ".lock"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(InUse, match=rf"in use by process {process.pid} on .*--out"):
        vitkit.train(TrainConfig(**short))
    assert sorted(p.name for p in lock.parent.iterdir()) == [".lock"], "nothing was written"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert lock.exists()
    assert vitkit.train(TrainConfig(**{**short, "steps": 2})).steps == 2, "the lock of a dead process does not matter"
    assert not lock.exists()


def test_two_runs_of_one_process_in_one_folder(short: dict) -> None:
    lock = Path(short["out"]) / ".lock"
    with only_one(lock, "it", "x"), pytest.raises(InUse, match=f"process {os.getpid()}"):
        vitkit.train(TrainConfig(**short))
    assert not lock.parent.exists(), "an empty folder is not left behind"


def test_an_epoch_in_the_order_of_another_version_is_refused(
    folders: tuple[Path, TrainConfig], short: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint says nothing about the order, as those of version 0.1, which read shards in another one."""
    (tmp_path / "shards").mkdir()
    for split in ("train", "val"):
        with tarfile.open(tmp_path / "shards" / f"{split}-0.tar", "w") as tar:
            for path in sorted((folders[0] / split).rglob("*.png")):
                tar.add(path, f"{path.parent.name}{path.stem}.png")
                label = tarfile.TarInfo(f"{path.parent.name}{path.stem}.cls")
                label.size = 3
                tar.addfile(label, io.BytesIO(path.parent.name.encode()))
    named = {"data": str(tmp_path / "shards"), "out": str(tmp_path / "sharded")}
    config = TrainConfig(**{**short, **named, "steps": 6, "batch_size": 4, "workers": 0})
    stopped(config, monkeypatch)
    step = max(Path(config.out, "checkpoints").glob("step-*"))  # a slow machine writes more than one
    state = torch.load(step / "state.pt", weights_only=True)
    assert state["loader"] == {"epoch": 0, "step": 3, "order": 2}
    del state["loader"]["order"]
    torch.save(state, step / "state.pt")
    (step / "about.json").unlink()
    seal(step, 3)
    for _ in range(2):  # also the second time
        with pytest.raises(DataError, match=r"middle of epoch 1 .*--accept-changed-data, or begin .* --restart"):
            vitkit.train(config, resume=True)
    assert vitkit.train(config, resume=True, accept_changed_data=True).steps == 6


# --- damaged checkpoints ----------------------------------------------------------------------------------


def test_all_checkpoints_damaged(folders: tuple[Path, TrainConfig], command, monkeypatch: pytest.MonkeyPatch) -> None:
    _, config = folders
    kept = Path(config.out) / "checkpoints"
    (state,) = kept.glob("step-*/state.pt")
    state.write_bytes(state.read_bytes()[:100])
    before = (Path(config.out) / "log.jsonl").read_bytes()
    code, _, err = command("train", config.data, "--out", config.out, "--resume")
    assert code == 2
    assert "step 3: state.pt does not match its checksum" in " ".join(err.split())
    assert "--restart" in err
    assert state.exists()
    assert (Path(config.out) / "log.jsonl").read_bytes() == before
    code, _, err = command("train", config.data, "--out", config.out, "--resume", "--restart")
    assert code == 0, err
    assert (kept / "aside-000000003-0" / "state.pt").exists()
    assert json.loads((Path(config.out) / "result.json").read_text())["steps"] == 6


DAMAGED = [
    b"",
    b"[]",
    b"{}",
    b'{"train": []}',
    b'{"train": {"steps": []}}',
    b"\x00",
    b'{"train": 3}',
    b"\xff\xfe",
    b"[" * 9999,
]


def test_a_damaged_config_of_a_run_is_told_in_words(squares: str, tmp_path: Path, command) -> None:
    for content in DAMAGED:
        (tmp_path / "config.json").write_bytes(content)
        code, _, err = command("train", squares, "--out", tmp_path, "--resume")
        assert (code, "Traceback" in err) == (2, False), content
