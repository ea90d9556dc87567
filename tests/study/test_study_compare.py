"""Whether two results agree: against scipy's Welch test, and the same numbers always agree."""

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from typer.testing import CliRunner

from vitkit.cli.main import app
from vitkit.errors import ConfigError, DataError
from vitkit.study.compare import agreements, read_result, unpaired


def result(arms: dict[str, list[float]], name: str = "pooling", effect: float = 0.02) -> dict[str, object]:
    return {"study": name, "effect": effect, "arms": [{"arm": a, "accuracy_by_seed": v} for a, v in arms.items()]}


def test_the_interval_is_welchs() -> None:
    """Equal sizes and spreads give a whole number of degrees of freedom; otherwise ours are rounded down: wider."""
    a, b = [0.90, 0.92, 0.94], [0.85, 0.87, 0.89]
    theirs = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert (unpaired(a, b).low, unpaired(a, b).high) == pytest.approx((theirs.low, theirs.high))
    random = np.random.default_rng(0)
    for _ in range(20):
        a, b = random.normal(0, 1, 4).tolist(), random.normal(0, 2, 7).tolist()
        theirs, ours = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95), unpaired(a, b)
        assert ours.low <= theirs.low + 1e-12 < theirs.high <= ours.high + 1e-12
        assert ours.half / (theirs.high - theirs.low) * 2 < 1.35


def test_verdicts_follow_the_numbers() -> None:
    near, far, wide = [0.900, 0.901, 0.902], [0.80, 0.801, 0.802], [0.7, 0.9, 1.0]
    found = agreements(
        result({"same": near, "near": near, "far": near, "wide": near}),
        result({"same": near, "near": [0.903, 0.904, 0.905], "far": far, "wide": wide, "other": near}),
    )
    assert [one.verdict for one in found] == ["agrees", "differs", "differs", "open"]
    close = agreements(result({"a": near}), result({"a": [0.9005, 0.9, 0.902]}))
    assert close[0].verdict == "agrees"


def test_wrong_files_are_answered(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two studies"):
        agreements(result({}), result({}, "positions"))
    with pytest.raises(DataError, match="no result of a study"):
        agreements({"study": "a"}, {"study": "a"})
    with pytest.raises(DataError, match="no arm in common"):
        agreements(result({"a": [0.1]}), result({"b": [0.1]}))
    for text in ("# no JSON", "[1, 2]"):
        (tmp_path / "other.md").write_text(text)
        with pytest.raises(DataError, match=r"give the NAME\.json"):
            read_result(tmp_path / "other.md")
    path = tmp_path / "a.json"
    path.write_text(json.dumps(result({"a": [0.5, 0.51]})))
    done = CliRunner().invoke(app, ["study", "compare", str(path)])
    assert isinstance(done.exception, ConfigError)
    done = CliRunner().invoke(app, ["study", "compare", str(path), str(path)])
    assert (done.exit_code, "agrees" in done.stdout) == (0, True)
    path.with_name("b.json").write_text(json.dumps(result({"a": [0.1, 0.11]})))
    done = CliRunner().invoke(app, ["study", "compare", str(path), str(path.with_name("b.json"))])
    assert (done.exit_code, "differs" in done.stdout) == (1, True)
