"""The page of results says what the committed tables say."""

import csv
import json
import re
from pathlib import Path

import pytest
import typer

from vitkit.cli.main import app
from vitkit.study.studies import STUDIES

DOCS = Path(__file__).parents[2] / "docs"
TABLES = sorted((DOCS / "studies").glob("*.json"))


@pytest.mark.parametrize("name", ["studies.md", "zh/studies.md"])
def test_the_page_is_current(name: str) -> None:
    from make_studies_page import PAGES, page

    assert name in PAGES
    assert (DOCS / name).read_text(encoding="utf-8") == page(name), "run python docs/make_studies_page.py"


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_results_are_whole(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["study"] == path.stem
    with path.with_suffix(".csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == [arm["arm"] for arm in found["arms"]]
    for arm in found["arms"]:
        assert arm["accuracy"] == pytest.approx(sum(arm["accuracy_by_seed"]) / found["seeds"])
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert found["finding"][0] in text
    assert path.with_suffix(".png").exists()


def test_the_papers_figures_name_studies_that_are_there() -> None:
    from make_studies_page import FIGURES, paper

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command in FIGURES.values():
        for word in re.findall(r"`vitkit (\w+)", command):
            assert word in commands
        assert not command or "`" in command or "](" in command or command in STUDIES
    for chinese in (False, True):
        rows = paper(chinese).splitlines()
        assert len(rows) == len(FIGURES) + 2
        assert all(row.count("|") == 5 for row in rows)
