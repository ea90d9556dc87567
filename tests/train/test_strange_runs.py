"""Runs, sweeps and configuration files by strangers: told in words, and nothing waits for a pipe."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from vitkit.checkpoints.mapped import parse
from vitkit.errors import CheckpointError, ConfigError, TrainError
from vitkit.training.config import TrainConfig
from vitkit.training.files import as_toml, read_settings
from vitkit.training.log import read
from vitkit.training.runs import find_runs, sort_runs
from vitkit.training.sweep import claim

pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
DEEP = "a = " + "[" * 5000 + "]" * 5000


def run_of(folder: Path, **result: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"train": {"data": "x"}}))
    (folder / "result.json").write_text(json.dumps(result))
    return folder


@pytest.mark.parametrize("read_file", [read_settings, parse])
def test_toml_nested_without_end_is_told_in_words(tmp_path: Path, read_file: Callable[[Path], object]) -> None:
    (tmp_path / "x.toml").write_text(DEEP)
    with pytest.raises((ConfigError, CheckpointError), match=r"cannot be read|is not a TOML file"):
        read_file(tmp_path / "x.toml")


@pipes
@pytest.mark.parametrize("read_file", [read_settings, parse])
def test_a_configuration_that_is_a_pipe_is_refused(tmp_path: Path, read_file: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "x.toml")
    with pytest.raises((ConfigError, CheckpointError), match="pipe or device"):
        read_file(tmp_path / "x.toml")


@pipes
@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_a_pipe_in_a_run_is_not_waited_for(tmp_path: Path, name: str) -> None:
    run_of(tmp_path / "runs" / "a", steps=1)
    run = run_of(tmp_path / "runs" / "b", steps=2)
    (run / name).unlink()
    os.mkfifo(run / name)
    os.mkfifo(run / "log.jsonl")
    found = find_runs([tmp_path / "runs"])
    assert [r.state for r in found][:1] == ["finished"]
    assert any(word in found[1].state for word in ("cannot be read", "damaged"))
    assert read(run / "log.jsonl") == []


@pipes
def test_a_sweep_whose_file_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "sweep.json")
    with pytest.raises(TrainError, match="holds other things and no sweep"):
        claim(tmp_path, {}, resume=True)


def test_a_score_that_no_float_can_hold_is_none(tmp_path: Path) -> None:
    run_of(tmp_path / "a", best={"score": 10**400})
    run_of(tmp_path / "b", best={"score": 0.5})
    assert [r.best for r in sort_runs(find_runs([tmp_path]), "-best")] == [0.5, None]


ODD = [None, True, -1, 10**400, math.nan, "a\0b", "9" * 5000, [[]], [None], {"a": 1}, {"flip": "x"}, date(2020, 1, 1)]


@pytest.mark.parametrize("name", TrainConfig.__dataclass_fields__)
def test_settings_of_another_kind_are_told_in_words(name: str) -> None:
    """Whatever a file may hold: accepted or a ConfigError, and no path with a NUL."""
    for value in ODD:
        with contextlib.suppress(ConfigError):
            config = TrainConfig(**{"data": "digits", name: value})
            assert not isinstance(value, str) or "\0" not in value
            as_toml(config.to_dict())
