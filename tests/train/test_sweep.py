"""A small search: every combination once, resumed without repeating, bad runs stopped early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import vitkit
from vitkit.training.guided import distribution
from vitkit.training.result import Watcher
from vitkit.training.sweep import Median, combinations

SHORT = ("--set", "model=mu", "--set", "steps=2", "--set", "batch_size=8", "--set", "evaluations=1")


def test_combinations_are_a_grid_or_a_drawn_part_of_it() -> None:
    assert combinations(["a=1,2", "b=x"]) == [("a=1", "b=x"), ("a=2", "b=x")]
    some = combinations(["a=1,2,3", "b=1,2,3"], draws=4, seed=1)
    assert len(set(some)) == 4
    assert some == combinations(["a=1,2,3", "b=1,2,3"], draws=4, seed=1)
    for wrong in (["lr"], ["lr="], ["lr=1"]):
        with pytest.raises(vitkit.VitkitError, match="--set"):
            combinations(wrong)


def test_a_sweep_is_resumed_without_repeating(tmp_path: Path, command) -> None:
    args = ("sweep", "digits", "--set", "lr=1e-3,1e-2", *SHORT, "--out", tmp_path / "s")
    code, out, err = command(*args, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [row["state"] for row in found] == ["finished", "finished"]
    assert found[0]["best"] >= found[1]["best"]
    assert "already holds a sweep" in command(*args)[2]
    (tmp_path / "s" / "002" / "result.json").unlink()  # as if it had been killed at the end
    kept = (tmp_path / "s" / "001" / "result.json").stat().st_mtime_ns
    code, out, err = command(*args, "--resume")
    assert code == 0, err
    assert "Best:" in out
    assert f"{found[0]['best']:.2%}" in out
    assert (tmp_path / "s" / "001" / "result.json").stat().st_mtime_ns == kept
    assert (tmp_path / "s" / "002" / "result.json").is_file()
    other = ("sweep", "digits", "--set", "lr=1e-3,1e-1", *SHORT, "--out", tmp_path / "s", "--resume")
    assert "is another one (searched)" in command(*other)[2]
    assert "Did you mean" in command("sweep", "digits", "--set", "lrr=1,2", "--out", tmp_path / "t")[2]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    assert "holds other things" in command(*args[:-1], tmp_path / "full")[2]


def test_the_median_rule() -> None:
    """By hand: three finished runs had .5, .6 and .7 at half of their length, so below .6 is stopped there."""
    curves = [[(0.1, v - 0.2), (0.5, v), (1.0, v + 0.1)] for v in (0.5, 0.6, 0.7)]
    for score, higher, stopped in ((0.55, True, True), (0.65, True, False), (0.6, True, False)):
        rule = Median(Watcher(), curves)
        rule.scored(0.1, 0.0, higher)  # too early to say
        assert not rule.wants_stop
        rule.scored(0.5, score, higher)
        assert rule.wants_stop is stopped
    few = Median(Watcher(), curves[:2])
    few.scored(0.5, 0.0, True)
    assert not few.wants_stop


def test_a_run_that_is_told_to_stop_is_saved(tmp_path: Path) -> None:
    class Impatient(Watcher):
        def scored(self, progress: float, score: float, higher: bool) -> None:
            self.wants_stop = True

    with pytest.raises(vitkit.VitkitError, match="all saved"):
        vitkit.train("digits", model="mu", steps=8, batch_size=8, evaluations=4, out=tmp_path, watcher=Impatient())
    assert vitkit.train("digits", out=tmp_path, resume=True).steps == 8


# --- Optuna ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_guided_search_is_resumed_as_if_it_had_not_stopped(tmp_path: Path, command) -> None:
    args = ("sweep", "digits", "--search", "optuna", "--set", "lr=1e-4..1e-1", "--set", "optimizer=adamw,sgd", *SHORT)
    code, out, err = command(*args, "--trials", "3", "--out", tmp_path / "whole", "--json")
    assert code == 0, err
    whole = json.loads((tmp_path / "whole" / "trials.json").read_text())
    assert len(json.loads(out)) == len(whole) == 3
    assert command(*args, "--trials", "1", "--out", tmp_path / "part")[0] == 0
    assert command(*args, "--trials", "3", "--out", tmp_path / "part", "--resume")[0] == 0
    assert json.loads((tmp_path / "part" / "trials.json").read_text()) == whole
    assert "is another one" in command(*args[:-2], "--out", tmp_path / "part", "--resume")[2]


def test_ranges_and_lists() -> None:
    found = {words: distribution(words) for words in ("1e-4..1e-1", "0..0.5", "2..8", "1..100", "a,b")}
    assert [type(one).__name__[:-12] for one in found.values()] == ["Float", "Float", "Int", "Int", "Categorical"]
    assert [getattr(one, "log", None) for one in found.values()] == [True, False, False, True, None]
    for wrong in ("3..1", "1..1", "e..e", ","):
        with pytest.raises(vitkit.VitkitError, match="range"):
            distribution(wrong)


def test_an_unknown_search_is_refused(tmp_path: Path, command) -> None:
    words = ("sweep", "digits", "--search", "bayes", "--set", "lr=1,2", "--out", tmp_path / "x")
    assert "choose grid or optuna" in command(*words)[2]
