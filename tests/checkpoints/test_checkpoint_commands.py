"""`vitkit convert`, `vitkit inspect` and `vitkit summary CHECKPOINT`, as a user types them."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import peers
import vitkit
from vitkit.cli.main import app
from vitkit.errors import VitkitError


@pytest.fixture
def saved(tmp_path):
    model = peers.randomize(vitkit.create("mu"))
    vitkit.save(model, tmp_path / "m.safetensors", list("abcdefghij"))
    return model, tmp_path / "m.safetensors"


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(w) for w in words])
    if isinstance(result.exception, VitkitError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("to", "dest"),
    [
        ("native", "o.safetensors"),
        ("google", "o.npz"),
        ("big_vision", "o.npz"),
        ("timm", "folder"),
        ("timm", "o.pth"),
        ("huggingface", "folder"),
        ("torchvision", "o.pth"),
    ],
)
def test_convert(to: str, dest: str, saved, tmp_path) -> None:
    model, path = saved
    assert f"native -> {to}: 32,554 parameters" in run("convert", path, tmp_path / dest, "--to", to)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(vitkit.load(tmp_path / dest, heads=2, activation="gelu")(images), model(images))


def test_a_name_of_the_zoo_gives_fresh_weights(tmp_path) -> None:
    text = run("convert", "mu", tmp_path / "o.npz", "--to", "google", "--image-size", 64, "--set", "classes=3")
    assert "fresh weights" in text
    assert "zoo -> google" in text
    assert vitkit.load(tmp_path / "o.npz").config.image_size == (64, 64)
    assert json.loads(run("inspect", "mu", "--json"))["format"] == "zoo"


def test_convert_adapts(saved, tmp_path) -> None:
    _, path = saved
    out = tmp_path / "o.safetensors"
    options = ["--image-size", "48x64", "--classes", 4, "--channels", 1, "--resize", "timm", "--dtype", "bfloat16"]
    text = run("convert", path, out, "--to", "native", *options)
    assert "positions: grid 4x4 -> 6x8, resized the way of timm" in text
    model = vitkit.load(out)
    assert (model.config.image_size, model.config.classes, model.config.channels) == ((48, 64), 4, 1)
    assert model.norm.weight.dtype == torch.bfloat16


def test_convert_does_not_overwrite_unless_told(saved, tmp_path) -> None:
    _, path = saved
    before = path.read_bytes()
    with pytest.raises(VitkitError, match="--force"):
        run("convert", path, path, "--to", "native", "--classes", 3)
    assert path.read_bytes() == before
    run("convert", path, path, "--to", "native", "--classes", 3, "--force")
    assert vitkit.load(path).config.classes == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["o.npz", "--to", "gogle"], "Did you mean google"),
        (["o.pth", "--to", "native"], r"a file ending in \.safetensors"),
        (["o.npz", "--to", "huggingface"], "writes a folder"),
        (["o.npz", "--to", "google", "--dtype", "int4"], "choose float32"),
        (["o.npz", "--to", "google", "--set", "heads"], "FIELD=VALUE"),
        (["o.npz", "--to", "google", "--set", "hedas=3"], "Did you mean heads"),
        (["o.npz", "--to", "google", "--image-size", "33"], "nearest sizes"),
    ],
)
def test_convert_explains_mistakes(words: list[str], expected: str, saved, tmp_path) -> None:
    _, path = saved
    with pytest.raises(VitkitError, match=expected):
        run("convert", path, tmp_path / words[0], *words[1:])
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_inspect(saved, tmp_path) -> None:
    _, path = saved
    text = run("inspect", path)
    for words in (
        "format native",
        "32,554 parameters",
        "width=32",
        "interpolation=bilinear",
        "10: a, b, c",
    ):
        assert words in text
    parts = [line.split() for line in text.splitlines() if line.endswith(tuple("0123456789 "))]
    named = [row[0] for row in parts if row and row[-1].replace(",", "").isdigit()]
    assert named == ["class_token", "patches", "positions", "encoder.blocks.0", "norm", "head"]  # two alike: one line
    assert "encoder.blocks.0 to 1, each" in text
    assert "norm.weight" not in text
    every = run("inspect", path, "--all")
    assert "encoder.blocks.1.mlp.up.weight" in every
    assert "norm.weight" in every
    about = json.loads(run("inspect", path, "--json"))
    assert about["config"]["heads"] == 2
    assert about["class_names"] == list("abcdefghij")
    assert sum(row["parameters"] for row in about["tensors"]) == about["parameters"] == 32_554
    run("convert", path, tmp_path / "o.pth", "--to", "torchvision")
    assert "note           preprocessing: not in the file" in run("inspect", tmp_path / "o.pth", "--set", "heads=2")


def test_summary_takes_a_checkpoint(saved) -> None:
    _, path = saved
    text = run("summary", path, "--classes", 3)
    assert "3 classes" in text
    assert "head.classifier" in text
    assert "mu at 32 pixels" in run("summary", "mu")
    with pytest.raises(VitkitError, match="no model is called"):
        run("summary", "vit-b17")
