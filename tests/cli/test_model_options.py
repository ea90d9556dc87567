"""Every command that takes a model takes the same options, and says them back as they must be typed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.main import get_command

import vitkit
from peers import randomize
from vitkit.checkpoints.load import open_checkpoint
from vitkit.checkpoints.writing import write
from vitkit.cli.main import COMMANDS, app
from vitkit.cli.options import MODEL_OPTIONS

OPTIONS = {"--image-size", "--patch-size", "--channels", "--classes", "--heads", "--activation", "--resize", "--dtype"}
WITHOUT = {
    "zoo",
    "data",
    "doctor",
    "completion",
    "demo",
    "study",
    "replay",
    "config",
    "runs",
    "push",
    "pull",
    "track",
}  # take no model
OTHERS = {"train", "pretrain", "sweep", "plan", "zeroshot"}  # make a model rather than read one
AS_IT_IS = {"index", "search"}  # take a checkpoint without options: `vitkit load --out` states them once, for all


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare state dict in timm's layout with a width of no published model, and images by class."""
    folder = tmp_path_factory.mktemp("options")
    torch.manual_seed(0)
    config = vitkit.ViTConfig(image_size=64, patch_size=16, width=96, depth=2, heads=4, mlp_width=192, classes=2)
    vitkit.save(randomize(vitkit.ViT(config)), folder / "model.safetensors", class_names=("a", "b"))
    write(open_checkpoint(folder / "model.safetensors"), folder / "timm", "timm")
    from safetensors.torch import load_file

    torch.save(load_file(folder / "timm" / "model.safetensors"), folder / "bare.pth")
    random = np.random.default_rng(0)
    for i in range(8):
        path = folder / "images" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (70, 80, 3), dtype=np.uint8)).save(path)
    return folder


def arguments(name: str, place: Path, out: Path) -> list[object]:
    """A short use of each command."""
    model, images = place / "bare.pth", place / "images"
    return {
        "summary": [model],
        "inspect": [model],
        "load": [model, "--out", out / "loaded.safetensors"],
        "convert": [model, out / "native.safetensors", "--to", "native"],
        "evaluate": [model, images, "--split", "all"],
        "explain": [model, next(images.rglob("*.png")), "--only", "filters", "--out", out / "explained"],
        "predict": [model, images],
        "embed": [model, images, "--out", out / "features.npz"],
        "export": [model, "--to", "torch-export", "--out", out / "model.pt2"],
        "tune": [model, images, "--runtimes", "eager", "--seconds", 0],
        "profile": [model, "--batch", 1, "--seconds", 0],
    }[name]


READERS = ["summary", "inspect", "load", "convert", "evaluate", "explain", "predict", "embed", "export", "tune"]
READERS += ["profile"]


def test_no_command_was_forgotten() -> None:
    assert {*READERS, "serve", "verify", *WITHOUT, *OTHERS, *AS_IT_IS} == COMMANDS.keys()


@pytest.mark.parametrize("name", [*READERS, "serve", "verify"])
def test_the_same_options_with_the_same_help(name: str) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    own = {p.opts[0]: p.help for p in commands[name].params if p.param_type_name == "option"}
    reference = {p.opts[0]: p.help for p in commands["predict"].params if p.name in MODEL_OPTIONS}
    assert reference.keys() >= OPTIONS
    assert {option: own.get(option) for option in reference} == reference


@pytest.mark.parametrize("name", ["train", "pretrain"])
def test_training_takes_the_heads_that_a_file_does_not_say(name: str, command, place: Path, tmp_path: Path) -> None:
    asked = (name, place / "images", "--init", place / "bare.pth", "--image-size", "32", "--steps", "1")
    code, _, err = command(*asked, "--out", tmp_path / "unsaid")
    assert (code, "--heads N" in err) == (2, True)
    code, _, err = command(*asked, "--out", tmp_path / "run", "--heads", "4", "--set", "batch_size=4")
    assert code == 0, err
    assert vitkit.load(tmp_path / "run").config.heads == 4


@pytest.mark.parametrize("name", READERS)
def test_a_bare_state_dict_at_another_size(name: str, command, place: Path, tmp_path: Path) -> None:
    """The heads of width 96 must be stated; positions are resized to 112."""
    words = arguments(name, place, tmp_path)
    code, out, err = command(name, *words)
    assert code == 2, out + err
    assert "--heads" in err
    code, out, err = command(name, *words, "--image-size", 112, "--heads", 4)
    assert code == 0, err
    if name == "summary":
        assert "at 112 pixels" in out


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--image-size", "big", "--image-size big is not a size"),
        ("--heads", "0", "--heads 0 is not a whole number"),
        ("--activation", "gleu", "--activation gleu is not known; choose gelu"),
        ("--dtype", "float23", "--dtype float23"),
        ("--set", "norm", "--set 'norm' is not FIELD=VALUE"),
    ],
)
def test_a_wrong_value_is_named_as_it_was_typed(option: str, value: str, words: str, command, place: Path) -> None:
    for name in ("predict", "evaluate"):
        code, _, err = command(name, place / "model.safetensors", place / "images", option, value)
        assert code == 2
        assert words in err


def test_evaluation_uses_the_size_that_was_asked_for(command, place: Path) -> None:
    words = ("evaluate", place / "bare.pth", place / "images", "--split", "all", "--heads", 4, "--json")
    small, large = (json.loads(command(*words, *more)[1])["loss"] for more in ((), ("--image-size", 112)))
    assert small != large
