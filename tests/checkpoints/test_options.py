"""The options of a model: typed, checked once, and spelled in errors as the user must type them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vitkit
from vitkit.checkpoints.load import open_checkpoint
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.writing import write
from vitkit.errors import CheckpointError


@pytest.fixture
def bare(tmp_path) -> Path:
    """timm's layout without its config.json; an image for it beside."""
    from PIL import Image

    vitkit.save(vitkit.create("vit-ti/16", image_size=64, depth=1, classes=3), tmp_path / "m.safetensors")
    write(open_checkpoint(tmp_path / "m.safetensors"), tmp_path / "bare.pth", "timm")
    Image.new("RGB", (80, 80), (200, 30, 30)).save(tmp_path / "a.png")
    return tmp_path / "bare.pth"


COMMANDS = {
    "predict": ["predict", "{model}", "{folder}/a.png"],
    "embed": ["embed", "{model}", "{folder}/a.png", "--out", "{folder}/o.npz"],
    "export": ["export", "{model}", "--to", "torch-export", "--out", "{folder}/o.pt2"],
    "convert": ["convert", "{model}", "{folder}/o.safetensors", "--to", "native"],
    "explain": ["explain", "{model}", "--only", "positions", "--out", "{folder}/page"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_the_image_size_of_a_bare_file(name: str, bare: Path, command) -> None:
    words = [word.format(model=bare, folder=bare.parent) for word in COMMANDS[name]]
    code, out, err = command(*words, "--image-size", "112", "--heads", "3")
    assert code == 0, out + err
    if name == "convert":
        assert vitkit.load(bare.parent / "o.safetensors").config.image_size == (112, 112)


def test_python_and_the_command_line_mean_the_same() -> None:
    parsed = ModelOptions.parse(["norm_eps=1e-5", "positions=none"], image_size="224x448", heads="6", dtype="bf16")
    assert parsed == ModelOptions.of(
        image_size=(224, 448), heads=6, dtype=torch.bfloat16, norm_eps=1e-5, positions="none", classes=None
    )
    assert parsed.image_size == (224, 448)
    assert parsed.stated == {"heads": 6, "norm_eps": 1e-5, "positions": "none"}
    assert ModelOptions.parse() == ModelOptions()


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"image_size": "1a2"}, "--image-size 1a2 is not a size; write 224 or 224x448"),
        ({"patch_size": "0"}, "--patch-size 0 is not a size"),
        ({"heads": "six"}, "--heads six is not a whole number of at least 1"),
        ({"classes": -1}, "--classes -1 is not a whole number of at least 0"),
        ({"dtype": "int8"}, "--dtype int8 is not known; choose float32"),
        (
            {"activation": "gelu-tan"},
            "--activation gelu-tan is not known; choose gelu, gelu-tanh, quick-gelu, swiglu, relu, silu. Did you mean",
        ),
    ],
)
def test_errors_spell_the_option(texts: dict, words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        ModelOptions.parse(**texts)
    assert words in str(error.value)


def test_errors_in_python_spell_the_argument() -> None:
    with pytest.raises(CheckpointError, match=r"image_size=\('1', '1', '2'\) is not a size"):
        ModelOptions.of(image_size=("1", "1", "2"))
    with pytest.raises(CheckpointError, match="heads='x' is not a whole number"):
        vitkit.load("mu", heads="x")
