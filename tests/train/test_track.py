"""Trackers: what they get is what log.jsonl holds, once each, whatever happens to them or to the run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitkit
from vitkit.errors import VitkitError
from vitkit.training import track
from vitkit.training.log import read
from vitkit.training.result import Watcher
from vitkit.training.trackers import TRACKERS, Tracker

ROOT = Path(__file__).parents[2]
SHORT = {"model": "mu", "steps": 12, "batch_size": 16, "log_every": 2, "evaluations": 2, "changes": {"depth": 1}}


class Notes(Watcher):
    """Keeps what is said; a run dies at the step `dies`."""

    def __init__(self, dies: int = 0) -> None:
        self.said: list[str] = []
        self.dies = dies

    def note(self, text: str) -> None:
        self.said.append(text)

    def step(self, progress, line, rate) -> None:
        if self.dies and line["step"] >= self.dies:
            raise RuntimeError("the machine died")


class Kept(Tracker):
    """A tracker in memory that may be out of order."""

    runs: dict[str, list[tuple[int, str, float]]]
    states: dict[str, str]
    broken = False

    def _work(self) -> None:
        if type(self).broken:
            raise ConnectionError("nobody answers")

    def open(self, about, id):
        self._work()
        self.id = id or f"run-{len(self.runs)}"
        self.runs.setdefault(self.id, [])
        return self.id

    def sent(self):
        return {name: max(s for s, n, _ in self.runs[self.id] if n == name) for _, name, _ in self.runs[self.id]}

    def log(self, lines):
        self._work()
        self.runs[self.id] += [(step, name, value) for step, numbers in lines for name, value in numbers.items()]

    def close(self, state, summary, files):
        self._work()
        self.states[self.id] = state
        self.files = [f.name for f in files]


@pytest.fixture
def kept(monkeypatch) -> type[Kept]:
    fresh = type("Fresh", (Kept,), {"runs": {}, "states": {}})
    monkeypatch.setitem(TRACKERS, "kept", fresh)
    monkeypatch.setattr(track, "EVERY", 0.01)
    return fresh


def numbers_of(folder: Path) -> list[tuple[int, str, float]]:
    lines = read(folder / "log.jsonl")
    return [(ln["step"], k, v) for ln in lines for k, v in ln.items() if k != "step" and isinstance(v, int | float)]


def once_each(folder: Path) -> list[tuple[int, str, float]]:
    """The epoch stands in lines of training and of evaluation of one step."""
    return sorted(set(numbers_of(folder)))


def test_a_tracker_gets_the_log_and_the_run_is_the_same_without(tmp_path: Path, kept) -> None:
    with_one = vitkit.train("digits", out=tmp_path / "a", track="kept", **SHORT)
    without = vitkit.train("digits", out=tmp_path / "b", **SHORT)
    assert sorted(kept.runs["run-0"]) == once_each(tmp_path / "a")
    assert kept.states == {"run-0": "finished"}
    one, other = ((r.out / "model.safetensors").read_bytes() for r in (with_one, without))
    assert one == other


def test_a_run_that_died_continues_without_gap_or_repetition(tmp_path: Path, kept) -> None:
    with pytest.raises(RuntimeError):
        vitkit.train("digits", out=tmp_path / "a", track="kept", watcher=Notes(dies=8), **SHORT)
    assert kept.states == {"run-0": "failed"}
    before = len(kept.runs["run-0"])
    vitkit.train(out=tmp_path / "a", data="digits", resume=True)  # from its first step: it had no checkpoint
    assert before
    assert sorted(kept.runs["run-0"]) == once_each(tmp_path / "a")
    assert kept.states == {"run-0": "finished"}


def test_a_tracker_that_fails_ends_no_run_and_gets_it_later(tmp_path: Path, kept, monkeypatch) -> None:
    monkeypatch.setattr(kept, "broken", True)
    watcher = Notes()
    result = vitkit.train("digits", out=tmp_path / "a", track=["kept"], watcher=watcher, **SHORT)
    assert result.steps == 12
    warned = [line for line in watcher.said if "warning" in line and "nobody answers" in line]
    assert len(warned) == 2  # when it began, and at the end
    assert f"vitkit track {tmp_path / 'a'} kept" in warned[1]
    monkeypatch.setattr(kept, "broken", False)
    for _ in range(2):  # the second time nothing is new
        track.send_run(tmp_path / "a", "kept", print)
        assert sorted(kept.runs["run-0"]) == once_each(tmp_path / "a")


def test_a_slow_tracker_holds_nothing_up(tmp_path: Path, kept, monkeypatch) -> None:
    monkeypatch.setattr(track, "PATIENCE", 0.2)
    monkeypatch.setattr(kept, "open", lambda self, about, id: time.sleep(600))
    watcher = Notes()
    vitkit.train("digits", out=tmp_path / "a", track="kept", watcher=watcher, **SHORT)
    assert any("no answer within" in line for line in watcher.said)


def test_unknown_trackers_and_missing_logins_are_said_before_anything_runs(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(VitkitError, match="Did you mean mlflow"):
        vitkit.train("digits", out=tmp_path / "a", track="mlflaw", **SHORT)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr("wandb.login", lambda prompt: False)
    with pytest.raises(VitkitError, match="WANDB_MODE=offline"):
        vitkit.train("digits", out=tmp_path / "a", track="wandb", **SHORT)
    with pytest.raises(VitkitError, match="holds no run"):
        track.send_run(tmp_path, "mlflow", print)
    assert not (tmp_path / "a" / "config.json").exists()


# --- Weights & Biases, offline ---------------------------------------------------------------------------


def test_wandb_offline(tmp_path: Path, monkeypatch) -> None:
    """Its files hold what the log holds, once each, over a run that died and was resumed."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(RuntimeError):
        vitkit.train("digits", out=tmp_path / "a", track="wandb", watcher=Notes(dies=8), **SHORT)
    watcher = Notes()
    vitkit.train("digits", out=tmp_path / "a", resume=True, watcher=watcher)
    assert not [line for line in watcher.said if "warning: wandb" in line]
    found = [row for file in sorted((tmp_path / "a" / "wandb").glob("offline-run-*/*.wandb")) for row in history(file)]
    assert len({file.parent.name.rpartition("-")[2] for file in (tmp_path / "a").rglob("*.wandb")}) == 1  # one id
    wanted = [(step, name) for step, name, _ in once_each(tmp_path / "a")]
    assert sorted((step, name) for step, name, _ in found) == wanted
    values = {(step, name): value for step, name, value in once_each(tmp_path / "a")}
    assert all(value == pytest.approx(values[step, name]) for step, name, value in found)


