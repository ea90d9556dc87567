"""The page of results says what the committed tables say."""

import csv
import json
from pathlib import Path

import pytest

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
