"""Whole runs: they learn, write down what they did, and can be killed at any moment."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from vitkit.data.dataset import Dataset
from vitkit.errors import ConfigError, TrainError
from vitkit.progress import Progress
from vitkit.training import run
from vitkit.training.checkpoint import Keeper, damaged
from vitkit.training.config import TrainConfig
from vitkit.training.costs import Costs
from vitkit.training.log import read

KILLER = """
import sys, json
from vitkit.training.config import TrainConfig
from vitkit.training.run import train
import torch; torch.set_num_threads(1)
train(TrainConfig.from_dict(json.loads(sys.argv[1])), resume=sys.argv[2] == "resume")
"""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def finished(out: Path) -> tuple[str, str, list[dict]]:
    """Everything about a finished run that must be the same, however often it was interrupted."""
    return digest(out / "model.safetensors"), digest(out / "best.safetensors"), read(out / "log.jsonl")


def test_a_run_learns_and_writes_everything_down(short: dict) -> None:
    result = vitkit.train(TrainConfig(**short))
    out = Path(short["out"])
    assert result.best["top1"] > 0.9
    assert result.steps == 24
    for name in (
        "config.json",
        "log.jsonl",
        "model.safetensors",
        "best.safetensors",
        "bad-files.csv",
        "curves.png",
        "result.json",
    ):
        assert (out / name).exists(), name
    assert len(list((out / "checkpoints").glob("step-*"))) == 1
    about = json.loads((out / "config.json").read_text())
    assert about["train"]["steps"] == 24
    assert about["classes"] == ["0", "1"]
    assert {"vitkit", "torch", "python"} <= about["versions"].keys()
    model = vitkit.load(out)
    assert model.class_names == ("0", "1")
    lines = read(out / "log.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(2, 25, 2))
    assert len([line for line in lines if "val_top1" in line]) == 3


def test_same_configuration_same_bits(short: dict, tmp_path: Path) -> None:
    ends = []
    for name in ("a", "b"):
        vitkit.train(TrainConfig(**{**short, "out": str(tmp_path / name)}))
        ends.append(finished(tmp_path / name))
    assert ends[0] == ends[1]
    vitkit.train(TrainConfig(**{**short, "out": str(tmp_path / "c"), "seed": 1}))
    assert finished(tmp_path / "c")[0] != ends[0][0]


def run_killed(settings: dict, kills: int, seed: int) -> None:
    """Start the run in a process of its own and kill it at random moments, then let it end."""
    chance = random.Random(seed)
    out = Path(settings["out"])
    for attempt in range(kills + 1):
        mode = "resume" if (out / "config.json").exists() else "new"
        command = [sys.executable, "-c", KILLER, json.dumps(settings), mode]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if attempt < kills:
            deadline = time.monotonic() + 60
            goal = chance.randint(0, settings["steps"] - 1)  # kill once the log has come so far, or at a random moment
            while time.monotonic() < deadline and process.poll() is None:
                lines = read(out / "log.jsonl")
                if lines and lines[-1]["step"] >= goal:
                    break
                time.sleep(0.005)
            time.sleep(chance.random() * 0.05)
            process.kill()
            process.wait()
        else:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors.decode()


HARD = {"ema": 0.9, "accumulate": 2, "augment": {"crop": "auto", "mixup": 0.4, "cutmix": 0.5, "smoothing": 0.1}}


@pytest.mark.parametrize(
    ("extra", "kills"),
    [
        ({}, 2),
        pytest.param({"threads": 2}, 1, marks=pytest.mark.slow),  # other processes start with one
        pytest.param(HARD, 4, marks=pytest.mark.slow),
        pytest.param({"optimizer": "muon"}, 16, marks=pytest.mark.slow),
        pytest.param({"optimizer": "muon", "precision": "bf16"}, 2, marks=pytest.mark.slow),
    ],
    ids=["plain", "two threads", "ema, mixup, accumulation", "many kills", "bf16"],
)
def test_killed_and_resumed_ends_with_the_same_bits(short: dict, tmp_path: Path, extra: dict, kills: int) -> None:
    settings = TrainConfig(**{**short, **extra, "save_every": 0.01, "changes": {**short["changes"], "dropout": 0.1}})
    assert_same_bits(settings, kills, tmp_path)


@pytest.mark.slow
def test_killed_with_loading_processes_and_resumed(short: dict, squares: str, tmp_path: Path) -> None:
    """The images come from files, through two processes that load ahead of the step."""
    arrays = np.load(squares)
    for split in ("train", "val"):
        for i, (pixels, label) in enumerate(zip(arrays[f"x_{split}"], arrays[f"y_{split}"], strict=True)):
            path = tmp_path / "files" / split / str(label) / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[:, :, 0]).save(path)
    more = {"data": str(tmp_path / "files"), "workers": 2, "save_every": 0.01}
    assert_same_bits(TrainConfig(**{**short, **more}), 3, tmp_path)


def assert_same_bits(settings: TrainConfig, kills: int, tmp_path: Path) -> None:
    whole = settings.replace(out=str(tmp_path / "whole"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes that are killed: sums of threads differ in the last bit
    vitkit.train(whole)
    torch.set_num_threads(threads)
    cut = settings.replace(out=str(tmp_path / "cut"))
    run_killed(cut.to_dict(), kills, seed=kills)
    assert finished(tmp_path / "whole") == finished(tmp_path / "cut")


def test_ctrl_c_saves_and_says_how_to_go_on(short: dict) -> None:
    settings = TrainConfig(**{**short, "steps": 5000}).to_dict()
    process = subprocess.Popen([sys.executable, "-c", KILLER, json.dumps(settings), "new"], stderr=subprocess.PIPE)
    log = Path(short["out"]) / "log.jsonl"
    deadline = time.monotonic() + 120
    while not read(log) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert b"all saved. Resume with: vitkit train" in errors
    assert b"--resume" in errors
    assert Keeper(Path(short["out"]) / "checkpoints").newest() is not None


def test_a_damaged_checkpoint_is_passed_over(short: dict) -> None:
    out = Path(short["out"])
    vitkit.train(TrainConfig(**{**short, "save_every": 0.0}))
    keeper = Keeper(out / "checkpoints")
    assert len(keeper.steps()) == 2
    newest = keeper.path(keeper.steps()[-1])
    with (newest / "state.pt").open("r+b") as file:
        file.seek(200)
        file.write(b"damage")
    assert "does not match its checksum" in damaged(newest)
    told: list[str] = []
    watcher = Progress()
    watcher.note = told.append  # type: ignore[method-assign]
    assert keeper.newest(watcher) == keeper.path(keeper.steps()[0])
    assert "is damaged" in told[0]


def test_disk_full_keeps_earlier_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(tmp_path)
    keeper.save(1, {"x": torch.ones(3)}, background=False)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        vitkit.VitkitError, match=r"are intact\. Free some space; a run that has ended continues with --resume"
    ):
        keeper.save(2, {"x": torch.ones(3)}, background=False)
    assert keeper.steps() == [1]
    assert not damaged(keeper.path(1))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]


def test_losses_that_are_not_finite_stop_the_run_with_a_replay(short: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.tasks import classify
    from vitkit.training.run import replay

    original = classify.classification_loss
    calls = []

    def poisoned(logits: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(1)
        return original(logits, *rest) * (float("nan") if len(calls) > 4 else 1.0)

    monkeypatch.setattr(classify, "classification_loss", poisoned)
    with pytest.raises(TrainError, match=r"loss was nan in 5 steps in a row.*vitkit replay"):
        vitkit.train(TrainConfig(**short))
    lines = replay(Path(short["out"]) / "replay")
    assert "loss nan" in lines[0]
    assert "first layer whose output is not finite: none" in lines[-1]  # it was the loss itself
    assert replay(Path(short["out"])) == lines  # the folder of the run will do
    with pytest.raises(TrainError, match="holds no replay"):
        replay(Path(short["out"]) / "checkpoints")


def test_a_single_bad_loss_is_skipped(short: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.tasks import classify

    original = classify.classification_loss
    calls = []

    def once(logits: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(1)
        return original(logits, *rest) * (float("inf") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(classify, "classification_loss", once)
    result = vitkit.train(TrainConfig(**short))
    assert result.skipped == 1
    assert all(t.isfinite().all() for t in vitkit.load(short["out"]).state_dict().values())


class Clock:
    """A hundredth of a second passes whenever somebody looks at it."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 0.01
        return self.now


