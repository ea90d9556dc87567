"""A step of a run as a checkpoint of its own."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import vitkit
from vitkit.errors import CheckpointError
from vitkit.training.config import TrainConfig
from vitkit.training.run import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("steps")
    small = {"data": "digits", "model": "vit-8px/2", "steps": 3, "batch_size": 16, "changes": {"depth": 2}, "lr": 1e-3}
    kinds = {"plain": {}, "sharded": {"shard": True}, "averaged": {"ema": 0.9}, "both": {"ema": 0.9, "shard": True}}
    for kind, more in kinds.items():
        train(TrainConfig(**small, **more, evaluations=1, out=str(folder / kind)))  # type: ignore[arg-type]
    return {kind: folder / kind for kind in kinds}


def newest(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1]


@pytest.mark.parametrize("kind", ["plain", "sharded", "averaged", "both"])
def test_the_last_step_is_the_model_of_the_run(runs: dict[str, Path], kind: str, tmp_path: Path, command) -> None:
    """To the byte: also the classes and the configuration."""
    code, _, err = command("convert", newest(runs[kind]), tmp_path / "one.safetensors", "--to", "native")
    assert code == 0, err
    assert (tmp_path / "one.safetensors").read_bytes() == (runs[kind] / "model.safetensors").read_bytes()
    assert "step 3" in err
    assert ("averaged" in err) is (kind in ("averaged", "both"))


def test_it_can_be_used_where_a_model_is_wanted(runs: dict[str, Path]) -> None:
    model = vitkit.load(newest(runs["sharded"]))
    assert model.class_names == tuple("0123456789")
    torch.testing.assert_close(model.state_dict(), vitkit.load(runs["sharded"]).state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize(("file", "words"), [("model.json", "damaged"), ("shards/.metadata", "damaged")])
def test_a_damaged_step_is_refused(runs: dict[str, Path], tmp_path: Path, file: str, words: str) -> None:
    copy = Path(shutil.copytree(newest(runs["sharded"]), tmp_path / "step-000000003"))
    (copy / file).write_bytes((copy / file).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=words):
        vitkit.load(copy)


def test_a_step_without_its_model_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(newest(runs["plain"]), tmp_path / "step-000000003"))
    (copy / "model.json").unlink()
    about = json.loads((copy / "about.json").read_text())
    del about["sha256"]["model.json"]
    (copy / "about.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="resume the run once"):
        vitkit.load(copy)
