"""A run in a folder that holds other people's files leaves them alone; a run that diverged is no success."""

from __future__ import annotations

from pathlib import Path

import pytest

import vitkit
from vitkit.errors import TrainError
from vitkit.training.config import TrainConfig


def test_files_of_others_stay(short: dict) -> None:
    out = Path(short["out"])
    (out / "notes").mkdir(parents=True)
    others = [out / "events.out.tfevents.17.other", out / "notes" / "step-000000001", out / ".step-1", out / "a.csv"]
    for path in others:
        path.write_text("mine")
    vitkit.train(TrainConfig(**{**short, "steps": 2, "evaluations": 1}))
    assert [path.read_text() for path in others] == ["mine"] * len(others)


@pytest.mark.parametrize("name", ["checkpoints", "log.jsonl", "model.safetensors", "events.out.tfevents.0.vitkit"])
def test_what_a_run_would_overwrite_is_refused(short: dict, name: str) -> None:
    path = Path(short["out"], name, "step-000000001" if name == "checkpoints" else "")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    with pytest.raises(TrainError, match=f"holds {name}, which a run would overwrite"):
        vitkit.train(TrainConfig(**short))
    assert path.read_text() == "mine"


@pytest.mark.parametrize(("lr", "steps"), [(1e30, 3), (1e10, 3), (1e30, 24)])
def test_a_diverged_run_is_an_error(short: dict, lr: float, steps: int) -> None:
    with pytest.raises(TrainError, match=r"diverged|in a row"):
        vitkit.train(TrainConfig(**{**short, "lr": lr, "steps": steps}))
    assert not Path(short["out"], "model.safetensors").exists()
    assert not Path(short["out"], "result.json").exists()
