"""Training above frozen blocks from states that are computed once: the weights are those of a run on images."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitkit
from peers import randomize
from train.test_frozen import Listening
from train.test_runs import finished, run_killed
from vitkit.data import open_data, preset
from vitkit.errors import ConfigError, TrainError
from vitkit.model.vit import ViT
from vitkit.training import states
from vitkit.training.budget import Wanted, cut_steps
from vitkit.training.config import TrainConfig
from vitkit.training.costs import Costs
from vitkit.training.result import Result
from vitkit.training.run import replay, train
from vitkit.training.stopping import Stopped

SMALL = {"depth": 3, "width": 16, "heads": 2, "mlp_width": 16, "channels": 1, "classes": 2}


@pytest.fixture
def above(short: dict, tmp_path: Path) -> dict:
    """Fine-tuning the last of three blocks, without augmentation."""
    vitkit.save(randomize(vitkit.create("vit-8px/2", **SMALL)), tmp_path / "init.safetensors")
    kept = {k: short[k] for k in ("data", "out", "batch_size", "evaluations", "log_every", "lr")}
    plain = {"steps": 14, "augment": preset("none"), "baseline": "no", "threads": 1, "precision": "fp32"}
    return {**kept, **plain, "init": str(tmp_path / "init.safetensors"), "freeze": "2"}


def run(settings: dict, **how: object) -> Result:
    """Without figures."""
    config = TrainConfig(**settings)
    return train(config, dataset=open_data(config.data), **how)


def apart(settings: dict, tmp_path: Path) -> float:
    """The largest difference between the weights and metrics of two runs, from states and from images."""
    outs = [tmp_path / how for how in ("once", "each")]
    results = [run({**settings, "out": str(out), "states": out.name}) for out in outs]
    ours, theirs = (vitkit.load(out / "best.safetensors").state_dict() for out in outs)
    for metric, value in results[0].validation.items():
        assert value == pytest.approx(results[1].validation[metric], abs=1e-6)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize(
    ("more", "most"),
    [
        ({}, 1e-6),  # equal bits where it was tried; a matrix product may depend on the size of its batch
        ({"augment": preset("light", flip=0.5, smoothing=0.1), "views": 2, "balanced": True}, 1e-6),
        ({"ema": 0.9, "accumulate": 2, "precision": "bf16"}, 1e-6),
        ({"freeze": "3"}, 1e-5),  # the last block computes all tokens in place of those that the head reads
    ],
    ids=["plain", "views", "average in bf16", "all blocks"],
)
def test_the_weights_are_those_of_a_run_on_images(above: dict, more: dict, most: float, tmp_path: Path) -> None:
    assert apart({**above, **more}, tmp_path) < most


def test_an_unreadable_image_is_replaced_and_left_out_as_ever(above: dict, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 6)):
        for name, low in (("dark", 0), ("light", 120)):
            folder = tmp_path / "set" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(random.integers(low, low + 100, (8, 8), dtype=np.uint8)).save(folder / f"{i:02}.png")
            (folder / "03.png").write_bytes(b"no image")
    data = {"data": str(tmp_path / "set"), "max_bad": "10", "workers": 0, "steps": 9}
    assert apart({**above, **data}, tmp_path) < 1e-6
    listed = [(tmp_path / how / "bad-files.csv").read_text().splitlines() for how in ("once", "each")]
    assert sorted(listed[0]) == sorted(listed[1])
    assert len(listed[0]) == 3


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images were embedded at a time."""
    seen: list[int] = []
    embed = ViT.embedded

    def counted(self: ViT, images: Tensor, *rest: object) -> tuple:
        seen.append(len(images))
        return embed(self, images, *rest)

    monkeypatch.setattr(ViT, "embedded", counted)
    return seen


def test_frozen_blocks_see_every_image_once(above: dict, embedded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "draws", lambda model, count: False)
    heard = Listening()
    result = vitkit.train(TrainConfig(**above), watcher=heard)
    assert sum(embedded) == 96 + 32
    (line,) = [line for line in heard.lines if line.startswith("states:")]
    assert line.startswith("states: after the 2 frozen blocks, computed once for every image and kept")
    out = Path(above["out"])
    assert json.loads((out / "config.json").read_text())["train"]["states"] == "once"
    assert not (out / ".states").exists(), "they are removed with the end of the run"
    before, after = vitkit.load(above["init"]).state_dict(), vitkit.load(out).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[0] for name in changed} == {"encoder", "norm", "head"}
    assert not any(name.startswith(("encoder.blocks.0", "encoder.blocks.1")) for name in changed)
    assert vitkit.evaluate(out, above["data"], split="val").metrics["top1"] == result.best["top1"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"augment": preset("light", flip=0.5)}, "augmentation that is new in every epoch (--augment none or"),
        ({"augment": preset("none", mixup=0.2), "views": 2}, "mixup or cutmix"),
        ({"changes": {"stochastic_depth": 0.1}}, "dropout in them"),
        ({"patch_dropout": 0.5}, "dropped patches"),
        ({}, "so few steps: they see fewer images than the 96 that would be computed"),
        (
            {"init": None, "model": "vit-8px/2", "changes": {**SMALL, "classes": None, "dropout": 0.1}},
            "dropout in them",
        ),
    ],
    ids=["augmentation", "mixup", "depth", "patches", "few steps", "dropout"],
)
def test_what_cannot_be_kept_is_said_and_trained_as_ever(above: dict, more: dict, reason: str) -> None:
    changes = {k: v for k, v in more.get("changes", {}).items() if v is not None}
    settings = {**above, **more, "steps": 2, **({"changes": changes} if changes else {})}
    heard = Listening()
    run(settings, watcher=heard)
    (line,) = [line for line in heard.lines if line.startswith("states:")]
    assert line.startswith(f"states: the 2 frozen blocks run in every step, because of {reason}")
    if more:
        with pytest.raises(ConfigError, match="states=once is not possible with"):
            run({**settings, "out": above["out"] + "2", "states": "once"})


