"""Runs from files: the same bits from Python, from a file and from the command; wrong files say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema_rs
import pytest

import vitkit
from vitkit.training.files import as_toml, read_settings, schema

SHORT = 'data = "digits"\nmodel = "mu"\nsteps = 2\nbatch_size = 8\nevaluations = 1\nimage_size = [8, 8]\n'


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_python_file_and_command_give_the_same_bits(tmp_path: Path, command) -> None:
    (tmp_path / "run.toml").write_text(SHORT + "[augment]\nflip = 0.5\n[changes]\ndropout = 0.1\n")
    by_python = vitkit.train(
        "digits", model="mu", steps=2, batch_size=8, evaluations=1, image_size=8, out=tmp_path / "python",
        augment={"flip": 0.5}, changes={"dropout": 0.1},
    ).out  # fmt: skip
    words = ("--steps", 2, "--batch-size", 8, "--image-size", 8, "--model", "mu", "--set", "evaluations=1")
    more = ("--set", "augment.flip=0.5", "--set", "model.dropout=0.1")
    code, _, err = command("train", "digits", *words, *more, "--out", tmp_path / "cli")
    assert code == 0, err
    code, _, err = command("train", "--config", tmp_path / "run.toml", "--out", tmp_path / "file")
    assert code == 0, err
    again = vitkit.train(config=by_python, out=tmp_path / "again").out  # a run repeats itself
    code, _, err = command("train", "--config", tmp_path / "cli" / "config.json", "--out", tmp_path / "json")
    assert code == 0, err
    same = [weights(tmp_path / name) for name in ("python", "cli", "file", "again", "json")]
    assert len(set(same)) == 1
    assert again != by_python


def test_options_win_over_the_file(tmp_path: Path, command) -> None:
    (tmp_path / "run.toml").write_text(SHORT + f'seed = 7\nout = "{tmp_path / "a"}"\n')
    code, _, err = command("train", "--config", tmp_path / "run.toml", "--steps", 1, "--set", "lr=0.003")
    assert code == 0, err
    made = json.loads((tmp_path / "a" / "config.json").read_text())["train"]
    assert (made["steps"], made["seed"], made["lr"], made["batch_size"]) == (1, 7, 0.003, 8)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "epoch = 3", "Did you mean epochs"),
        ("a.toml", "[augment]\nmixupp = 1.0", "Did you mean mixup"),
        ("a.toml", "steps = ", "cannot be read"),
        ("a.json", "[1]", "settings by name"),
        ("a.json", '{"steps": "many"}', "whole number"),
        ("a.yaml", "steps: 1", ".toml or .json"),
        ("absent.toml", None, "is not there"),
    ],
)
def test_wrong_files_say_what_to_do(name: str, text: str | None, words: str, tmp_path: Path, command) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    code, _, err = command("train", "digits", "--config", tmp_path / name, "--out", tmp_path / "run")
    assert code == 2
    assert words in err
    assert "Traceback" not in err


def test_data_must_stand_somewhere(tmp_path: Path, command) -> None:
    code, _, err = command("train", "--out", tmp_path / "run")
    assert code == 2
    assert "name the images to train on" in err


def test_what_is_shown_is_read_again(tmp_path: Path, command) -> None:
    config = vitkit.TrainConfig(data='a "b"\n\\c', steps=3, augment="strong", changes={"dropout": 0.1, "x": None})
    (tmp_path / "shown.toml").write_text(as_toml(config.to_dict()))
    read = vitkit.TrainConfig(**read_settings(tmp_path / "shown.toml"))
    assert read.replace(changes=config.changes) == config
    code, out, _ = command("config", "show", tmp_path / "shown.toml", "--set", "lr=0.5", "--json")
    assert code == 0
    assert json.loads(out)["lr"] == 0.5
    assert "steps = 3" in command("config", "show", tmp_path / "shown.toml")[1]


def test_the_schema_accepts_configurations_and_refuses_misspelt_ones(command) -> None:
    check = jsonschema_rs.validator_for(schema())
    for config in (vitkit.TrainConfig(data="digits"), vitkit.TrainConfig(image_size=32, augment="light", target="age")):
        assert check.is_valid(json.loads(json.dumps(config.to_dict())))
    for good in ({"budget": "5m"}, {"augment": "light"}, {"image_size": 224}, {"precision": "bf16"}):
        assert check.is_valid(good)
    for bad in ({"epoch": 3}, {"precision": "fp8"}, {"steps": "2"}, {"augment": {"mixupp": 1}}, {"optimizer": "adm"}):
        assert not check.is_valid(bad)
    assert "learning rate" in json.dumps(schema())  # the words behind the fields
    assert json.loads(command("config", "schema")[1]) == schema()


def test_runs_are_listed_sorted_and_compared(tmp_path: Path, command) -> None:
    for name, lr in (("b", 1e-3), ("a", 1e-2)):
        vitkit.train("digits", model="mu", steps=1, batch_size=8, evaluations=1, lr=lr, out=tmp_path / "runs" / name)
    (tmp_path / "runs" / "stopped").mkdir()
    text = (tmp_path / "runs" / "a" / "config.json").read_text()
    (tmp_path / "runs" / "stopped" / "config.json").write_text(text)
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "config.json").write_text('{"model_type": "vit"}')
    rows = json.loads(command("runs", tmp_path / "runs", "--json")[1])
    assert [Path(row["run"]).name for row in rows] == ["a", "b", "stopped"]
    assert [row["state"] for row in rows] == ["finished", "finished", "stopped at step 0"]
    assert rows[0]["metric"] == "top1"
    assert 0 <= rows[0]["best"] <= 1
    by_lr = json.loads(command("runs", tmp_path / "runs", "--sort", "-lr", "--json")[1])
    assert [Path(row["run"]).name for row in by_lr] == ["a", "stopped", "b"]
    folders = (tmp_path / "runs" / "a", tmp_path / "runs" / "b")
    differs = json.loads(command("runs", *folders, "--compare", "--json")[1])["differences"]
    assert differs["lr"] == [1e-2, 1e-3]
    assert "steps" not in differs
    turned = json.loads(command("runs", *folders[::-1], "--compare", "--json")[1])
    assert turned["runs"] == [str(folder) for folder in folders[::-1]], "in the order in which they are named"
    assert turned["differences"]["lr"] == [1e-3, 1e-2]
    assert "lr" in command("runs", *folders, "--compare")[1]
    assert "Did you mean" in command("runs", tmp_path / "runs", "--sort", "beest")[2]
    assert "two runs" in command("runs", folders[0], "--compare")[2]
    assert "no folder" in command("runs", tmp_path / "absent")[2]


def test_tables_of_runs_have_scores_as_every_other_table(tmp_path: Path, command) -> None:
    """Accuracy in percent, R2 as a number; in JSON both are numbers."""
    planted = {"top1": ("top1", 0.075, 0.5), "r2": ("r2", 0.075, -1.25), "labels": ("map", 0.125, 1.0)}
    for name, (metric, score, test) in planted.items():
        best = {"score": score, metric: score, "loss": 2.3, "step": 4}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"train": vitkit.TrainConfig(data="d").to_dict()}))
        result = {"best": best, "test": {metric: test}, "metric": metric, "higher": True, "steps": 4, "seconds": 0.5}
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    lines = {Path(line.split()[0]).name: line for line in command("runs", tmp_path)[1].splitlines() if line.split()}
    expected = {"top1": ("7.50%", "50.00%"), "r2": ("0.0750", "-1.2500"), "labels": ("12.50%", "100.00%")}
    for name, shown in expected.items():
        assert all(f" {score} " in lines[name] for score in shown), lines[name]
        assert " 0.5 " in lines[name]  # seconds
    compared = [line.split() for line in command("runs", tmp_path, "--compare", "--sort", "best")[1].splitlines()]
    assert ["best.score", "0.0750", "7.50%", "12.50%"] in compared
    numbers = {Path(row["run"]).name: row["best"] for row in json.loads(command("runs", tmp_path, "--json")[1])}
    assert numbers == {"top1": 0.075, "r2": 0.075, "labels": 0.125}
