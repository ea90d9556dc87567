"""`vitkit evaluate`: what it prints and writes, and what it says when something does not fit."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

import vitkit
from data.making import write_folder
from evaluate.subjects import CONFIG
from peers import randomize
from vitkit.checkpoints.native import save
from vitkit.cli.main import run
from vitkit.model.config import ViTConfig

COLOUR = CONFIG.replace(classes=2, channels=3)


@pytest.fixture
def vitkit_evaluate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command in this process, through the same entry point as the shell: (exit code, out, err)."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vitkit", "evaluate", *map(str, args)])
        with pytest.raises(SystemExit) as done:
            run()
        captured = capsys.readouterr()
        return int(done.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folders = {f"{split}/{name}": 8 for split in ("train", "test") for name in ("cats", "dogs")}
    return write_folder(tmp_path / "photos", folders)


def saved(path: Path, config: ViTConfig = COLOUR, names: tuple[str, ...] | None = ("cats", "dogs")) -> Path:
    torch.manual_seed(0)
    save(randomize(vitkit.create(config), scale=0.3), path, class_names=names)
    return path


def test_table_json_and_files(vitkit_evaluate, photos: Path, tmp_path: Path) -> None:
    model, out = saved(tmp_path / "model.safetensors"), tmp_path / "new" / "out"
    code, text, err = vitkit_evaluate(model, photos, "--out", out)
    assert (code, err) == (0, "")
    assert all(word in text for word in ("cats", "dogs", "precision", "recall", "top-1", "(95% interval ", "16 images"))
    assert "top-5" not in text, "of two classes it is always 100%"
    assert {p.name for p in out.iterdir()} >= {"evaluation.json", "confusion.png", "reliability.png"}
    code, text, _ = vitkit_evaluate(model, photos, "--json")
    result = json.loads(text)
    assert result == json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    assert {"top1", "top5", "loss", "ece", "per_class", "confusion", "model"} <= result.keys()
    assert (result["split"], result["samples"], result["top5"]) == ("test", 16, 1.0)
    assert result["top1"] == pytest.approx(np.trace(result["confusion"]) / 16)
    interval = binomtest(round(16 * result["top1"]), 16).proportion_ci(0.95, method="wilson")
    assert result["top1_interval"] == pytest.approx(list(interval), abs=1e-4)
    assert [c["class"] for c in result["per_class"]] == ["cats", "dogs"]
    assert [c["support"] for c in result["per_class"]] == [8, 8]


def test_several_views_are_reported_apart(vitkit_evaluate, photos: Path, tmp_path: Path) -> None:
    model = saved(tmp_path / "model.safetensors")
    plain = json.loads(vitkit_evaluate(model, photos, "--json")[1])
    found = json.loads(vitkit_evaluate(model, photos, "--json", "--views", "10")[1])
    averaged = found.pop("averaged")
    assert found == plain, "the plain metrics stay what they are"
    assert averaged["views"] == 10
    by_python = vitkit.evaluate(model, photos, views=10)
    assert averaged["loss"] == pytest.approx(by_python.loss)
    assert averaged["loss"] != pytest.approx(plain["loss"])
    assert "mean over 10 views of every image: " in vitkit_evaluate(model, photos, "--views", "10")[1]


def test_other_split_batch_size_and_workers_change_nothing_else(vitkit_evaluate, photos: Path, tmp_path: Path) -> None:
    model = saved(tmp_path / "model.safetensors")
    found = [
        json.loads(vitkit_evaluate(model, photos, "--split", "all", "--json", *more)[1])
        for more in ((), ("--batch-size", "3"), ("--workers", "1"))
    ]
    assert found[0]["samples"] == 32
    for other in found[1:]:
        assert other["confusion"] == found[0]["confusion"]
        assert other["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)


def test_a_model_with_its_classes_in_another_order(vitkit_evaluate, photos: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomize(vitkit.create(COLOUR), scale=0.3)
    save(model, tmp_path / "a.safetensors", class_names=("cats", "dogs"))
    with torch.no_grad():
        for tensor in (model.head.classifier.weight, model.head.classifier.bias):
            tensor.copy_(tensor.flip(0))
    save(model, tmp_path / "b.safetensors", class_names=("dogs", "cats"))
    a, b = (json.loads(vitkit_evaluate(tmp_path / f"{x}.safetensors", photos, "--json")[1]) for x in "ab")
    assert {**a, "model": ""} == {**b, "model": ""}


def test_a_model_with_other_class_names_needs_a_map(vitkit_evaluate, photos: Path, tmp_path: Path) -> None:
    """Two classes there and two here are no reason to take the one for the other."""
    same, other = saved(tmp_path / "a.safetensors"), saved(tmp_path / "b.safetensors", names=("0", "1"))
    code, out, err = vitkit_evaluate(other, photos)
    assert (code, out) == (2, "")
    assert "only the model has 0, 1; only the data has cats, dogs" in err
    assert "--map DATA=MODEL" in err
    assert "Traceback" not in err
    mapped = json.loads(vitkit_evaluate(other, photos, "--map", "cats=0", "--map", "dogs=1", "--json")[1])
    expected = json.loads(vitkit_evaluate(same, photos, "--json")[1])
    assert mapped["top1"] == expected["top1"]
    assert mapped["classes"] == ["0", "1"]
    assert vitkit_evaluate(other, photos, "--map", "cats=1", "--map", "dogs=1")[0] == 2


def test_probes(vitkit_evaluate, tmp_path: Path) -> None:
    model = saved(tmp_path / "model.safetensors", CONFIG.replace(classes=0), None)
    result = json.loads(vitkit_evaluate(model, "digits", "--probe", "knn", "--json")[1])
    assert result["probe"] == "knn"
    assert result["accuracy"].keys() == {"top1", "top5"}
    code, text, _ = vitkit_evaluate(model, "digits", "--probe", "fewshot", "--out", tmp_path / "out")
    assert code == 0
    assert "5 per class: " in text
    assert "10 per class: " in text
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["probe"] == "fewshot"


def test_an_untrained_model_is_called_that(vitkit_evaluate) -> None:
    code, out, err = vitkit_evaluate("mu", "digits", "--probe", "knn")
    assert code == 0
    assert "top1" in out
    assert "weights are fresh" in err


def test_several_labels(vitkit_evaluate, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (40, 8, 8), dtype=np.uint8), random.integers(0, 2, (40, 4))
    np.savez(tmp_path / "set.npz", images=x, labels=y)
    model = saved(tmp_path / "model.safetensors", CONFIG, None)
    result = json.loads(vitkit_evaluate(model, tmp_path / "set.npz", "--split", "all", "--json")[1])
    assert 0 < result["map"] <= 1
    assert result["top1"] is None
    code, text, _ = vitkit_evaluate(model, tmp_path / "set.npz", "--split", "all", "--out", tmp_path / "out")
    assert code == 0
    assert "mAP" in text
    assert not (tmp_path / "out" / "confusion.png").exists()


def test_unreadable_files_are_listed(vitkit_evaluate, photos: Path, tmp_path: Path) -> None:
    for i in range(8):  # half of the split, and all of a class
        (photos / "test" / "dogs" / f"{i:03}.jpg").write_bytes(b"no image")
    code, text, _ = vitkit_evaluate(saved(tmp_path / "model.safetensors"), photos)
    assert code == 0
    assert "8 unreadable and not counted" in text
    assert str(photos / "test" / "dogs" / "003.jpg") in text


@pytest.mark.parametrize(
    ("config", "names", "args", "words"),
    [
        (COLOUR.replace(classes=7), None, [], ["model has 7 classes", "has 2", "cats, dogs"]),
        (COLOUR, ("cats", "cows"), [], ["only the model has cows", "only the data has dogs"]),
        (COLOUR.replace(classes=0), None, [], ["classes=0", "--probe knn"]),
        (COLOUR, None, ["--split", "holdout"], ["no split 'holdout'", "train, val, test"]),
        (COLOUR, None, ["--probe", "knn", "--split", "train"], ["learns from the split train", "on test"]),
        (COLOUR, None, ["--views", "11"], ["--views 11 must be from 1 to 10"]),
        (COLOUR, None, ["--views", "2", "--probe", "knn"], ["--views is for the model's own answers"]),
        (COLOUR, None, ["--device", "nonsense"], ["--device nonsense", "leave it out for"]),
    ],
)
def test_what_does_not_fit_is_said(
    vitkit_evaluate, photos: Path, tmp_path: Path, config: ViTConfig, names: tuple[str, ...] | None, args, words
) -> None:
    code, out, err = vitkit_evaluate(saved(tmp_path / "model.safetensors", config, names), photos, *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") <= 2
    assert all(word in err for word in words), err


def test_missing_model_data_and_folder(vitkit_evaluate, photos: Path, tmp_path: Path) -> None:
    model = saved(tmp_path / "model.safetensors")
    assert "neither an existing path" in vitkit_evaluate(tmp_path / "none.safetensors", photos)[2]
    assert "there is no file or folder" in vitkit_evaluate(model, tmp_path / "none")[2]
    (tmp_path / "file").write_text("")
    code, _, err = vitkit_evaluate(model, photos, "--out", tmp_path / "file")
    assert code == 2
    assert "--out" in err


def test_the_command_imports_no_torch_before_it_runs() -> None:
    import subprocess

    code = "import sys, vitkit.cli.evaluate; assert not {'torch', 'numpy', 'matplotlib'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
