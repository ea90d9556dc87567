"""`vitkit study` on the command line: the list, the options, the answers to mistakes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vitkit.cli.main import app
from vitkit.errors import VitkitError
from vitkit.study.studies import STUDIES

NAMES = (
    *("data-size", "scaling", "shift", "transfer", "self-supervision", "augmentation-vs-data"),
    *("positions", "positions-by-patch-size", "add-or-concatenate", "pooling", "head-type", "why-a-class-token"),
    *("patch-size", "patch-embed", "resolution", "registers"),
    *("attention-bug", "scale-in-softmax", "why-sqrt", "how-many-heads", "heads", "attention-distance"),
    *("depth-width", "dropout", "gradient-accumulation-and-normalisation"),
)


def test_the_list_has_all_of_them_with_costs() -> None:
    assert tuple(STUDIES) == NAMES
    plain = CliRunner().invoke(app, ["study"])
    assert plain.exit_code == 0
    assert all(name in "".join(plain.output.split()) or name[:20] in plain.output for name in NAMES)
    rows = json.loads(CliRunner().invoke(app, ["study", "--json"]).stdout)
    assert tuple(row["name"] for row in rows) == NAMES
    assert all(row["arms"] > 1 and row["steps"] > 0 and row["data"] for row in rows)


def test_one_study(tiny: str, tmp_path: Path) -> None:
    words = ["study", "scale-in-softmax", "--data", tiny, "--steps", "2", "--seeds", "2", "--out", str(tmp_path)]
    words += ["--workers", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "softmax(qk)/√d v" in done.stdout
    assert "seeds)" in done.stdout
    again = CliRunner().invoke(app, [*words, "--json"])
    assert again.stderr.count("%  ") == again.stderr.count("(remembered)") > 15
    found = json.loads(again.stdout)
    assert found["study"] == "scale-in-softmax"
    assert any("underpowered" in doubt for doubt in found["doubts"]) == (found["power"] < 0.8)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["study", "pool"], "no study 'pool'"),
        (["study", "pooling", "--budget", "soon"], "is not a time"),
        (["study", "pooling", "--data", "nowhere"], "no file or folder 'nowhere'"),
    ],
)
def test_mistakes_are_answered(words: list[str], answer: str) -> None:
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, VitkitError)
    assert answer in str(done.exception)
