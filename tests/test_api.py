"""The public functions: small real runs, in the words of the commands."""

from __future__ import annotations

import csv
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.main import get_command

import vitkit
from peers import randomize
from vitkit.cli.main import app


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    random = np.random.default_rng(0)
    for i in range(24):
        path = folder / "photos" / ("cats", "dogs")[i % 2] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (40, 36, 3), dtype=np.uint8)).save(path)
    torch.manual_seed(0)
    model = randomize(vitkit.create("mu", classes=2))
    vitkit.save(model, folder / "model.safetensors", class_names=("cats", "dogs"))
    return folder


@pytest.fixture(scope="module")
def model(place: Path) -> vitkit.VisionModel:
    return vitkit.load(place / "model.safetensors")


def test_train_gives_the_bits_of_the_command(place: Path, tmp_path: Path, command) -> None:
    short = {"model": "mu", "steps": 2, "image_size": 32, "batch_size": 8}
    run = vitkit.train(place / "photos", out=tmp_path / "python", evaluations=1, **short)
    words = [w for name, value in short.items() for w in (f"--{name.replace('_', '-')}", value)]
    code, _, err = command("train", place / "photos", "--out", tmp_path / "cli", "--set", "evaluations=1", *words)
    assert code == 0, err
    assert run.out == tmp_path / "python"
    weights = [(folder / "best.safetensors").read_bytes() for folder in (run.out, tmp_path / "cli")]
    assert weights[0] == weights[1]
    assert vitkit.load(run.out).class_names == ("cats", "dogs")


def test_train_reads_a_budget_and_names_what_it_does_not_know(place: Path, tmp_path: Path) -> None:
    with pytest.raises(vitkit.VitkitError, match="Did you mean epochs"):
        vitkit.train(place / "photos", epoch=3)
    with pytest.raises(vitkit.VitkitError, match="is not a time"):
        vitkit.train(place / "photos", budget="soon")
    config = vitkit.TrainConfig(data=str(place / "photos"), model="mu", image_size=32, steps=1, out=str(tmp_path))
    assert vitkit.train(config, evaluations=1).steps == 1


def test_evaluate_takes_a_model_or_a_path_and_any_data(place: Path, model: vitkit.VisionModel, command) -> None:
    by_path = vitkit.evaluate(place / "model.safetensors", place / "photos", split="all")
    dataset = vitkit.open_data(place / "photos")
    assert isinstance(dataset, vitkit.Dataset)
    assert vitkit.evaluate(model, dataset, split="all").metrics == by_path.metrics
    assert vitkit.evaluate(model, dataset.split("all")).metrics == by_path.metrics
    out = command("evaluate", place / "model.safetensors", place / "photos", "--split", "all", "--json")[1]
    assert json.loads(out)["top1"] == pytest.approx(by_path.metrics["top1"])


def test_values_are_trained_evaluated_and_predicted(place: Path, tmp_path: Path) -> None:
    images = sorted((place / "photos").rglob("*.png"))
    lines = [f"{path},{i % 7}.5,{'train' if i % 3 else 'test'}" for i, path in enumerate(images)]
    (tmp_path / "ages.csv").write_text("\n".join(["path,age,split", *lines]))
    settings = {"model": "mu", "steps": 2, "image_size": 32, "evaluations": 1}
    run = vitkit.train(tmp_path / "ages.csv", target=("age",), out=tmp_path / "run", **settings)
    assert {"mae", "rmse", "r2"} <= vitkit.evaluate(run.out, tmp_path / "ages.csv").metrics.keys()
    (row,) = vitkit.predict(run.out, images[0])
    assert isinstance(row["age"], float)


def test_predict_gives_the_rows_of_the_command(place: Path, model: vitkit.VisionModel, tmp_path: Path, command) -> None:
    rows = vitkit.predict(model, place / "photos", top=2)
    command("predict", place / "model.safetensors", place / "photos", "--top", 2, "--out", tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == [row["class"] for row in written]
    assert set(rows[0]) == {"path", "class", "probability", "class_2", "probability_2", "error"}
    assert len(vitkit.predict(place / "model.safetensors", sorted((place / "photos").rglob("*.png"))[:3])) == 3


def test_embed_keeps_the_order_and_the_place_of_unreadable_images(model: vitkit.VisionModel, place: Path) -> None:
    images = sorted((place / "photos").rglob("*.png"))[:3]
    broken = place / "broken.png"
    broken.write_bytes(b"no image")
    vectors = vitkit.embed(model, [images[0], broken, *images[1:]])
    assert vectors.shape == (4, model.config.width)
    assert np.isnan(vectors[1]).all()
    np.testing.assert_allclose(vectors[[0, 2, 3]], vitkit.embed(model, images), atol=1e-5)
    assert vitkit.embed(model, images, features="tokens").ndim == 3


def test_explain_writes_a_page(model: vitkit.VisionModel, place: Path, tmp_path: Path) -> None:
    image = next((place / "photos").rglob("*.png"))
    report = vitkit.explain(model, image, only=["attention"], out=tmp_path)
    assert report.page.is_file()
    assert [section.name for section in report.sections] == ["attention", "heads"]


def test_export_writes_a_file_that_predicts_the_same(model: vitkit.VisionModel, place: Path, tmp_path: Path) -> None:
    written = vitkit.export(model, tmp_path / "model.pt2")
    assert written.path == tmp_path / "model.pt2"
    assert written.check.difference < 1e-4
    of_file = vitkit.predict(written.path, place / "photos", top=1, trust=written.sha256)
    of_model = vitkit.predict(model, place / "photos", top=1)
    assert [row["class"] for row in of_file] == [row["class"] for row in of_model]
    with pytest.raises(vitkit.VitkitError, match="must end with"):
        vitkit.export(model, tmp_path / "model.bin")


def test_profile_has_the_shares_of_the_command_and_draws(
    model: vitkit.VisionModel, place: Path, tmp_path: Path
) -> None:
    found = vitkit.profile(model, batch=2, seconds=0.0, out=tmp_path / "time.svg")
    assert found.batch == 2
    assert sum(line.share for line in found.by_kind) == pytest.approx(1)
    assert "block 0" in {line.name for line in found.by_layer}
    assert "<svg" in (tmp_path / "time.svg").read_text()
    assert "matrix products" in found._repr_html_()
    named = vitkit.profile(place / "model.safetensors", batch=1, seconds=0.0, image_size=64)
    assert (named.name, named.size) == ("model.safetensors", (64, 64))
    with pytest.raises(vitkit.VitkitError, match="must be at least 1"):
        vitkit.profile(model, batch=0)


def test_options_are_those_of_load(model: vitkit.VisionModel, place: Path) -> None:
    vectors = vitkit.embed(place / "model.safetensors", place / "photos", image_size=64, features="tokens")
    assert vectors.shape[1] == 4 * vitkit.embed(model, place / "photos", features="tokens").shape[1]
    with pytest.raises(vitkit.VitkitError, match=r"loaded already; give image_size to vitkit\.load"):
        vitkit.embed(model, place / "photos", image_size=64)


@pytest.mark.parametrize("name", ["evaluate", "predict", "embed", "explain", "export", "profile"])
def test_functions_and_commands_have_the_same_words(name: str) -> None:
    """What a function takes, its command takes by the same name, but for what only Python has."""
    options = {p.name for p in get_command(app).commands[name].params}  # type: ignore[attr-defined]
    spelled = {"classes": "wanted", "path": "out"}  # --class; the argument of export
    own = set(inspect.signature(getattr(vitkit, name)).parameters) - {"progress", "options"}
    assert {spelled.get(word, word) for word in own} <= options
