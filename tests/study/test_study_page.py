"""The pages of results say what the committed tables say, in both languages."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from vitkit.cli.main import app
from vitkit.errors import DataError
from vitkit.study.studies import STUDIES
from vitkit.study.table import Result
from vitkit.study.write import as_json, read

DOCS = Path(__file__).parents[2] / "docs"
TABLES = sorted((DOCS / "studies").rglob("*.json"))


def test_the_pages_are_current() -> None:
    from make_studies_page import pages

    for name, made in pages().items():
        assert (DOCS / name).read_text(encoding="utf-8") == made(), f"{name}: run python docs/make_studies_page.py"


@pytest.mark.parametrize("path", TABLES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_a_result_is_whole_in_its_file(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["study"] == path.stem
    assert json.loads(json.dumps(as_json(read(path)))) == found, "run python docs/make_studies_page.py"
    assert (DOCS / "studies" / f"{path.stem}.png").exists()
    assert (found["data"]["name"] == STUDIES[path.stem].data) == (path.parent.name == "studies")


def test_a_file_that_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"study": "positions"}', encoding="utf-8")
    with pytest.raises(DataError, match="vitkit study NAME"):
        read(tmp_path / "x.json")


def test_nothing_is_told_of_a_study_that_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import make_studies_page as page

    monkeypatch.setattr(page, "result", lambda name: None)
    for chinese in (False, True):
        for text in (page.gallery(chinese), page.questions(chinese), page.studies_table(chinese), page.paper(chinese)):
            assert not re.search(
                r"points|seeds|个种子|studies/[a-z-]+\.(md|png)", re.sub(r"(?m)^(说法|The claim).*", "", text)
            )
        assert page.questions(chinese).count("尚未运行" if chinese else "Not run yet") == len(STUDIES)


def test_every_study_has_a_section_and_its_words_in_chinese() -> None:
    from make_studies_page import SECTIONS
    from studies_in_chinese import WORDS

    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(STUDIES) == sorted(WORDS)


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_chinese_sentences_follow_the_table(path: Path) -> None:
    """The other way round there is another difference, and other words for it."""
    from make_studies_page import answer_zh

    found = read(path)
    assert answer_zh(found) != answer_zh(_mirrored(found))


def _mirrored(found: Result) -> Result:
    """All accuracies and measures turned around."""
    rows = []
    for row in found.table.rows:
        accuracy = tuple(1 - x for x in row.accuracy)
        rows.append(replace(row, accuracy=accuracy, extra=tuple(map(_negated, row.extra))))
    return replace(found, table=replace(found.table, rows=tuple(rows)))


def _negated(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _negated(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_negated(one) for one in value]
    return -value if isinstance(value, float) else value


@pytest.mark.parametrize("name", list(STUDIES))
def test_chinese_pages_of_all_studies(name: str) -> None:
    """Also of those without a result: the arms that they speak of are there."""
    from make_studies_page import study_zh
    from test_study_findings import judged, made_up

    context = judged("positions", [0.01, 0.02, 0.03]).context
    table = made_up(name, {})
    data = {**table.data, "name": "x", "val": 1, "test": 1}
    found = Result(STUDIES[name], table, STUDIES[name].find(table), replace(context, data=data))
    text = study_zh(found)
    assert found.study.name in text
    assert "None" not in text


def test_the_papers_figures_name_studies_and_commands_that_are_there() -> None:
    from make_studies_page import FIGURES, paper

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for by in FIGURES.values():
        if isinstance(by, str):
            assert by in STUDIES
        else:
            assert all(word in commands for word in re.findall(r"`vitkit (\w+)", by[0]))
            assert by[0] or by[1][0].startswith("none: ")  # without a command it says why
    for chinese in (False, True):
        rows = paper(chinese).splitlines()
        assert len(rows) == len(FIGURES) + 2
        assert all(row.count("|") == 5 for row in rows)