def test_a_budget_is_kept(short: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule ends, evaluated and saved, having followed the clock."""
    clock = Clock()
    for module in ("loop", "budget"):
        monkeypatch.setattr(f"vitkit.training.{module}.time", clock)
    monkeypatch.setattr("vitkit.training.budget.measured", lambda *_: Costs(1e-3, 1e-3, 1e-3))
    config = TrainConfig(**{**short, "steps": 0, "budget": 6.0, "evaluations": 1})
    result = run.train(config, started=0.0)
    assert result.steps > 10
    assert 3 < result.seconds < 6
    log = read(Path(short["out"]) / "log.jsonl")
    lines = [line for line in log if "lr" in line]
    assert lines[-1]["lr"] < 0.2 * max(line["lr"] for line in lines)
    assert sum("val_top1" in line for line in log) == 1, "how long it takes was measured before"


def test_a_budget_that_is_over_before_the_first_step_still_makes_one(
    short: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the machine becomes busy in between. A budget that is over before it is planned is an error."""
    config = TrainConfig(**{**short, "steps": 0, "budget": 6.0})
    with pytest.raises(ConfigError, match="cannot be kept"):
        run.train(config, started=time.monotonic() - 60)
    monkeypatch.setattr("vitkit.training.budget.keep", lambda asked, config, reasons, *_: (config, reasons))
    result = run.train(config, started=time.monotonic() - 60)
    assert result.steps == 1
    assert result.validation
    assert (Path(short["out"]) / "curves.png").exists()


def test_fine_tuning_at_twice_the_size(short: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.training import parts

    vitkit.train(TrainConfig(**short))
    read_once, opened_once = Mock(wraps=parts.open_checkpoint), Mock(wraps=run.open_data)
    monkeypatch.setattr(parts, "open_checkpoint", read_once)
    monkeypatch.setattr(run, "open_data", opened_once)
    tuned = {**short, "model": "", "changes": {}, "init": short["out"], "image_size": (16, 16), "steps": 4}
    result = vitkit.train(TrainConfig(**{**tuned, "out": str(tmp_path / "tuned")}))
    assert read_once.call_count == opened_once.call_count == 1
    assert vitkit.load(tmp_path / "tuned").config.grid == (8, 8)
    assert result.best["top1"] > 0.8
    for name, extra in (("probe", {"freeze": "backbone"}), ("lora", {"lora": 2})):
        vitkit.train(TrainConfig(**{**tuned, **extra, "out": str(tmp_path / name)}))
        assert vitkit.load(tmp_path / name).config == vitkit.load(tmp_path / "tuned").config


def test_fine_tuning_adapts_the_first_filters_to_the_channels(tmp_path: Path, command) -> None:
    """Five channels as they are; grey images are shown to filters for colour as colour, so these stay."""
    random = np.random.default_rng(0)
    vitkit.save(vitkit.create("mu", image_size=32), tmp_path / "colour.safetensors")
    for channels, expected in ((5, 5), (1, 3)):
        x = random.integers(0, 255, (20, 32, 32, channels), dtype=np.uint8)
        np.savez(tmp_path / f"{channels}.npz", x_train=x, y_train=np.arange(20) % 2)
        args = ("--init", tmp_path / "colour.safetensors", "--steps", "1", "--out", tmp_path / f"run{channels}")
        code, _, err = command("train", tmp_path / f"{channels}.npz", *args)
        assert code == 0, err
        assert vitkit.load(tmp_path / f"run{channels}").config.channels == expected
        assert ("adapted from 3 to 5 channels" in err) is ("in 5 channels" in err) is (channels == 5)


def test_a_run_is_never_overwritten(short: dict) -> None:
    vitkit.train(TrainConfig(**{**short, "steps": 2}))
    with pytest.raises(TrainError, match="already holds a run; continue it with --resume"):
        vitkit.train(TrainConfig(**short))
    with pytest.raises(ConfigError, match="was trained on"):
        vitkit.train(TrainConfig(data="digits", out=short["out"]), resume=True)
    with pytest.raises(TrainError, match="holds no run to resume"):
        vitkit.train(TrainConfig(data=short["data"], out=short["out"] + "x"), resume=True)


def test_a_log_is_json_and_a_damaged_one_is_read(tmp_path: Path) -> None:
    from vitkit.training.log import EVENTS, Log

    log, nan = Log(tmp_path), float("nan")
    log.write({"step": 1, "loss": nan, "val_mse": 1e300})
    log.close()
    assert json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=pytest.fail)["loss"] is None
    strange = b'\xff\n{"step": "x"}\n{"step": -1}\n{"step": true}\n'
    strange += b'{"step": 2, "loss": NaN, "\\ud800": 1e300}\n{"step": 3, "lo'
    (tmp_path / "log.jsonl").write_bytes((tmp_path / "log.jsonl").read_bytes() + strange)
    Log(tmp_path, up_to_step=9).close()  # as --resume does
    assert [line["step"] for line in read(tmp_path / "log.jsonl")] == [1, 2]
    assert (tmp_path / EVENTS).stat().st_size > 0


def test_events_can_be_read_back(tmp_path: Path) -> None:
    """The records parse by their own rules: lengths, checksums, and the numbers inside."""
    import struct

    from vitkit.training.log import Log, _crc

    log = Log(tmp_path)
    log.write({"step": 300, "loss": 0.25, "lr": 1e-3})
    log.close()
    data = (tmp_path / "events.out.tfevents.0.vitkit").read_bytes()
    records = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == _crc(data[:8])
        records.append(data[12 : 12 + length])
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == _crc(records[-1])
        data = data[16 + length :]
    assert b"brain.Event:2" in records[0]
    assert struct.pack("<f", 0.25) in records[1]
    assert b"loss" in records[1]


def test_a_short_run_is_evaluated_a_few_times(short: dict) -> None:
    """0.3 * 12 steps * 16 images / 32 validation images: one evaluation, at the end, and not twenty."""
    vitkit.train(TrainConfig(**{**short, "evaluations": 0, "steps": 12}))
    lines = read(Path(short["out"]) / "log.jsonl")
    assert [line["step"] for line in lines if "val_top1" in line] == [12]


def test_the_weights_that_are_kept_are_tested(short: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first evaluation is made the best: the test is of its weights, and not of the last ones."""
    arrays = dict(np.load(short["data"]))
    np.savez(tmp_path / "three.npz", **arrays, x_test=255 - arrays["x_val"], y_test=arrays["y_val"])
    monkeypatch.setattr("vitkit.tasks.base.Metric.improves", lambda *_: False)
    result = vitkit.train(TrainConfig(**{**short, "data": str(tmp_path / "three.npz")}))
    assert result.best["step"] == 8
    kept, last = (
        vitkit.evaluate(Path(short["out"]) / f"{name}.safetensors", tmp_path / "three.npz", split="test").loss
        for name in ("best", "model")
    )
    assert result.test["loss"] == pytest.approx(kept, rel=1e-5)
    assert abs(kept - last) > 1e-3


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ((0.80, 0.95, 0.92), 24),  # 32 images: one of them is 3 points, and chance is as much
        ((0.80, 0.95, 0.70), 16),
        ((0.95, 0.92, 0.89), 16),  # by little and little it would go down: what counts is the best of all
    ],
)
def test_of_weights_that_validation_cannot_tell_apart_the_last_are_kept(
    short: dict, monkeypatch: pytest.MonkeyPatch, scores: tuple[float, ...], kept: int
) -> None:
    found = iter(scores)
    monkeypatch.setattr("vitkit.training.loop.quick", lambda *_: {"top1": next(found), "loss": 1.0, "samples": 32})
    result = vitkit.train(TrainConfig(**short))
    assert result.best["step"] == kept
    assert result.best["score"] == scores[kept // 8 - 1]


def test_without_validation_the_last_weights_are_kept(short: dict) -> None:
    """No score says which weights are best: those of the first evaluation are not."""
    opened = vitkit.open_data(short["data"])
    rows = opened.split("train")
    result = run.train(TrainConfig(**short), dataset=Dataset(rows, ["train"] * len(rows), split_missing=False))
    best, last = (vitkit.load(str(result.out / f"{name}.safetensors")).state_dict() for name in ("best", "model"))
    assert result.steps == short["steps"]
    assert all(torch.equal(best[name], last[name]) for name in last)


def test_evaluate_says_when_the_split_selected_the_weights(short: dict, squares: str, tmp_path: Path, command) -> None:
    vitkit.train(TrainConfig(**short))
    out, said = Path(short["out"]), "these weights were selected by this split, as the best of 3 evaluations"
    assert said in command("evaluate", out, squares)[1]
    assert said in command("evaluate", out / "best.safetensors", squares)[1]
    assert json.loads(command("evaluate", out, squares, "--json")[1])["selected_among"] == 3
    arrays = np.load(squares)
    np.savez(tmp_path / "other.npz", **{**arrays, "x_val": arrays["x_val"][::-1]})
    others = [(out / "model.safetensors", squares), (out, tmp_path / "other.npz"), (out, squares, "--split", "train")]
    vitkit.train(TrainConfig(**{**short, "evaluations": 1, "out": str(tmp_path / "once")}))
    for model, *more in (*others, (tmp_path / "once", squares)):
        code, text, _ = command("evaluate", model, *more)
        assert code == 0
        assert "selected" not in text


def test_a_checkpoint_that_knew_the_classes_is_kept_where_nothing_is_better(short: dict, tmp_path: Path) -> None:
    before = vitkit.train(TrainConfig(**short))
    again = {**short, "model": "", "changes": {}, "init": short["out"], "out": str(tmp_path / "again"), "steps": 4}
    worse = vitkit.train(TrainConfig(**{**again, "lr": 1.0}))
    assert worse.best == {"score": before.best["score"], **before.best, "step": 0}
    assert worse.test == before.test
    assert "not better than the checkpoint it began with" in dict(worse.rows())["verdict"]
    assert worse.start["top1"] == before.best["top1"] > worse.validation["top1"]


def test_a_checkpoint_of_other_classes_is_not_asked_before_the_first_step(short: dict, tmp_path: Path) -> None:
    model = vitkit.create("mu", image_size=8, channels=1, classes=10)
    torch.nn.init.ones_(model.head.classifier.weight)  # it answers, about something else
    model.class_names = [f"other {i}" for i in range(10)]
    vitkit.save(model, tmp_path / "other.safetensors")
    init = str(tmp_path / "other.safetensors")
    result = vitkit.train(TrainConfig(**{**short, "model": "", "changes": {}, "init": init, "steps": 2}))
    assert not result.start
    assert read(Path(short["out"]) / "log.jsonl")[0]["step"] > 0
