"""`--engine ray`, with a real Ray on this machine: the rows of the plain command, whatever dies on the way."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

import vitkit
from peers import randomize
from vitkit.errors import TrainError
from vitkit.model.config import ViTConfig
from vitkit.prediction import Opened, open_inputs, open_model, run_job

pytestmark = pytest.mark.slow
CONFIG = ViTConfig(image_size=16, patch_size=8, width=16, depth=2, heads=2, mlp_width=16, classes=3)
COUNT, BATCH = 640, 4  # 40 pieces


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, small images, and what the plain job says about them."""
    folder = tmp_path_factory.mktemp("stage")
    vitkit.save(randomize(vitkit.create(CONFIG), scale=0.5), folder / "model.safetensors", class_names=("a", "b", "c"))
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 16, 16, 3), dtype=np.uint8)
    np.savez(folder / "small.npz", images=pixels, labels=np.arange(COUNT) % 3)
    for features, out in ((None, "plain.parquet"), ("", "plain.npz")):
        run_job(opened_for(folder, features), open_inputs(str(folder / "small.npz")), folder / out, BATCH)
    return folder


def opened_for(folder: Path, features: str | None = None) -> Opened:
    return open_model(str(folder / "model.safetensors"), features=features)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray for the tests that need no other; it is used wherever one is already there."""
    from vitkit.ray.cluster import connected

    with connected(None, 2):
        yield


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


SLOW = """
import sys, time
from functools import partial
from pathlib import Path
from vitkit.prediction import Opened, open_inputs, open_model, run_job
from vitkit.ray.job import engine

folder, out, batch = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def slow():
    answer = Opened.__call__
    Opened.__call__ = lambda self, images: time.sleep(0.1) or answer(self, images)
    return open_model(str(folder / "model.safetensors"))

source = open_inputs(str(folder / "small.npz"))
run_job(open_model(str(folder / "model.safetensors")), source, out, batch, engine=engine(slow, None, 2))
"""


def workers_of(driver: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if "MapBatches(Worker)" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for_pieces(out: Path, count: int, driver: subprocess.Popen) -> None:
    parts, deadline = out.with_name(f"{out.name}.parts"), time.monotonic() + 600
    while time.monotonic() < deadline:
        if parts.is_dir() and len(list(parts.glob("*.jsonl"))) >= count:
            return
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.01)
    raise AssertionError(f"{count} pieces were never there")


def kill_a_worker(driver: int) -> None:
    deadline = time.monotonic() + 600
    while not (found := workers_of(driver)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found[0].kill()
    found[0].wait(60)


def test_workers_killed_twice_then_the_driver_then_resumed(stage: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, stage, out, str(BATCH)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    for pieces in (2, 6):
        wait_for_pieces(out, pieces, process)
        kill_a_worker(process.pid)
    wait_for_pieces(out, 12, process)
    below = workers_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, alive = psutil.wait_procs(below, timeout=120)
    assert not alive, "the workers of a killed command end with it"
    assert not out.exists()
    words = ["predict", stage / "model.safetensors", stage / "small.npz", "--out", out, "--batch-size", BATCH]
    words += ["--engine", "ray", "--processes", 2, "--resume"]
    done = subprocess.run(
        [sys.executable, "-m", "vitkit", *map(str, words)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{COUNT} images" in done.stdout
    assert pq.read_table(out).equals(pq.read_table(stage / "plain.parquet"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows", "rows.job.json"]


@pytest.mark.usefixtures("cluster")
def test_features_are_the_same_bytes(stage: Path, tmp_path: Path) -> None:
    from functools import partial

    from vitkit.ray.job import engine

    out, source = tmp_path / "features.npz", open_inputs(str(stage / "small.npz"))
    shared = engine(partial(open_model, str(stage / "model.safetensors"), features=""), None, 2)
    run_job(opened_for(stage, ""), source, out, BATCH, engine=shared)
    assert out.read_bytes() == (stage / "plain.npz").read_bytes()


@pytest.mark.usefixtures("cluster")
def test_a_pipeline_of_the_users_own(stage: Path) -> None:
    import ray

    pixels = np.load(stage / "small.npz")["images"][:32]
    ds = ray.data.from_items([{"id": i, "image": image} for i, image in enumerate(pixels)])
    found = ds.map_batches(
        vitkit.ray.Predictor,
        fn_constructor_args=(str(stage / "model.safetensors"),),
        fn_constructor_kwargs={"keep": ["id"], "top": 3},
        compute=ray.data.ActorPoolStrategy(size=1),
        batch_size=16,
    ).take_all()
    plain = vitkit.predict(stage / "model.safetensors", list(pixels))
    assert len(found) == 32
    for row in found:
        expected = plain[row["id"]]
        assert (row["class"], row["error"]) == (expected["class"], None)
        assert row["probability"] == pytest.approx(expected["probability"], abs=2e-6)  # other batches


def train_config(stage: Path, out: Path, **more: object) -> vitkit.TrainConfig:
    settings = {"model": "vit-8px/2", "steps": 40, "batch_size": 16, "lr": 0.003, "log_every": 1, "save_every": 0.01}
    return vitkit.TrainConfig(data=str(stage / "small.npz"), out=str(out), **{**settings, **more})  # type: ignore[arg-type]


@pytest.mark.usefixtures("cluster")
def test_trained_by_ray_killed_once_same_bits_as_torchrun(stage: Path, tmp_path: Path) -> None:
    from threading import Thread

    from vitkit.ray.train import run
    from vitkit.training.log import read

    ours, theirs = tmp_path / "ray", tmp_path / "torchrun"
    options = "--model vit-8px/2 --steps 40 --batch-size 16 --lr 0.003 --set log_every=1 --set save_every=0.01"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "vitkit"]
    subprocess.run(
        [*launch, "train", stage / "small.npz", "--out", theirs, *options.split()],
        env=environment(),
        check=True,
        capture_output=True,
    )
    killed = []

    def kill() -> None:
        while not killed:
            lines = read(ours / "log.jsonl")
            if lines and lines[-1]["step"] >= 5:
                below = psutil.Process().children(recursive=True)
                found = [p for p in below if "RayTrainWorker" in " ".join(p.cmdline())]
                found[-1].kill()
                killed.append(lines[-1]["step"])
            time.sleep(0.01)

    thread = Thread(target=kill, daemon=True)
    thread.start()
    result = run(train_config(stage, ours), None, 2, quiet=True)
    thread.join(60)
    assert killed
    assert result.steps == 40
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert [line["step"] for line in read(ours / "log.jsonl") if "loss" in line] == list(range(1, 41))
    assert not (ours / ".ray").exists()
    with pytest.raises(TrainError, match="already holds a run"):
        run(train_config(stage, ours), None, 2, quiet=True)
