"""Labelled sets: explain uses labels, and reads images, exactly as evaluate does."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from peers import randomize
from vitkit.data import open_data
from vitkit.errors import VitkitError
from vitkit.evaluation import evaluate
from vitkit.explanation.build import build_report, make_subject
from vitkit.explanation.subject import load_images
from vitkit.model.vit import ViT


def photos(folder: Path, classes: list[str], count: int = 6) -> str:
    """Colourful images larger than the model wants; one file cannot be read."""
    random = np.random.default_rng(0)
    for number, name in enumerate(classes):
        for split in ("train", "test"):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 60, (24, 30, 3), dtype=np.uint8)
                pixels[..., number % 3] += np.uint8(150)
                Image.fromarray(pixels).save(folder / split / name / f"{i}.png")
    (folder / "test" / classes[0] / "broken.png").write_bytes(b"no image")
    return str(folder)


def save_model(folder: Path, names: list[str], channels: int = 3) -> str:
    torch.manual_seed(0)
    model = randomize(vitkit.create("mu", image_size=16, classes=len(names), channels=channels), scale=0.4)
    model.class_names = names
    vitkit.save(model, folder / "model.safetensors")
    return str(folder / "model.safetensors")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("names", [["a", "b", "c"], ["c", "a", "b"]], ids="".join)
def test_accuracy_is_that_of_evaluate(tmp_path: Path, names: list[str], channels: int) -> None:
    pytest.importorskip("matplotlib")
    data, source = photos(tmp_path / "set", ["a", "b", "c"]), save_model(tmp_path, names, channels)
    evaluation = evaluate(vitkit.load(source), open_data(data).split("test"))
    subject = make_subject(source, data=data, samples=1000)
    report = build_report(subject, tmp_path / "out", only=["confusion"])
    found = np.load(tmp_path / "out" / "arrays" / "confusion.npz")
    order = [names.index(name) for name in evaluation.classes]
    np.testing.assert_array_equal(found["confusion"][np.ix_(order, order)], evaluation.confusion)
    assert f"Accuracy {100 * evaluation.top1:.1f}%" in report.sections[0].finding
    assert [name for name, _ in subject.sample.skipped] == [bad.path for bad in evaluation.bad_files]


def test_labels_of_other_classes_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data, source = photos(tmp_path / "set", ["a", "b", "c"]), save_model(tmp_path, ["a", "b", "d"])
    subject = make_subject(source, data=data)
    assert subject.sample.labels is None
    report = build_report(subject, tmp_path / "out", only=["confusion", "distance"])
    assert [s.name for s in report.sections] == ["distance"]  # statistics need no labels
    ((name, reason),) = report.left_out
    assert name == "confusion"
    assert "only the model has d" in reason
    assert "only the data has c" in reason
    assert any("labels of" in warning and "--map" in warning for warning in report.warnings)


def test_as_many_classes_are_no_match(tmp_path: Path) -> None:
    """As many classes on both sides are no match; --map is."""
    data, source = photos(tmp_path / "set", ["a", "b", "c"]), save_model(tmp_path, ["0", "1", "2"])
    sample = make_subject(source, data=data).sample
    assert sample.labels is None
    assert "--map DATA=MODEL" in sample.no_labels
    mapped = make_subject(source, data=data, class_map={"a": "2", "b": "0", "c": "1"}).sample
    truth = save_model(tmp_path, ["b", "c", "a"])
    np.testing.assert_array_equal(mapped.labels, make_subject(truth, data=data).sample.labels)
    assert set(mapped.labels.tolist()) == {0, 1, 2}
    with pytest.raises(VitkitError, match="no class 'x'"):
        make_subject(source, data=data, class_map={"x": "0"})


def test_colour_becomes_grey_as_in_evaluate(tmp_path: Path) -> None:
    """By luma and before resizing; the mean of the channels would make these three alike."""
    data, source = photos(tmp_path / "set", ["a", "b", "c"]), save_model(tmp_path, ["a", "b", "c"], channels=1)
    sample = make_subject(source, data=data).sample
    model = vitkit.load(source)
    assert isinstance(model, ViT)
    paths = [tmp_path / "set" / "test" / "abc"[label] / name for label, name in zip(sample.labels, sample.names)]  # noqa: B905
    assert torch.equal(load_images(paths, model.config).pixels, sample.pixels)
    means = [sample.pixels[sample.labels == c].float().mean() for c in range(3)]
    assert means[1] > means[0] + 20 > means[2] + 40
    arrays = {f"x_{split}": np.zeros((6, 16, 16, 3), np.uint8) + np.uint8([200, 10, 10]) for split in ("train", "test")}
    np.savez(tmp_path / "set.npz", **arrays, y_train=np.arange(6) % 3, y_test=np.arange(6) % 3)
    grey = make_subject(source, data=str(tmp_path / "set.npz")).sample.pixels
    assert grey.unique().tolist() == [67]  # luma is 66.8, the mean of the channels 73.3
