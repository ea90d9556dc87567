"""The verdict is right about sabotaged runs, and runs of every method that were killed end with the same bits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vitkit
from vitkit.errors import VitkitError
from vitkit.tasks import METHODS
from vitkit.training.log import read

pytestmark = pytest.mark.slow
SMALL = {"model": "vit-8px/2", "changes": {"depth": 2, "width": 32, "heads": 2, "mlp_width": 64}}
SMALL |= {"steps": 120, "batch_size": 64, "evaluations": 1}
LR = 2e-3

SABOTAGED = {  # method, options, how many times the learning rate, what the verdict must begin with
    "no SIGReg": ("lejepa", {"weight": 0.0}, 1, "collapsed: all images have nearly the same projection"),
    "teacher momentum 0": ("dino", {"momentum": 0.0}, 1, ("collapsed", "not better")),  # both were seen
    "no centring": ("dino", {"centring": "none"}, 1, "collapsed: the teacher gives all images nearly the same code"),
    "masking 0%": ("mae", {"masking": 0.0}, 1, "task.masking=0 leaves nothing to predict"),
    "mae, rate x100": ("mae", {}, 100, ("collapsed", "not better", "the loss was", "the run has diverged")),
    "dino, rate x100": ("dino", {}, 100, ("collapsed", "not better", "the loss was", "the run has diverged")),
    "lejepa, rate x100": ("lejepa", {}, 100, ("collapsed", "not better", "the loss was", "the run has diverged")),
}


@pytest.mark.parametrize("name", SABOTAGED)
def test_a_sabotaged_run_is_called_what_it_is(name: str, tmp_path: Path) -> None:
    method, options, times, words = SABOTAGED[name]
    try:
        longer = {**SMALL, "steps": 250 if name == "no centring" else 120}  # it collapses more slowly than the others
        run = vitkit.pretrain("digits", method=method, options=options, lr=LR * times, out=tmp_path / "run", **longer)
        said = run.verdict
    except VitkitError as e:
        said = str(e)
    assert said.startswith(words), said


@pytest.mark.parametrize("method", METHODS)
def test_a_healthy_run_is_not_called_collapsed(method: str, tmp_path: Path) -> None:
    run = vitkit.pretrain("digits", method=method, lr=LR, out=tmp_path / "run", **SMALL)
    assert not run.verdict.startswith("collapsed"), run.verdict
    losses = [line["loss"] for line in read(run.out / "log.jsonl") if "loss" in line]
    assert losses[-1] < losses[0] or method == "dino"  # its target moves with the teacher


def command(out: Path, method: str, processes: int, *more: str) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    settings = ["--model", "vit-8px/2", "--steps", "14", "--batch-size", "32", "--lr", "0.001"]
    for setting in ("log_every=1", "evaluations=2", "model.depth=1", "save_every=0.01"):
        settings += ["--set", setting]
    return [
        sys.executable,
        *launch,
        "-m",
        "vitkit",
        "pretrain",
        "digits",
        "--method",
        method,
        "--out",
        str(out),
        *settings,
        *more,
    ]


def children_of(process: int) -> list[int]:
    found = subprocess.run(["pgrep", f"-P{process}"], capture_output=True, text=True, check=False)
    return [int(p) for p in found.stdout.split()]


@pytest.mark.parametrize(
    ("method", "processes"), [*((m, 1) for m in METHODS), ("dino", 2), ("lejepa", 2), ("mae", 2), ("masked-patch", 2)]
)
def test_killed_and_resumed_ends_with_the_same_bits(method: str, processes: int, tmp_path: Path) -> None:
    """All processes at once and without warning, as when a machine loses power: teacher and centre are in the state."""
    more = ["--set", "task.ibot=1", "--set", "task.koleo=0.1"] if method == "dino" else []
    whole, cut, environment = tmp_path / "whole", tmp_path / "cut", {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(whole, method, processes, *more), check=True, capture_output=True, env=environment)
    words = command(cut, method, processes, *more)
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not any(line["step"] >= 6 for line in read(cut / "log.jsonl")):
        time.sleep(0.02)
    for victim in (*children_of(process.pid), process.pid):
        os.kill(victim, signal.SIGKILL)
    process.wait()
    assert read(cut / "log.jsonl")[-1]["step"] < 14
    subprocess.run([*words, "--resume"], check=True, capture_output=True, env=environment)
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert read(cut / "log.jsonl") == read(whole / "log.jsonl")
