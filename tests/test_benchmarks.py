"""The benchmarks run. Nothing here looks at how fast anything is: that depends on what else the machine does."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

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


@pytest.mark.slow
def test_pretraining_is_compared_and_rows_are_not_made_twice(tmp_path: Path) -> None:
    options = ("--work", str(tmp_path / "work"), "--only", "value,speed")
    found = run("pretrain.py", tmp_path, *options)
    assert [row["part"] for row in found["rows"]] == ["speed", "value", "pretrain", "value"]
    _, scratch, before, after = found["rows"]
    assert (scratch["method"], after["method"]) == ("scratch", "mae")
    assert after["seconds"] + before["seconds"] <= after["budget"] * 1.2
    assert {"knn", "linear", "verdict"} <= before.keys()
    assert run("pretrain.py", tmp_path, *options)["rows"] == found["rows"]


def test_a_share_of_the_labels_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from pretrain import labelled_share
    from vitkit import open_data

    for number in range(60):
        folder = tmp_path / "photos" / ("train" if number < 40 else "test") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    few = open_data(labelled_share(str(tmp_path / "photos"), 0.25, 0, tmp_path))
    splits = dict(few.splits)
    assert splits.pop("test") == 20
    assert sum(splits.values()) < 15
    assert few.split("train").classes == ("a", "b")


def test_a_widened_model_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import torch

    import grow
    import vitkit

    torch.manual_seed(0)
    model = vitkit.create("vit-ti/16", image_size=32, depth=2, classes=5).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # fresh ones are zero where a mistake would not show
            parameter.normal_(std=0.1)
        images = torch.randn(3, 3, 32, 32)
        wide = grow.widened(model, 4)
        assert (wide.config.width, wide.config.heads) == (768, 12)
        torch.testing.assert_close(wide(images), model(images), rtol=1e-4, atol=1e-4)  # sums of 4 times the terms


@pytest.mark.slow
def test_photographs_are_compared_and_rows_are_not_made_twice(tmp_path: Path) -> None:
    found = run("photographs.py", tmp_path, "--systems", "timm")
    assert [row["part"] for row in found["rows"]] == ["frozen", "frozen", "finetune"]
    _, real, tuned = found["rows"]
    assert real["photographs"] == 60
    assert real["vitkit"] > 0.5
    assert real["scikit-learn"] > 0.5
    assert tuned["images"] == 30
    assert tuned["test"] > 0.5
    assert run("photographs.py", tmp_path, "--systems", "timm")["rows"] == found["rows"]


def test_photographs_are_divided_by_class_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from photographs import divided

    for number in range(60):
        path = tmp_path / "all" / "ab"[number % 3 == 0] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    photos = {seed: divided(str(tmp_path / "all"), seed, tmp_path / str(seed), count=30) for seed in (0, 1)}
    names = {seed: sorted(path.name for path in folder.rglob("*.jpg")) for seed, folder in photos.items()}
    assert len(names[0]) == 30
    assert names[0] != names[1]
    left = [path.name for path in (tmp_path / "0" / "left").rglob("*.jpg")]
    assert sorted([*names[0], *left]) == sorted(f"{number}.jpg" for number in range(60))
    sizes = {split: [len(list((photos[0] / split / c).iterdir())) for c in "ab"] for split in ("train", "val", "test")}
    assert sizes == {"train": [13, 7], "val": [2, 1], "test": [5, 2]}
