"""Pictures of an evaluation: drawn for any number of classes, and their titles state what was found."""

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from evaluate.subjects import Oracle, in_memory
from vitkit.data.source import PixelSource
from vitkit.errors import MissingPackage
from vitkit.evaluate import Evaluation, evaluate
from vitkit.evaluate.pictures import _confusion_finding, _reliability_finding, worst_sheet, write_pictures


def judged(classes: int, count: int, sure: float, several: bool = False) -> tuple[Evaluation, PixelSource]:
    source = in_memory(count, tuple(f"class {i}" for i in range(classes)), several)
    logits = torch.randn(count, classes, generator=torch.Generator().manual_seed(0))
    if not several:
        logits[torch.arange(count), torch.from_numpy(source.labels)] += sure
    return evaluate(Oracle(source, logits), source), source


@pytest.mark.parametrize(
    ("classes", "several"), [(1, False), (2, False), (10, False), (100, False), (3, True)], ids=str
)
def test_all_pictures_are_drawn(classes: int, several: bool, tmp_path: Path) -> None:
    evaluation, source = judged(classes, 150, 2.0, several)
    written = {p.name for p in write_pictures(evaluation, source, tmp_path)}
    expected = {"confusion.png", "reliability.png", "worst.png"} - ({"confusion.png"} if several else set())
    assert written == expected - ({"worst.png"} if classes == 1 else set())
    for name in written:
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 200
            assert len(picture.convert("L").getcolors()) > 10


def test_titles_state_the_finding() -> None:
    evaluation, _ = judged(4, 200, 2.0)
    matrix = evaluation.confusion - torch.diag(torch.from_numpy(evaluation.confusion).diag()).numpy()
    true, said = divmod(int(matrix.argmax()), 4)
    title = _confusion_finding(evaluation).replace("\u00a0", " ")
    assert title.startswith(f"{100 * evaluation.top1:.1f}% of 200 are right")
    assert title.endswith(f"most often class {true} is taken for class {said} ({matrix.max()} times)")
    perfect, source = judged(4, 50, 100.0)
    assert _confusion_finding(perfect) == "100.0% of 50 are right: no class is taken for another"
    assert _reliability_finding(perfect).startswith("Its probabilities can be trusted")
    assert worst_sheet(perfect, source) is None


def test_too_sure_or_not_sure_enough() -> None:
    source = in_memory(80)
    right = torch.nn.functional.one_hot(torch.from_numpy(source.labels), 4).float()
    half_wrong = torch.where(torch.arange(80)[:, None] % 2 == 0, right, right.roll(1, dims=1))
    assert _reliability_finding(evaluate(Oracle(source, 20 * half_wrong), source)).startswith(
        "Too sure: it claims 100.0%"
    )
    assert _reliability_finding(evaluate(Oracle(source, 0.5 * right), source)).startswith("Not sure enough")


def test_names_may_be_long_or_strange(tmp_path: Path) -> None:
    names = ("x" * 300, "$a_b^c$ {%s}", "猫", "line\nbreak")
    source = in_memory(60, names)
    evaluation = evaluate(Oracle(source, torch.randn(60, 4)), source)
    assert len(write_pictures(evaluation, source, tmp_path)) == 3
    with Image.open(tmp_path / "confusion.png") as picture:
        assert max(picture.size) < 2000


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *more)

    evaluation, source = judged(2, 20, 2.0)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackage, match=r"vitkit\[explain\]"):
        write_pictures(evaluation, source, tmp_path)
