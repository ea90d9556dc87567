"""`vitkit pretrain`: whole runs on images without labels, what they leave behind, and what they refuse."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from vitkit.data import open_data
from vitkit.errors import ConfigError, DataError
from vitkit.tasks import METHODS
from vitkit.training.config import TrainConfig
from vitkit.training.log import read
from vitkit.training.recipe import complete
from vitkit.world import World

TINY = {"model": "vit-8px/2", "changes": {"depth": 1, "width": 32, "heads": 2, "mlp_width": 32}}
TINY |= {"steps": 4, "batch_size": 16, "evaluations": 2, "log_every": 1}


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty grey images of 8x8 pixels in one folder, without a label in sight."""
    folder = tmp_path_factory.mktemp("flat")
    for i, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_a_flat_folder_is_enough(flat: Path, tmp_path: Path, method: str) -> None:
    result = vitkit.pretrain(flat, method=method, out=tmp_path / "run", **TINY)
    assert result.verdict.split(":")[0] in ("learning", "collapsed", "not better than its start")
    assert result.score.key == "retrieval"
    lines = [line for line in read(result.out / "log.jsonl") if "val_rank" in line]
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert all("verdict" in line for line in lines[1:])
    assert {"val_spread", "val_uniformity", "val_attention_entropy", "val_pixel_retrieval"} <= lines[-1].keys()
    saved = json.loads((result.out / "result.json").read_text())
    assert saved["verdict"] == result.verdict
    assert saved["start"]["retrieval"] == lines[0]["val_retrieval"]
    drawn = {path.name for path in result.out.glob("*.png")}
    painted = {"reconstructions.png"} if method in ("mae", "masked-patch") else set()
    assert drawn == {"curves.png", "neighbours.png"} | painted
    model = vitkit.load(result.out)
    assert model.config.classes == 0
    assert vitkit.embed(result.out, flat).shape == (40, 32)
    assert (result.out / "best.safetensors").read_bytes() == (result.out / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_kill_before_the_set_was_noted_needs_no_repair(squares: str, tmp_path: Path) -> None:
    """config.json is there, data.json not yet; labels are in the set, but not in the run."""
    vitkit.pretrain(squares, out=tmp_path / "run", **TINY)
    (tmp_path / "run" / "data.json").unlink()
    vitkit.pretrain(squares, out=tmp_path / "run", resume=True, **TINY)
    assert (tmp_path / "run" / "data.json").exists()


def test_the_result_is_fine_tuned_and_probed(squares: str, tmp_path: Path, command) -> None:
    code, out, _ = command("pretrain", squares, "--steps", "4", "--model", "vit-8px/2", "--out", str(tmp_path / "run"))
    assert code == 0
    assert "Verdict: " in out
    assert "k-NN accuracy" in out
    fine = vitkit.train(squares, init=tmp_path / "run", steps=2, out=tmp_path / "fine")
    assert fine.validation["top1"] >= 0
    code, out, _ = command("evaluate", str(tmp_path / "run"), squares, "--probe", "knn")
    assert code == 0
    assert "knn" in out
    again = vitkit.pretrain(squares, init=str(tmp_path / "run"), method="masked-patch", steps=2, out=tmp_path / "more")
    assert vitkit.load(again.out).config.depth == vitkit.load(tmp_path / "run").config.depth


def test_what_was_not_measured_is_printed_as_a_guess(flat: Path, tmp_path: Path) -> None:
    config, data = TrainConfig(data=str(flat), task="mae", out=str(tmp_path)), open_data(flat, labelled=False)
    _, reasons = complete(config, data, World(0, 1, torch.device("cpu")), None)
    assert "method: mae, whose steps are the quickest; no measurement has compared the methods yet" in reasons
    assert any(line.startswith("length: ") and "a guess that no measurement supports yet" in line for line in reasons)
    assert not any(line.startswith("loss: own") for line in reasons)


def test_few_photographs_are_said_to_be_few(tmp_path: Path) -> None:
    for i in range(12):
        Image.new("RGB", (64, 64), (20 * i, 0, 0)).save(tmp_path / f"{i}.png")
    config = TrainConfig(data=str(tmp_path), task="mae", out=str(tmp_path / "run"))
    _, reasons = complete(config, open_data(tmp_path, labelled=False), World(0, 1, torch.device("cpu")), None)
    assert any("are few for a ViT from scratch: `--init CHECKPOINT`" in line for line in reasons)


def test_every_kind_of_set_without_labels(flat: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in flat.iterdir())
    (tmp_path / "list.csv").write_text("path\n" + "\n".join(str(flat / n) for n in names))
    (tmp_path / "list.txt").write_text("\n".join(str(flat / n) for n in names))
    np.savez(tmp_path / "set.npz", images=np.zeros((40, 8, 8), np.uint8))
    (tmp_path / "split" / "train").mkdir(parents=True)
    (tmp_path / "split" / "val").mkdir()
    for i, name in enumerate(names):
        (tmp_path / "split" / ("train" if i % 4 else "val") / name).write_bytes((flat / name).read_bytes())
    for data in (flat, tmp_path / "list.csv", tmp_path / "list.txt", tmp_path / "set.npz", tmp_path / "split"):
        found = open_data(data, labelled=False)
        assert sum(found.splits.values()) == 40
        assert not found.samples.labelled
    with pytest.raises(DataError, match="no folders of classes"):
        open_data(flat)
    assert open_data(tmp_path / "split", labelled=False).splits == {"train": 30, "val": 10}
    assert open_data("digits", labelled=False).samples.labelled


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["EMPTY"], "holds no images; vitkit reads"),
        (["ONE"], "Add images"),
        (["TABLE"], "has no column of paths"),
        (["FLAT", "--method", "maee"], "there is no method of pre-training called 'maee'. Did you mean mae?"),
        (["FLAT", "--model", "vit-ti/16"], "less than one patch of 16"),
        (["FLAT", "--set", "task.masking=0"], "nothing to predict"),
        (["FLAT", "--set", "task.maskin=0"], "mae has no option task.maskin; --set takes task.masking"),
        (["FLAT", "--set", "ema=0.9"], "leave it out"),
        (["FLAT", "--model", "resnet-8px"], "choose another --model"),
    ],
)
def test_wrong_input_is_answered_with_the_next_action(
    flat: Path, tmp_path: Path, command, arguments: list[str], words: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.csv").write_text("label,age\ncat,3\n")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.png").write_bytes((flat / "00.png").read_bytes())
    given = {
        "ONE": str(tmp_path / "one"),
        "EMPTY": str(tmp_path / "empty"),
        "TABLE": str(tmp_path / "table.csv"),
        "FLAT": str(flat),
    }
    code, _, error = command(
        "pretrain", *(given.get(a, a) for a in arguments), "--steps", "1", "--out", tmp_path / "run"
    )
    assert code == 2
    assert words in " ".join(error.split())


def test_batches_of_one(flat: Path, tmp_path: Path) -> None:
    for method in set(METHODS) & {"dino", "lejepa"}:
        with pytest.raises(ConfigError, match="choose a larger --batch-size"):
            vitkit.pretrain(flat, method=method, out=tmp_path / method, **{**TINY, "batch_size": 1})
