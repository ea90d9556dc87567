"""What a newcomer gets wrong: a sentence and exit code 2, nothing lost, and nothing ignored without a word."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitkit


@pytest.fixture
def model(tmp_path: Path) -> Path:
    vitkit.save(vitkit.create("mu"), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes of 20 images each."""
    random = np.random.default_rng(0)
    for i in range(40):
        path = tmp_path / "images" / f"kind {i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(path)
    return tmp_path / "images"


def wrong(result: tuple[int, str, str]) -> str:
    """The one message of a command that was used wrongly."""
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert "Traceback" not in err
    return err


def test_a_file_stands_where_a_folder_should_be(command, model: Path, images: Path) -> None:
    for place in (model, model / "deeper"):
        assert str(model) in wrong(command("train", images, "--steps", 1, "--image-size", 16, "--out", place))
        assert str(model) in wrong(command("explain", model, "--only", "filters", "--out", place))


def test_debug_shows_more_and_ends_alike(command) -> None:
    code, _, err = command("summary", "nope", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "error: no model is called 'nope'" in err


def test_the_demo_replaces_only_a_demo(command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "another run" in wrong(command("demo", "--out", tmp_path))
    assert (tmp_path / "config.json").read_text() == "{}"


def test_images_that_are_not_there_or_no_images(command, model: Path, tmp_path: Path) -> None:
    report = tmp_path / "explained" / "report.html"
    report.parent.mkdir()
    report.write_text("an earlier one")
    out = ("--out", report.parent)
    assert "there is no such file" in wrong(command("explain", model, tmp_path / "nowhere.jpg", *out))
    assert "can be read" in wrong(command("explain", model, model, *out))
    assert "rows are 0 to 3" in wrong(command("explain", model, "--query", "4,0", *out))
    assert report.read_text() == "an earlier one"


def test_one_class_is_nothing_to_learn(command, images: Path, tmp_path: Path) -> None:
    for path in (images / "kind 1").iterdir():
        path.unlink()
    assert "only one class" in wrong(command("train", images, "--steps", 1, "--out", tmp_path / "run"))
    assert "--init" in wrong(command("train", "digits", "--freeze", "backbone", "--out", tmp_path / "run"))


def test_resuming_says_what_it_does_not_use(command, images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begun = ("train", images, "--model", "mu", "--set", "evaluations=1", "--image-size", 16, "--out", run)
    code, out, _ = command(*begun, "--steps", 2)
    assert code == 0
    assert f"vitkit evaluate {run} {images}" in out.replace("\n", "")
    code, _, err = command(*begun, "--resume", "--steps", 9, "--lr", 0.5)
    assert code == 0
    assert "steps=9 is not used" in err
    assert "lr=0.5 is not used" in err
    assert err.count("is not used") == 2, err
    assert json.loads((run / "result.json").read_text())["steps"] == 2


def test_a_run_without_a_checkpoint_says_that_it_starts_over(command, images: Path, tmp_path: Path) -> None:
    import shutil

    run = tmp_path / "run"
    begun = ("train", images, "--model", "mu", "--image-size", 16, "--steps", 2, "--out", run)
    assert command(*begun)[0] == 0
    shutil.rmtree(run / "checkpoints")
    assert "starts with its first step" in command(*begun, "--resume")[2]
    assert "nothing to replay" in wrong(command("replay", run))


def test_splits_that_say_nothing_about_a_class(command, tmp_path: Path) -> None:
    for split, kinds in (("train", "ab"), ("val", "a")):
        for kind in kinds:
            path = tmp_path / "sorted" / split / kind / f"{split}{kind}.png"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (8, 8), (len(split) * 9, ord(kind), 0)).save(path)
    out = command("data", "check", tmp_path / "sorted")[1]
    assert "b: none in val" in out
    assert "a: none" not in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gpus", 0), "--gpus 0 must be above 0"),
        (("--price", -3), "--price -3.0 must not be negative"),
        (("--batch-size", -4), "--batch-size -4 must not be negative"),
    ],
)
def test_plans_that_make_no_sense(command, options: tuple[object, ...], words: str) -> None:
    assert words in wrong(command("plan", "vit-b/16", "--device", "a100", *options))


def test_checkpointing_costs_a_third_and_devices_have_no_case() -> None:
    from vitkit.plan import Setup, plan

    plain, again = (
        plan(Setup("vit-l/16", gpus=8, device="A100", batch_size=1024, checkpointing=wanted)).step.passes
        for wanted in (False, True)
    )
    assert again / plain == pytest.approx(4 / 3, rel=0.03)  # the memory without checkpointing is counted, not fitted
