"""The learning rate of fine-tuning with a budget: which rates are tried, which is taken, and what a run remembers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import vitkit
from train.test_runs import Clock
from vitkit import world as worlds
from vitkit.data import open_data
from vitkit.training import budget, rates, run
from vitkit.training.config import TrainConfig
from vitkit.training.costs import Costs
from vitkit.training.parts import open_init
from vitkit.training.rates import Search, affordable, search
from vitkit.training.recipe import complete

CHEAP = Costs(1e-5, 1e-5, 1e-6)


class Machine:
    """Losses by rate; every search of one takes some seconds."""

    def __init__(self, losses: dict[float, float], seconds: float = 1.0) -> None:
        self.losses, self.seconds, self.now = losses, seconds, 100.0

    def clock(self) -> float:
        return self.now

    def loss(self, rate: float, steps: int) -> float:
        self.now += self.seconds
        return self.losses[rate]


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ({0.001: 2.0, 0.003: 1.5, 0.009: 1.8}, 0.003),
        ({0.001: 2.0, 0.003: 1.5, 0.009: 1.0}, 0.009),
        ({0.001: 2.0, 0.003: 2.5, 0.000333: 1.0}, 0.000333),
        ({0.001: 2.0, 0.003: 1.95, 0.009: 3.0}, 0.001),  # not clearly better
        ({0.001: math.inf, 0.003: math.inf, 0.000333: 1.0}, 0.000333),
        ({0.001: math.inf, 0.003: math.inf, 0.000333: math.inf}, 0.001),
    ],
)
def test_the_better_side_is_followed_and_a_clear_winner_taken(losses: dict[float, float], chosen: float) -> None:
    machine = Machine(losses)
    found = search(0.001, 24, 10.0, machine.loss, machine.clock)
    assert list(found.losses) == list(losses)
    assert found.lr == chosen
    said = "0.001, as it was" if chosen == 0.001 else f"{chosen:g} in place of 0.001"
    assert found.text().startswith(f"learning rate: {said}; loss on held-out images after 24 steps each: ")


@pytest.mark.parametrize(("seconds", "tried"), [(1.0, 3), (4.0, 2), (6.0, 1), (20.0, 1)])
def test_no_rate_is_begun_that_would_take_too_long(seconds: float, tried: int) -> None:
    machine = Machine({0.001: 2.0, 0.003: 1.0, 0.009: 3.0}, seconds)
    assert len(search(0.001, 24, 10.0, machine.loss, machine.clock).losses) == tried


def test_steps_follow_the_time() -> None:
    slow = Costs(0.01, 0.0, 0.003)  # a step of 32 images takes 0.32 s, 200 held-out ones 0.6 s
    assert affordable(60.0, slow, 32, 5_000) == rates.MOST
    assert affordable(24.0, slow, 32, 5_000) == 23
    assert affordable(20.0, slow, 32, 5_000) == 0
    assert affordable(-5.0, slow, 32, 5_000) == 0


def test_images_that_decide_are_held_out_and_none_of_validation(squares: str) -> None:
    data = open_data(squares)
    part = rates.divided(data, seed=0)
    assert part.splits == {"train": 77, "val": 19}
    labels = part.split("val").labels
    assert abs(int((np.asarray(labels) == 0).sum()) - 10) <= 1
    assert torch.equal(part.samples.pixels, data.split("train").pixels)


@pytest.fixture
def tuned(short: dict, tmp_path: Path) -> dict:
    """Fine-tuning of a small checkpoint with a budget."""
    changes = {**short["changes"], "channels": 1, "classes": 3}
    vitkit.save(vitkit.create("vit-8px/2", **changes), tmp_path / "init.safetensors")
    kept = {name: short[name] for name in ("data", "out", "batch_size")}
    return {**kept, "init": str(tmp_path / "init.safetensors"), "baseline": "no", "augment": "none"}


def test_a_rate_that_is_far_too_low_is_found_without_a_trace(tuned: dict) -> None:
    world, data = worlds.join(), open_data(tuned["data"])
    config = TrainConfig(**tuned, budget=60.0)
    init = open_init(config)
    assert init is not None
    config, _ = complete(config, data, world, init.config)
    weights, state = {name: t.clone() for name, t in init.tensors.items()}, torch.random.get_rng_state()
    loss = rates.loss_of(config, data, world, init)
    assert loss(1e-6, 20) == loss(1e-6, 20)
    assert search(1e-4, 20, math.inf, loss).lr > 1e-4
    assert loss(1e30, 8) == math.inf
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(init.tensors[name], weight) for name, weight in weights.items())
    assert not Path(tuned["out"]).exists()


def begun(settings: dict, monkeypatch: pytest.MonkeyPatch, costs: Costs = CHEAP, seconds: float = 4.0) -> dict:
    for module in ("budget", "loop", "frozen"):
        monkeypatch.setattr(f"vitkit.training.{module}.time", Clock())
    monkeypatch.setattr(budget, "measured", lambda *_: costs)
    monkeypatch.setattr(run.Loop, "train_step", lambda *_: 1.0)
    run.train(TrainConfig(**settings, budget=seconds), started=0.0)
    return json.loads((Path(settings["out"]) / "config.json").read_text())


def test_a_run_takes_what_was_found_and_a_resume_searches_no_more(tuned: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int, float]] = []

    def found(lr: float, steps: int, room: float, *_: object) -> Search:
        asked.append((lr, steps, room))
        return Search({lr: 2.0, 0.5: 1.0}, steps)

    monkeypatch.setattr(rates, "search", found)
    about = begun(tuned, monkeypatch, seconds=10.0)
    ((_, steps, room),) = asked
    assert steps == rates.MOST
    assert 0.5 < room <= 1.0  # a tenth, or what leaves seven for learning
    assert about["train"]["lr"] == 0.5
    (line,) = [line for line in about["chosen"] if line.startswith("learning rate")]
    assert "0.5 in place of" in line
    run.train(TrainConfig(out=tuned["out"]), restart=True, started=0.0)
    assert len(asked) == 1
    assert json.loads((Path(tuned["out"]) / "config.json").read_text()) == about


@pytest.mark.parametrize("more", [{"lr": 1e-3}, {"freeze": "backbone"}], ids=["lr", "frozen"])
def test_what_was_asked_for_is_not_searched(tuned: dict, monkeypatch: pytest.MonkeyPatch, more: dict) -> None:
    monkeypatch.setattr(rates, "search", None)
    about = begun({**tuned, **more}, monkeypatch)
    assert not any(line.startswith("learning rate") for line in about["chosen"])


def test_a_budget_that_is_too_small_says_so(tuned: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "search", None)
    about = begun(tuned, monkeypatch, Costs(1e-3, 1e-3, 1e-6))
    (line,) = [line for line in about["chosen"] if line.startswith("learning rate")]
    assert line.endswith("not searched for, since there is no time for 20 steps at each of 3 rates")
