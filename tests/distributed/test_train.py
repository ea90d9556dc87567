"""Many processes: the same run as one, sharded or not, and a lost process is survived."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

import vitkit
from vitkit.training.log import read

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> str:
    random = np.random.default_rng(0)
    labels = np.arange(160) % 2
    images = random.integers(0, 60, (160, 8, 8, 1), dtype=np.uint8)
    images[labels == 1, 2:6, 2:6] += 100
    path = tmp_path_factory.mktemp("squares") / "squares.npz"
    np.savez(path, x_train=images[:128], y_train=labels[:128], x_val=images[128:], y_val=labels[128:])
    return str(path)


def command(data: str, out: Path, processes: int, *more: str, restarts: int = 0) -> list[str]:
    settings = ["--model", "vit-8px/2", "--steps", "50", "--batch-size", "16", "--lr", "0.003", "--augment", "light"]
    settings += ["--set", "optimizer=adamw", "--set", "log_every=1", "--set", "evaluations=2", "--set", "model.depth=2"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    launch += [f"--max-restarts={restarts}", "-m"]
    start = launch if processes > 1 else [sys.executable, "-m"]
    return [*start, "vitkit", "train", data, "--out", str(out), *settings, *more]


def run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def losses(out: Path) -> list[float]:
    lines = [line for line in read(out / "log.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 51))
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def alone(squares: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    run(command(squares, out, 1))
    return out


@pytest.mark.parametrize("more", [(), ("--shard",), ("--shard", "--set", "ema=0.9")], ids=["ddp", "fsdp", "fsdp, ema"])
def test_two_processes_learn_as_one(squares: str, alone: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    out = tmp_path / "two"
    run(command(squares, out, 2, *more))
    assert losses(out) == pytest.approx(losses(alone), abs=1e-5)  # sums of two halves round differently
    ours, theirs = (vitkit.load(p).state_dict() for p in (out, alone))
    assert ours.keys() == theirs.keys()
    results = [json.loads((p / "result.json").read_text()) for p in (out, alone)]
    if not more:
        assert results[0]["validation"] == pytest.approx(results[1]["validation"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--shard",)], ids=["ddp", "fsdp"])
def test_two_processes_learn_the_features_of_a_teacher_as_one(
    squares: str, tmp_path: Path, more: tuple[str, ...]
) -> None:
    teacher = vitkit.create("vit-8px/2", depth=1, channels=1, classes=0)
    vitkit.save(teacher, tmp_path / "teacher.safetensors")
    taught = ("--set", f"teacher={tmp_path / 'teacher.safetensors'}", "--set", "teacher_features=0.5")
    run(command(squares, tmp_path / "one", 1, *taught))
    run(command(squares, tmp_path / "two", 2, *taught, *more))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert vitkit.load(tmp_path / "two").state_dict().keys() == vitkit.load(tmp_path / "one").state_dict().keys()


@pytest.mark.parametrize("more", [(), ("--shard",)], ids=["ddp", "fsdp"])
def test_a_run_goes_on_with_another_number_of_processes(
    squares: str, alone: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    out = tmp_path / "moved"
    process = subprocess.Popen(
        command(squares, out, 2, *more, "--set", "save_every=0.01"), env=environment(), stderr=subprocess.PIPE
    )
    wait_for_step(out, 10, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert 10 <= read(out / "log.jsonl")[-1]["step"] < 50
    words = [*command(squares, out, 1, *more, "--resume")]
    run(words)
    assert losses(out) == pytest.approx(losses(alone), abs=1e-5)


def wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        lines = read(out / "log.jsonl")
        if lines and lines[-1]["step"] >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"the run never came to step {step}")


def test_killed_with_two_processes_and_resumed_ends_with_the_same_bits(squares: str, tmp_path: Path) -> None:
    """All of them at once and without warning, as when a machine loses power."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(command(squares, whole, 2))
    words = command(squares, cut, 2, "--set", "save_every=0.01")
    process = subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL)
    wait_for_step(cut, 20, process)
    for victim in (*children_of(process.pid), process.pid):
        os.kill(victim, signal.SIGKILL)
    process.wait()
    assert read(cut / "log.jsonl")[-1]["step"] < 50
    run([*words, "--resume"])
    assert losses(cut) == losses(whole)
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def children_of(process: int) -> list[int]:
    found = subprocess.run(["pgrep", f"-P{process}"], capture_output=True, text=True, check=False)
    return [int(p) for p in found.stdout.split()]


def test_a_lost_process_is_survived(squares: str, alone: Path, tmp_path: Path) -> None:
    """torchrun starts all processes again, and the run resumes from its last checkpoint by itself."""
    out = tmp_path / "lost"
    words = command(squares, out, 2, "--set", "save_every=0.01", restarts=2)
    process = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE)
    wait_for_step(out, 10, process)
    os.kill(children_of(process.pid)[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors.decode()[-3000:]
    assert losses(out) == pytest.approx(losses(alone), abs=1e-5)


def test_who_waits_for_a_process_that_has_ended_says_so(squares: str, tmp_path: Path) -> None:
    """The first process refuses the folder; the other one is waiting for its word at that moment."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    done = subprocess.run(
        command(squares, tmp_path / "run", 2),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment(),
    )
    assert "already holds a run" in done.stderr
    assert "[rank1]: Traceback" not in done.stderr


# --- without torchrun --------------------------------------------------------------------------------


def test_processes_of_train_itself_learn_the_same_with_muon(squares: str, tmp_path: Path) -> None:
    """They share the orthogonalisation, and the run says how many they were."""
    muon = ["--set", "optimizer=muon"]
    run(command(squares, tmp_path / "one", 1, *muon))
    run(command(squares, tmp_path / "two", 1, *muon, "--processes", "2"))
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=0.02, atol=1e-3)
    kept = json.loads((tmp_path / "two" / "config.json").read_text())
    assert kept["train"]["processes"] == kept["machine"]["processes"] == 2
    assert kept["train"]["threads"] == 1


def start_two(squares: str, out: Path) -> tuple["subprocess.Popen[str]", int]:
    """A long run of two processes that has made steps, and the number of the second one."""
    words = [word if word != "50" else "100000" for word in command(squares, out, 1, "--processes", "2")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    until(lambda: (out / "log.jsonl").exists() and (out / "log.jsonl").stat().st_size > 0)
    (other,) = [child.pid for child in psutil.Process(process.pid).children()]
    return process, other


def until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_killed_process_ends_the_run_in_words(squares: str, tmp_path: Path) -> None:
    process, other = start_two(squares, tmp_path / "run")
    os.kill(other, signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "lost process 1 (killed by SIGKILL)" in said
    assert "Traceback" not in said


def test_the_second_process_ends_with_the_first(squares: str, tmp_path: Path) -> None:
    process, other = start_two(squares, tmp_path / "run")
    process.kill()
    process.communicate(timeout=300)
    until(lambda: not psutil.pid_exists(other) or psutil.Process(other).status() == psutil.STATUS_ZOMBIE)


def test_a_stopped_run_is_resumed_with_as_many(squares: str, tmp_path: Path) -> None:
    process, other = start_two(squares, tmp_path / "run")
    process.terminate()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert not psutil.pid_exists(other)
    words = [sys.executable, "-m", "vitkit", "train", squares, "--out", str(tmp_path / "run"), "--resume"]
    again = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    until(lambda: again.poll() is not None or len(psutil.Process(again.pid).children()) == 1)
    again.terminate()
    again.communicate(timeout=300)
