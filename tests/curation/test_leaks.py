"""Accuracy without what a model may have seen: `evaluate` leaves out, and counts, what is in train too."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage import data as images

import vitkit
from peers import randomize
from vitkit.curation import build_index
from vitkit.curation.leaks import leak_warning
from vitkit.data.check import leaked_images

CONFIG = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 1, "heads": 2, "mlp_width": 32}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = randomize(vitkit.create("vit-ti/16", classes=2, **CONFIG))
    model.class_names = ("a", "b")
    vitkit.save(model, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def evaluated(command, *words: object) -> dict[str, object]:
    code, out, err = command("evaluate", *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_metrics_without_leaks_are_those_of_the_rest(
    photos: Path, checkpoint: Path, tmp_path: Path, command, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "without_leaks" not in evaluated(command, checkpoint, photos)
    alone = evaluated(command, checkpoint, photos)
    for number, name in enumerate(("a/02.png", "b/07.png", "a/04.png")):
        shutil.copy(photos / "train" / name, photos / "test" / name[0] / f"leak-{number}.png")
    assert len(leaked_images(vitkit.open_data(photos))) == 3
    found = evaluated(command, checkpoint, photos)
    assert found["samples"] == 7
    rest = found["without_leaks"]
    assert (rest["leaked"], rest["samples"]) == (3, 4)
    for key in ("top1", "loss"):
        np.testing.assert_allclose(rest[key], alone[key], rtol=1e-5)
    _, out, _ = command("evaluate", checkpoint, photos)
    assert "without 3 images that are in train too" in out


def test_near_copies_count_once_an_index_was_cleaned(
    photos: Path, checkpoint: Path, tmp_path: Path, command, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photograph = Image.fromarray(images.astronaut()).resize((256, 256))  # noise has no detail that survives shrinking
    photograph.save(photos / "train" / "a" / "02.png")
    photograph.resize((200, 200)).save(photos / "test" / "a" / "smaller.jpg", quality=85)
    assert "without_leaks" not in evaluated(command, checkpoint, photos)
    command("data", "clean", photos, "--out", "report")
    assert evaluated(command, checkpoint, photos)["without_leaks"]["leaked"] == 1


def test_training_hears_of_equal_features_from_an_index(photos: Path, tmp_path: Path, monkeypatch) -> None:
    """The same pixels in another format: other bytes, the same features."""
    monkeypatch.chdir(tmp_path)
    with Image.open(photos / "train" / "a" / "02.png") as image:
        image.save(photos / "test" / "a" / "again.bmp")
    assert leak_warning(str(photos)) == ""  # there is no index
    build_index(photos)
    assert "1 images that are evaluated have the features of an image of train" in leak_warning(str(photos))
    assert "again.bmp" in leak_warning(str(photos))
