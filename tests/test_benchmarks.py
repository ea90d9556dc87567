"""The benchmarks run. Nothing here looks at how fast anything is: that depends on what else the machine does."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(script: str, tmp_path: Path, *options: str) -> dict[str, Any]:
    saved = tmp_path / "found.json"
    command = [sys.executable, str(BENCHMARKS / script), "--quick", "--threads", "1", "--save", str(saved), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(saved.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("script", ["forward.py", "train_step.py"])
def test_rows(script: str, tmp_path: Path) -> None:
    found = run(script, tmp_path, "--only", "mu", "--batch", "2", "--systems", "vitkit", "--memory")
    (row,) = found["rows"]
    assert row["images_per_second"] > 0
    assert 0 < row["of_gemm_limit"] < 1
    assert row["ratio_to_best_peer"] > 0
    assert row["peak_mb"] is not None
    assert found["machine"]["packages"]["vitkit"] != "not installed"


def test_machine_is_described_without_names(tmp_path: Path) -> None:
    text = json.dumps(run("attention.py", tmp_path))
    assert "plain_is_faster_by" in text
    assert str(Path.home()) not in text
    assert platform.node() not in text or not platform.node()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["forward.py", "train_step.py"])
def test_every_peer_builds_the_same_shape(script: str, tmp_path: Path) -> None:
    found = run(script, tmp_path, "--only", "mu", "--batch", "2")
    systems = [row["system"] for row in found["rows"]]
    assert systems == ["vitkit", "timm", "huggingface", "torchvision", "vit-pytorch"]


@pytest.mark.slow
def test_shards_are_read_by_one_rank_each(tmp_path: Path) -> None:
    found = run("shards.py", tmp_path)
    epochs = [row for row in found["rows"] if "shards opened" in row]
    assert [(row["shards opened"], row["shards opened by more than one rank"]) for row in epochs] == [(200, 0)] * 3
    assert {row["samples"] for row in epochs} == {20_000 // 256 * 256}


@pytest.mark.slow
@pytest.mark.parametrize("system", ["timm", "vit-pytorch"])
def test_a_peer_is_trained_and_tested(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from time_to_accuracy import peer

    row = peer(system, "digits", seconds=1.0, seed=0)
    assert 0 < row["looks"][-1]["test"] <= 1
