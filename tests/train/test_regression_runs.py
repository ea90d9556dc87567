"""Numbers instead of classes, from a column of a list to a predicted row, through the same loop and evaluator."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from vitkit.data import open_data
from vitkit.errors import ConfigError
from vitkit.tasks import task_of
from vitkit.training.config import TrainConfig
from vitkit.training.log import read


@pytest.fixture
def listed(tmp_path: Path) -> str:
    """Grey squares of a brightness that the list tells, beside a column of words."""
    random = np.random.default_rng(0)
    with open(tmp_path / "list.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "light", "dark", "label"])
        for i in range(160):
            value = int(random.integers(20, 230))
            pixels = random.integers(value - 10, value + 10, (8, 8)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{i:03}.png")
            rows.writerow([f"{i:03}.png", 1000 + value, -value / 255, "ab"[i % 2]])
    return str(tmp_path / "list.csv")


def settings(listed: str, out: Path, **more: object) -> TrainConfig:
    changes = {"depth": 1, "width": 32, "heads": 2, "mlp_width": 32, "channels": 1}
    about = {"data": listed, "model": "vit-8px/2", "changes": changes, "out": str(out), "steps": 60, "batch_size": 32}
    return TrainConfig(**{**about, "target": ("light", "dark"), "evaluations": 2, "workers": 0, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_a_run_learns_numbers(listed: str, tmp_path: Path, loss: str) -> None:
    result = vitkit.train(settings(listed, tmp_path / "run", loss=loss))
    assert result.best["r2"] > 0.9
    assert result.score.text(0.5) == "0.5000"
    last = read(tmp_path / "run" / "log.jsonl")[-1]
    assert {"val_r2", "val_spearman", "val_mae_light", "val_rmse_dark"} <= last.keys()
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (about["train"]["loss"], about["train"]["augment"]["crop"]) == (loss, "none")
    model = vitkit.load(tmp_path / "run")
    assert (model.outputs.kind, model.outputs.names) == ("values", ("light", "dark"))
    assert model.outputs.mean[0] == pytest.approx(1125, abs=15)
    found = vitkit.evaluate(model, open_data(listed, target=("dark", "light")).evaluation())  # in another order
    assert found.targets["light"]["r2"] > 0.9
    assert found.targets["light"]["mae"] < 30
    assert 1000 < task_of(model).rows(model(torch.zeros(1, 1, 8, 8)))[0]["light"] < 1250


def test_the_same_numbers_are_fine_tuned_with_their_head(listed: str, tmp_path: Path) -> None:
    vitkit.train(settings(listed, tmp_path / "first"))
    more = {"model": "", "changes": {}, "init": str(tmp_path / "first"), "steps": 1, "lr": 1e-9}
    again = vitkit.train(settings(listed, tmp_path / "again", **more))
    assert again.validation["r2"] > 0.9  # it knew them before the first step
    other = vitkit.train(settings(listed, tmp_path / "other", **more, target=("dark",)))
    assert other.validation["r2"] < 0.1


def test_data_and_model_must_agree(listed: str, tmp_path: Path) -> None:
    vitkit.train(settings(listed, tmp_path / "run", steps=1))
    model = vitkit.load(tmp_path / "run")
    with pytest.raises(ConfigError, match="has classes; open it with --target light --target dark"):
        vitkit.evaluate(model, open_data(listed).evaluation())
    with pytest.raises(ConfigError, match="the task regress needs values"):
        vitkit.train(settings(listed, tmp_path / "no", target=(), task="regress"))
    classes = vitkit.create("vit-8px/2", classes=2, channels=1)
    with pytest.raises(ConfigError, match="and the model predicts classes"):
        vitkit.evaluate(classes, open_data(listed, target="light").evaluation())