def history(file: Path) -> list[tuple[int, str, float]]:
    """The records of a .wandb file, by the protocol buffers of wandb itself."""
    import json

    from wandb.proto import wandb_internal_pb2

    found = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item}
            found += [(row["_step"], k, v) for k, v in row.items() if not k.startswith("_")]
    return found


def records(content: bytes) -> Iterator[bytes]:
    """LevelDB's log after 7 bytes of header: blocks of 32 KiB, each piece with checksum, length and place."""
    at, held = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, place = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        held += content[at + 7 : at + 7 + length]
        at += 7 + length
        if place in (1, 4):  # whole, or the last piece
            yield held
            held = b""


# --- MLflow: its real server, in an environment of its own --------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """`python -m mlflow server` on loopback with SQLite; mlflow itself wants another pyarrow than vitkit's tests."""
    python = os.environ.get("VITKIT_MLFLOW_PYTHON", str(ROOT / ".mlflow" / "bin" / "python"))
    if not Path(python).exists():
        pytest.skip("no environment with the mlflow server; CONTRIBUTING.md says how to make one")
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "files")]
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    log = (folder / "log").open("wb")
    process = subprocess.Popen([python, *words], cwd=folder, stdout=log, stderr=log, env={**os.environ, "PATH": path})
    try:
        wait_for(port, process, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    import urllib.request

    for _ in range(1800):
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(log.read_text())


@pytest.mark.slow
def test_mlflow_over_a_run_that_died(tmp_path: Path, server, monkeypatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setattr(track, "EVERY", 0.01)
    with pytest.raises(RuntimeError):
        vitkit.train("digits", out=tmp_path / "first", track="mlflow", watcher=Notes(dies=8), **SHORT)
    vitkit.train("digits", out=tmp_path / "first", resume=True)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(server)
    (run,) = client.search_runs([client.get_experiment_by_name("vitkit").experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["steps"] == "12"
    assert "vitkit.best_top1" in run.data.tags
    found = [(m.step, m.key, m.value) for k in run.data.metrics for m in client.get_metric_history(run.info.run_id, k)]
    assert sorted(found) == once_each(tmp_path / "first")
    assert {f.path for f in client.list_artifacts(run.info.run_id)} >= {"config.json", "result.json"}


@pytest.mark.slow
def test_an_mlflow_server_that_is_not_there(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    watcher = Notes()
    result = vitkit.train("digits", out=tmp_path / "a", track="mlflow", watcher=watcher, **SHORT)
    assert result.steps == 12
    assert any("vitkit track" in line for line in watcher.said)


def test_importing_trackers_imports_no_client() -> None:
    code = "import sys, vitkit.training.track; print({'mlflow', 'wandb'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
