"""Images of an evaluation: drawn for any number of classes, and their titles state what was found."""

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from evaluate.subjects import Oracle, in_memory
from vitkit.data.keys import sample_keys
from vitkit.data.source import Source
from vitkit.errors import MissingPackage
from vitkit.evaluation import Evaluation, evaluate
from vitkit.evaluation.figures import worst_sheet, write_images
from vitkit.figures.evaluation import confusion_finding, draw_reliability, reliability_finding, values_finding
from vitkit.tasks import Settings
from vitkit.tasks.result import collect


def evaluated(classes: int, count: int, sure: float, several: bool = False) -> tuple[Evaluation, Source]:
    source = in_memory(count, tuple(f"class {i}" for i in range(classes)), several)
    logits = torch.randn(count, classes, generator=torch.Generator().manual_seed(0))
    if not several:
        logits[torch.arange(count), torch.from_numpy(source.labels)] += sure
    return evaluate(Oracle(source, logits), source), source


@pytest.mark.parametrize(
    ("classes", "several"), [(1, False), (2, False), (10, False), (100, False), (3, True)], ids=str
)
def test_all_images_are_drawn(classes: int, several: bool, tmp_path: Path) -> None:
    evaluation, source = evaluated(classes, 150, 2.0, several)
    written = {p.name for p in write_images(evaluation, source, tmp_path)}
    expected = {"confusion.png", "reliability.png", "worst.png"} - ({"confusion.png"} if several else set())
    assert written == expected - ({"worst.png"} if classes == 1 else set())
    for name in written:
        with Image.open(tmp_path / name) as image:
            assert min(image.size) > 200
            assert len(image.convert("L").getcolors()) > 10


def test_the_legend_of_few_predictions_has_the_colours_of_the_bars() -> None:
    """With few images no bar has its full colour, and the legend once showed one colour three times."""
    few, _ = evaluated(4, 8, 1.0)
    handles, names = draw_reliability(few.reliability).axes[0].get_legend_handles_labels()
    bars = {name: handle for name, handle in zip(names, handles, strict=True) if name != "perfect calibration"}
    assert set(bars) == {"accuracy", "overconfident", "underconfident"}
    assert len({bar.patches[0].get_facecolor() for bar in bars.values()}) == 3


def test_titles_state_the_finding() -> None:
    evaluation, _ = evaluated(4, 200, 2.0)
    matrix = evaluation.confusion - torch.diag(torch.from_numpy(evaluation.confusion).diag()).numpy()
    true, said = divmod(int(matrix.argmax()), 4)
    title = confusion_finding(evaluation.confusion, evaluation.classes).replace("\u00a0", " ")
    assert title.startswith(f"Accuracy {100 * evaluation.top1:.1f}% on 200 images")
    assert title.endswith(f"most confused: class {true} predicted as class {said} ({matrix.max()} times)")
    perfect, source = evaluated(4, 50, 100.0)
    title = confusion_finding(perfect.confusion, perfect.classes)
    assert title == "Accuracy 100.0% on 50 images: no class is confused with another"
    assert reliability_finding(perfect.reliability).startswith("Well calibrated")
    assert worst_sheet(perfect, source) is None


def test_overconfident_or_underconfident() -> None:
    source = in_memory(80)
    right = torch.nn.functional.one_hot(torch.from_numpy(source.labels), 4).float()
    half_wrong = torch.where(torch.arange(80)[:, None] % 2 == 0, right, right.roll(1, dims=1))
    too_sure, unsure = (evaluate(Oracle(source, scores), source) for scores in (20 * half_wrong, 0.5 * right))
    assert reliability_finding(too_sure.reliability).startswith("Overconfident: mean confidence 100.0%")
    assert reliability_finding(unsure.reliability).startswith("Underconfident")


def test_names_may_be_long_or_strange(tmp_path: Path) -> None:
    names = ("x" * 300, "$a_b^c$ {%s}", "猫", "line\nbreak")
    source = in_memory(60, names)
    evaluation = evaluate(Oracle(source, torch.randn(60, 4)), source)
    assert len(write_images(evaluation, source, tmp_path)) == 3
    with Image.open(tmp_path / "confusion.png") as image:
        assert max(image.size) < 2000


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *more)

    evaluation, source = evaluated(2, 20, 2.0)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackage, match=r"vitkit\[explain\]"):
        write_images(evaluation, source, tmp_path)


def test_predicted_values_are_drawn(tmp_path: Path) -> None:
    from tasks.test_tasks import measured
    from vitkit.tasks.table import task_of_data

    random = torch.Generator().manual_seed(0)
    labels = torch.rand(50, 2, generator=random, dtype=torch.float64)
    source = measured(labels.numpy(), ("ink", "angle"))
    task = task_of_data(source, "", Settings())
    _, wanted = task.targets(torch.zeros(50, 1, 8, 8), labels, sample_keys(0, 0, range(50)))
    records = collect([torch.arange(50)], [task.record(wanted + 0.1 * torch.randn(50, 2, generator=random), labels)])
    evaluation = task.evaluation(records, source)
    assert {p.name for p in write_images(evaluation, source, tmp_path)} == {"predicted.png", "worst.png"}
    assert values_finding(evaluation.targets).startswith("Mean R2 0.99")
    assert evaluation.table()[0] == ["target", "MAE", "RMSE", "R2", "rank correlation"]
    assert [row["target"] for row in evaluation.to_dict()["targets"]] == ["ink", "angle"]
    assert "R2 0.99" in evaluation.summary()
