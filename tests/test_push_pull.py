"""`push`, `pull` and model cards with huggingface_hub's real client, against a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import vitkit
from hub_imitation import TOKEN, hub
from vitkit.errors import VitkitError
from vitkit.hub import pull, push
from vitkit.tasks.metrics import wilson

SHORT = {"model": "mu", "steps": 8, "batch_size": 16, "evaluations": 1, "changes": {"depth": 1}}
CLIENT = """
import json, sys, torch, vitkit
from vitkit.errors import VitkitError
run, folder = sys.argv[1:]
said = {}
def told(name, call):
    try:
        said[name] = str(call())
    except VitkitError as e:
        said[name] = "error: " + str(e)
told("push", lambda: vitkit.push(run, "me/digits"))
told("pull", lambda: vitkit.pull("me/digits", folder + "/pulled"))
told("pull twice", lambda: vitkit.pull("me/digits", folder + "/pulled"))
told("pull none", lambda: vitkit.pull("me/none", folder + "/none"))
told("push to others", lambda: vitkit.push(run, "others/digits"))
model = vitkit.load(run)
told("push a model", lambda: model.push_to_hub("me/model"))
again = vitkit.ViT.from_pretrained("me/model")
pulled = vitkit.load(folder + "/pulled")
mine = model.state_dict()
same = [all(torch.equal(mine[k], v) for k, v in m.state_dict().items()) for m in (again, pulled)]
said["same"] = str(same)
said["again"] = str(vitkit.push(run, "me/digits"))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "small run"
    return vitkit.train("digits", out=folder, **SHORT).out


def client(run: Path, folder: Path, endpoint: str, code: str = CLIENT, **more: str) -> dict[str, str]:
    """The addresses of the hub are read when huggingface_hub is imported: a process of its own."""
    known = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1", **more}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    words = [sys.executable, "-c", code, str(run), str(folder)]
    found = subprocess.run(words, check=False, env={**kept, **known}, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def test_push_pull_and_load_with_the_real_client(run: Path, tmp_path: Path) -> None:
    with hub() as server:
        said = client(run, tmp_path, server.address, HF_TOKEN=TOKEN)
    assert said["push"] == f"{server.address}/me/digits/commit/{'c' * 40}"
    assert set(server.repos["me/digits"]) == {
        "README.md", "config.json", "curves.png", "model.safetensors", "result.json"
    }  # fmt: skip
    assert server.repos["me/digits"]["model.safetensors"] == (run / "best.safetensors").read_bytes()
    assert said["same"] == "[True, True]"
    assert "is there already" in said["pull twice"]
    assert "no 'me/none'" in said["pull none"]
    assert "may not write there" in said["push to others"]
    assert said["again"] == said["push"]
    outside = b"".join(server.repos["me/digits"].values())
    assert str(run.parent).encode() not in outside  # nothing about somebody's disk


PUSH = """
import json, sys, vitkit
from vitkit.errors import VitkitError
try:
    vitkit.push(sys.argv[1], "me/digits")
    print(json.dumps({"said": "pushed"}))
except VitkitError as e:
    print(json.dumps({"said": str(e)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "run `hf auth login`, or set HF_TOKEN"),
        ({"HF_TOKEN": "hf_" + "b" * 34}, "does not know this token"),
        ({"HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_TOKEN": TOKEN, "HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
    ],
)
def test_what_stands_in_the_way_is_said(run: Path, tmp_path: Path, environment, words) -> None:
    with hub() as server:
        said = client(run, tmp_path, environment.get("HF_ENDPOINT", server.address), PUSH, **{
            k: v for k, v in environment.items() if k != "HF_ENDPOINT"
        })  # fmt: skip
    assert words in said["said"]


def test_the_card_of_a_run_is_valid_and_says_what_it_must(run: Path) -> None:
    card = ModelCard.load(run / "README.md")
    card.data.to_dict()
    (found,) = card.data.eval_results
    result = json.loads((run / "result.json").read_text())
    assert found.metric_value == pytest.approx(result["test"]["top1"], abs=1e-6)
    assert (found.task_type, found.dataset_name, found.metric_type) == ("image-classification", "digits", "accuracy")
    assert card.data.library_name == "vitkit"
    assert card.data.license is None  # for the user
    for words in ("95% interval", "Calibration", "onfus", "Environmental cost", "Wh", "timm", "onnx", "Licence", "hf:"):
        assert words in card.content, words


def test_cards_survive_names_of_any_kind(tmp_path: Path) -> None:
    from vitkit.training.card import plain_card

    text = plain_card('a: "b"\n---', {"x": 1}, "classes")
    assert ModelCard(text).data.library_name == "vitkit"


def test_wilson_against_scipy() -> None:
    from scipy.stats import binomtest

    for right, count in ((0, 10), (3, 10), (97, 100), (50, 50)):
        wanted = binomtest(right, count).proportion_ci(0.95, method="wilson")
        assert wilson(right / count, count) == pytest.approx((wanted.low, wanted.high), abs=1e-4)


def test_a_model_saves_itself_and_loads_again(tmp_path: Path) -> None:
    model = vitkit.create("mu", classes=2)
    model.class_names = ("cat", "dog")
    model.save_pretrained(tmp_path / "m")
    again = vitkit.ViT.from_pretrained(str(tmp_path / "m"))
    assert again.class_names == ("cat", "dog")
    assert {p.name for p in (tmp_path / "m").iterdir()} == {"README.md", "config.json", "model.safetensors"}


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    for name in ("digits", "a/b/c", "../x", "me/" + "a" * 200):
        with pytest.raises(VitkitError, match="owner/name"):
            pull(name)
        with pytest.raises(VitkitError, match="owner/name"):
            push(tmp_path, name)
    with pytest.raises(VitkitError, match="fresh weights"):
        push("vit-ti/16", "me/x")
