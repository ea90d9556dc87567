"""What runs inside the processes of Ray, called here as Ray would call it, without one."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import vitkit
from peers import randomize
from vitkit.errors import TrainError
from vitkit.model.config import ViTConfig
from vitkit.prediction import Job, Opened, open_inputs, open_model

CONFIG = ViTConfig(image_size=16, patch_size=8, width=16, depth=2, heads=2, mlp_width=16, classes=3)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Of five pieces, begun; objects are their own references."""
    vitkit.save(randomize(vitkit.create(CONFIG), scale=0.5), tmp_path / "m.safetensors", class_names=("a", "b", "c"))
    pixels = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", images=pixels, labels=np.arange(40) % 3)
    monkeypatch.setattr("ray.get", lambda reference: reference)
    monkeypatch.chdir(tmp_path)
    made = Job(open_model(str(tmp_path / "m.safetensors")), open_inputs(str(tmp_path / "x.npz")), tmp_path / "o.csv", 2)
    made.begin(resume=False, force=False)
    return made


def worker(job: Job, open_model_there: object = None, retries: int = 1, **versions: str):
    from vitkit.ray.cluster import versions as here
    from vitkit.ray.job import Worker

    reader = open_model_there or partial(open_model, str(job.out.with_name("m.safetensors")))
    return Worker(job.without_model(), reader, os.getcwd(), {**here(), **versions}, retries)


def answer(made, *pieces: int) -> tuple[list[int], str]:
    (found,) = made({"data": np.array(pieces)})
    assert len(set(found["error"])) == 1
    return found["piece"].tolist(), found["error"][0]


def test_pieces_are_those_of_the_plain_job(job: Job) -> None:
    assert answer(worker(job), 3, 1) == ([3, 1], "")
    assert job.todo() == [0, 2, 4]
    before = {p.name: p.stat().st_mtime_ns for p in job.folder.glob("*.jsonl")}
    assert answer(worker(job), 0, 1, 2, 3, 4) == ([0, 1, 2, 3, 4], ""), "asked again: the same answer"
    assert {n: (job.folder / n).stat().st_mtime_ns for n in before} == before, "and nothing done twice"
    rows = [row for piece in job.read() for row in piece]
    for p in job.folder.glob("*.jsonl"):
        p.unlink()
    assert list(job.do(range(5))) == [0, 1, 2, 3, 4]
    assert [row for piece in job.read() for row in piece] == rows


def test_the_same_images_end_a_worker_only_so_often(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(BaseException):
        pass

    def die(self: Opened, images: object) -> list:
        raise Dead

    monkeypatch.setattr(Opened, "__call__", die)
    for _ in range(2):
        with pytest.raises(Dead):
            answer(worker(job), 2, 3)
    pieces, error = answer(worker(job), 2, 3)
    assert pieces == [2, 3]
    assert "a worker died 2 times at the same images" in error
    assert job.source.where(16) in error


def test_workers_that_die_while_they_open_the_model(job: Job) -> None:
    class Dead(BaseException):
        pass

    def die() -> Opened:
        raise Dead

    for _ in range(4):
        with pytest.raises(Dead):
            worker(job, die)
    assert "die while they open the model" in answer(worker(job, die), 0)[1]


def test_what_differs_is_said(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "install the same versions" in answer(worker(job, torch="1.0"), 0)[1]
    vitkit.save(randomize(vitkit.create(CONFIG), scale=0.4), Path("other.safetensors"), class_names=("a", "b", "c"))
    error = answer(worker(job, partial(open_model, "other.safetensors")), 0)[1]
    assert "has opened another model: model (" in error
    job.remove()
    assert "all machines must share the folder" in answer(worker(job), 0)[1]


def test_no_cluster_and_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from vitkit.errors import ConfigError
    from vitkit.ray.cluster import connected

    def raising(error: Exception):
        def init(*_: object, **__: object) -> None:
            raise error

        return init

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    other = "Version mismatch: The cluster was started with:\n    Ray: 2.1\n    Python: 3.9"
    for address, error, words in (
        ("auto", ConnectionError("Could not find any running Ray instance."), "no Ray cluster answers at auto"),
        ("x:1", RuntimeError(other), "the Ray cluster at x:1 has other versions .*Ray: 2.1, Python: 3.9"),
        (None, Exception("The current node timed out during startup."), "a local Ray cannot be started"),
    ):
        monkeypatch.setattr(ray, "init", raising(error))
        with pytest.raises(ConfigError, match=words), connected(address):
            pass


def work(tmp_path: Path, **more: object) -> dict:
    from vitkit.ray.cluster import versions
    from vitkit.ray.train import Work

    np.savez(tmp_path / "x.npz", images=np.zeros((40, 8, 8, 1), np.uint8), labels=np.arange(40) % 2)
    config = vitkit.TrainConfig(
        data=str(tmp_path / "x.npz"), out=str(tmp_path / "run"), model="vit-8px/2", steps=2, batch_size=8
    )
    plain = Work(
        config=config,
        resume=False,
        restart=False,
        accept=False,
        quiet=True,
        notes=str(tmp_path / "notes"),
        folder=str(tmp_path),
        argv=["vitkit", "train"],
        versions=versions(),
    )
    return {**plain, **more}


def test_a_process_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run, its score for the command; called again it resumes; an error of the user's is left for everybody."""
    from vitkit.ray.train import _ERROR, _RESULT, _work

    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.chdir(tmp_path)
    notes = tmp_path / "notes"
    notes.mkdir()
    _work(work(tmp_path))  # type: ignore[arg-type]
    assert (tmp_path / "run" / "result.json").is_file()
    assert '"top1"' in (notes / _RESULT).read_text()
    _work(work(tmp_path))  # type: ignore[arg-type]
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1", "a lost process: the same command means resume"
    for file in notes.iterdir():
        file.unlink()
    with pytest.raises(TrainError, match="already holds a run"):
        _work(work(tmp_path))  # type: ignore[arg-type]
    assert "already holds a run" in (notes / _ERROR).read_text()
    assert _work(work(tmp_path)) is None, "the attempt after it ends at once"  # type: ignore[arg-type,func-returns-value]


def test_a_run_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is published there, and nothing is left where the command was started."""
    import contextlib

    import fsspec

    from vitkit.ray import train as ray_train
    from vitkit.ray.cluster import Cluster
    from vitkit.storage import remote

    class Here:
        """A trainer whose only process is this one."""

        def __init__(self, work: Callable[[dict], None], *, train_loop_config: dict, **_: object) -> None:
            self.fit = partial(work, train_loop_config)

    started = tmp_path / "started"
    started.mkdir()
    monkeypatch.chdir(started)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(remote.SCHEMES, "memory", ("fsspec", ""))
    monkeypatch.setattr(ray_train, "TorchTrainer", Here)
    monkeypatch.setattr(ray_train, "connected", lambda *_, **__: contextlib.nullcontext(Cluster(None, 1, False)))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    config = work(tmp_path)["config"].replace(out="memory://bucket/runs/one")
    try:
        result = ray_train.run(config, quiet=True)
        assert result.steps == 2
        assert result.score.key == "top1"
        assert vitkit.load("memory://bucket/runs/one/best.safetensors").config == result.model.config
        assert [*started.iterdir()] == []
    finally:
        fsspec.filesystem("memory").store.clear()