def test_little_memory_is_said(above: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Listening()
    need = 4 * 16 * 17 * (96 + 32)
    monkeypatch.setattr(states, "free_memory", lambda: 1.9 * need)
    run(above, watcher=heard)
    assert any("0.00014 GB that they need, more than half of the 0.00026 GB" in line for line in heard.lines)
    monkeypatch.setattr(states, "free_memory", lambda: 2.1 * need)
    run({**above, "out": above["out"] + "2"}, watcher=heard)
    assert any("kept while the run lasts: 0.00014 GB" in line for line in heard.lines)


def test_a_full_disk_is_named(above: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitkit.evaluation.features.os.posix_fallocate", full)
    with pytest.raises(TrainError, match=r"No space left on device.*--set states=each"):
        run(above)


def test_the_command_of_a_module_is_one_that_can_be_typed(above: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/vitkit/__main__.py", "train", "photos"])
    run({**above, "steps": 1})
    assert json.loads((Path(above["out"]) / "config.json").read_text())["command"] == "python -m vitkit train photos"


def test_once_needs_frozen_blocks() -> None:
    for freeze in ("", "0", "backbone"):
        with pytest.raises(ConfigError, match="add --freeze with their number"):
            TrainConfig(states="once", freeze=freeze)


def test_a_pass_that_is_stopped_continues(above: dict, embedded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of 16: two of train, then a stop; the resumed run computes the rest, and learns the same."""
    whole = run({**above, "out": above["out"] + "-whole"})
    monkeypatch.setattr("vitkit.evaluation.run._PIXELS_AT_ONCE", 16 * 64)
    monkeypatch.setattr(states, "draws", lambda model, count: False)
    compute = states.states_of

    def stop(parts: object, images: Tensor) -> Tensor:
        if len(embedded) == 1:
            __import__("signal").raise_signal(15)
        return compute(parts, images)

    embedded.clear()
    with monkeypatch.context() as patched:
        patched.setattr(states, "states_of", stop)
        with pytest.raises(Stopped, match="all states so far are saved"):
            run(above)
    assert embedded == [16, 16]
    embedded.clear()
    result = run(above, resume=True)
    assert sum(embedded) == 96 + 32 - 32
    assert result.validation == pytest.approx(whole.validation, abs=1e-6)


def test_a_step_from_states_can_be_run_again(above: dict) -> None:
    with pytest.raises(TrainError, match="vitkit replay"):
        run({**above, "lr": 1e30, "optimizer": "sgd", "clip": 0.0})
    lines = replay(Path(above["out"]))
    assert "16 images" in lines[0]
    assert lines[3].startswith("first layer whose output is not finite: encoder.blocks.2")


@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_same_bits(above: dict, tmp_path: Path) -> None:
    settings = TrainConfig(**above, save_every=0.01)
    vitkit.train(settings.replace(out=str(tmp_path / "whole")))
    cut = settings.replace(out=str(tmp_path / "cut"))
    run_killed(cut.to_dict(), kills=2, seed=1)
    assert finished(tmp_path / "whole") == finished(tmp_path / "cut")


def test_a_budget_takes_the_pass_that_pays() -> None:
    """2,000 images: a pass of 40 s and steps at a tenth of the cost, or steps at full cost."""
    costs = Costs(image=0.002, update=0.0, evaluated=0.001, once=0.02)
    long, short = (cut_steps(Wanted(seconds, 2_000, 100, 100, 32), costs, 2.0) for seconds in (300.0, 50.0))
    assert (long.states, short.states) == ("once", "each")
    assert long.passes > 3 * cut_steps(Wanted(300.0, 2_000, 100, 100, 32), costs.by_images(), 2.0).passes
    assert costs.by_images().step(10) == pytest.approx(0.22)


@pytest.mark.slow
def test_a_budget_that_is_kept_with_states(above: dict) -> None:
    heard = Listening()
    settings = {**above, "steps": 0, "evaluations": 0, "budget": 12.0, "lr": 1e-3}
    result = run(settings, watcher=heard)
    assert any("computed once for every image" in line for line in heard.lines)
    assert result.best["top1"] > 0.5
