"""A run of version 0.1, stopped at step 13, in `tests/data_made_by_0_1`: it loads, resumes, evaluates and serves.

`finished.safetensors` is what version 0.1 reached at step 24 with one thread. Processors choose kernels that round
differently, so that the weights may differ by a few units in the sixth place elsewhere; a wrong batch, rate or
moment would show in the second.
"""

import shutil
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

import vitkit
from vitkit.data import open_data
from vitkit.runtime import open_runtime
from vitkit.training.config import TrainConfig
from vitkit.training.log import read
from vitkit.web.app import create_app
from vitkit.web.models import Served
from vitkit.web.settings import ServeSettings

KEPT = Path(__file__).parents[1] / "data_made_by_0_1"


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(KEPT, tmp_path / "kept")
    monkeypatch.chdir(tmp_path / "kept")
    return tmp_path / "kept"


def test_the_run_resumes_and_ends_with_the_same_weights(copied: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = vitkit.train(TrainConfig(data="small", out="run"), resume=True)
    finally:
        torch.set_num_threads(threads)
    assert (result.steps, result.skipped) == (24, 0)
    assert [line["step"] for line in read(copied / "run" / "log.jsonl") if "loss" in line] == list(range(1, 25))
    ours, theirs = (load_file(p) for p in (copied / "run" / "model.safetensors", copied / "finished.safetensors"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-4)


def test_its_model_is_evaluated(copied: Path) -> None:
    for path in ("run", "finished.safetensors"):
        model = vitkit.load(path)
        assert model.class_names == ("one", "two", "zero")
        found = vitkit.evaluate(model, open_data("small").evaluation())
        assert found.samples == 8
        assert 0 <= found.metrics["top1"] <= 1


def test_it_is_served(copied: Path) -> None:
    from web.serving import with_client

    model = vitkit.load("run")
    app = create_app((Served("run", model, open_runtime(model, "eager"), ()),), ServeSettings())
    path = next((copied / "small" / "two").glob("*.png"))

    async def visit(client: httpx.AsyncClient) -> dict:
        return (await client.post("/api/predict", content=path.read_bytes())).json()

    answer = with_client(app, visit)
    assert {c["name"] for c in answer["predictions"][0]["classes"]} == {"one", "two", "zero"}
