"""Every study, in miniature: two steps, two seeds, a few dozen images."""

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vitkit.cli.main import app
from vitkit.model.summary import summarize
from vitkit.study.numbers import compare
from vitkit.study.run import drawn_steps, run
from vitkit.study.studies import STUDIES
from vitkit.study.table import Arm, Finding, Setting, Study, Table
from vitkit.study.write import as_markdown, read


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all: studies share the trainings they have in common."""
    return tmp_path_factory.mktemp("studies")


FEW = ("positions", "shift", "heads", "patch-embed")  # one of each kind of figure; the rest with the slow tests


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in STUDIES])
def test_a_study_writes_table_figure_and_finding(name: str, tiny: str, out: Path) -> None:
    result = run(name, tiny, out, steps=2, seeds=2)
    arms = [arm.name for arm in STUDIES[name].arms(Setting(8, 1, 4))]
    assert [row.name for row in result.table.rows] == arms
    assert len(set(arms)) == len(arms)
    assert all(len(row.accuracy) == 2 and min(row.accuracy) >= 0 for row in result.table.rows)
    found = json.loads((out / name / f"{name}.json").read_text())
    assert [a["arm"] for a in found["arms"]] == arms
    assert found["finding"] == list(result.finding.sentences)
    assert found["seeds"] == 2
    assert f"--data {tiny} --steps 2 --seeds 2" in found["command"]
    rows = list(csv.DictReader(io.StringIO((out / name / f"{name}.csv").read_text())))
    assert [r["arm"] for r in rows] == arms
    assert float(rows[0]["accuracy"]) == pytest.approx(result.table.rows[0].mean.mean)
    page = (out / name / f"{name}.md").read_text()
    assert f"({name}.png)" in page
    assert result.finding.sentences[0] in page
    assert as_markdown(read(out / name / f"{name}.json")) == page  # nothing is lost in the file
    for ending in ("png", "svg"):
        assert (out / name / f"{name}.{ending}").stat().st_size > 5_000


def test_a_study_is_one_class_and_one_row(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Toy(Study):
        name = "toy"
        question = "Two heads or four?"
        varies = "heads"
        claim = "four are better"
        source = "nobody"
        fair = "all but the heads"
        reference = "four"

        def arms(self, s: Setting) -> list[Arm]:
            return [Arm("two", s.vit(heads=2)), Arm("four", s.vit())]

        def find(self, table: Table) -> Finding:
            return Finding("Heads", compare("two", "four", table.gap("two", "four")), "That is all.")

    monkeypatch.setitem(STUDIES, Toy.name, Toy())
    result = run("toy", tiny, tmp_path, steps=1, seeds=1)
    assert [row.name for row in result.table.rows] == ["two", "four"]
    assert "two reaches" in (tmp_path / "toy" / "toy.md").read_text().lower()
    listed = json.loads(CliRunner().invoke(app, ["study", "--json"]).stdout)
    assert listed[-1]["name"] == "toy"


@pytest.mark.parametrize("steps", [0, 1, 7, 100, 2743])
def test_the_first_ten_losses_are_kept(steps: int) -> None:
    kept = drawn_steps(steps)
    assert kept[:10] == list(range(min(10, steps)))
    assert len(kept) <= 110
    assert all(0 <= step < steps for step in kept)


def test_equal_cost_is_equal() -> None:
    """What is called equal in multiply-adds is so within a tenth, for every size of images."""
    for side, channels in ((8, 1), (16, 3), (28, 1), (32, 3)):
        s = Setting(side, channels, 10)
        goal = summarize(s.vit())["gmacs"]
        arms = [s.hybrid(), s.resnet(), *(a.config for a in STUDIES["depth-width"].arms(s))]
        assert all(abs(summarize(c)["gmacs"] / goal - 1) < 0.1 for c in arms), side


@pytest.mark.parametrize("side", [8, 16, 28, 32])
@pytest.mark.parametrize("name", list(STUDIES))
def test_arms_fit_every_size_of_images(name: str, side: int) -> None:
    study = STUDIES[name]
    arms = study.arms(Setting(side, 3, 5))
    names = [arm.name for arm in arms]
    assert not study.reference or study.reference in names
    assert set(study.compared(names)) <= set(names)
    assert not study.slowest or study.slowest in names
    for arm in arms:
        assert not arm.rate_of or not arms[names.index(arm.rate_of)].rate_of  # that one has a search of its own
        assert arm.before is None or names.index(arm.before.name) < names.index(arm.name)


@pytest.mark.parametrize("name", list(STUDIES))
def test_figures_have_numbers_on_their_axes(name: str) -> None:
    """No formula is shown as its source, which is what a logarithmic axis does where mathematics is off."""
    from test_study_findings import made_up

    from vitkit.figures.style import styled

    with styled():
        figure = STUDIES[name].draw(made_up(name, {}))
        figure.canvas.draw()
        texts = [text.get_text() for axes in figure.axes for text in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    assert texts
    assert not [text for text in texts if "math" in text]
