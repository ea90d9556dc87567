"""Models that predict values, or several labels: maps explain the output itself, and the rest says why not."""

from pathlib import Path

import numpy as np
import pytest
import torch

import vitkit
from peers import randomize
from vitkit.explanation.build import build_report
from vitkit.explanation.faithfulness import occlusion_map
from vitkit.explanation.inside import predictions
from vitkit.explanation.relevance import class_relevance
from vitkit.explanation.subject import Images, Subject
from vitkit.model.base import OutputKind, Outputs
from vitkit.model.vit import ViT


def model_of(kind: OutputKind, outputs: int = 2) -> ViT:
    torch.manual_seed(0)
    model = randomize(vitkit.create("mu", classes=outputs), scale=0.3)
    scale = {"mean": (40.0, 3.0)[:outputs], "std": (10.0, 0.5)[:outputs]} if kind == "values" else {}
    model.outputs = Outputs(kind, ("age", "height")[:outputs], **scale)
    return model.eval()


def subject_of(model: ViT, count: int = 2) -> Subject:
    torch.manual_seed(1)
    pixels = torch.randint(0, 255, (count, 3, 32, 32), dtype=torch.uint8)
    images = Images([f"{i}.png" for i in range(count)], pixels, pixels / 127.5 - 1)
    return Subject("values", model, images, images, model.class_names)


def test_predictions_are_in_the_units_of_the_outputs() -> None:
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        values, labels = model_of("values"), model_of("labels")
        expected = values(images) * torch.tensor([10.0, 0.5]) + torch.tensor([40.0, 3.0])
        torch.testing.assert_close(predictions(values, images), expected)
        torch.testing.assert_close(predictions(labels, images), labels(images).sigmoid())


def test_occlusion_is_the_fall_of_the_value() -> None:
    model, images = model_of("values", 1), torch.randn(1, 3, 32, 32)
    found = occlusion_map(model, images, torch.tensor([0]))
    hidden = images.clone()
    hidden[0, :, 8:16, 16:24] = images[0].mean(dim=(1, 2))[:, None, None]
    with torch.no_grad():
        fall = 10 * float(model(images) - model(hidden))
    assert found.drop[0, 1, 2] == pytest.approx(fall, rel=1e-3)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_report_about_values(outputs: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = model_of("values", outputs)
    subject = subject_of(model)
    report = build_report(subject, tmp_path, only=["relevance", "occlusion", "faithfulness", "confusion"])
    assert [s.name for s in report.sections] == ["relevance", "occlusion"]
    reasons = dict(report.left_out)
    assert "predicts values" in reasons["faithfulness"]
    assert "labelled" in reasons["confusion"]
    assert "lowers the value by" in report.sections[1].finding
    saved = np.load(tmp_path / "arrays" / "relevance.npz")
    assert saved["classes"].tolist() == [list(range(outputs))] * 2
    found = class_relevance(model, subject.images.images, subject.explained)
    np.testing.assert_allclose(saved["relevance"], found.relevance, atol=1e-6)
    assert subject.prediction(0, 0).startswith("age: ")
    assert "%" not in subject.prediction(0, 0)


def test_several_labels_are_explained_one_by_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = build_report(subject_of(model_of("labels")), tmp_path, only=["relevance", "faithfulness"])
    assert not report.left_out
