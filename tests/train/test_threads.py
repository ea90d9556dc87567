"""How many threads a run takes: by a clock and a machine that are made up here."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import vitkit
from train.test_runs import Clock, finished
from vitkit.cli import doctor
from vitkit.cli.main import app
from vitkit.plan import Setup, estimate
from vitkit.plan.setup import complete
from vitkit.training import budget, run, threads
from vitkit.training.config import TrainConfig
from vitkit.training.costs import Costs
from vitkit.training.live import PlainView
from vitkit.training.result import Rate, Watcher
from vitkit.training.threads import AGAIN, TRIED, WINDOW, Neighbours, Pace, Used


class Machine:
    """Its clock moves by what a step takes with the present number of threads."""

    def __init__(self, **seconds: float) -> None:
        self.now, self.seconds, self.used = 0.0, seconds, list[int]()

    def clock(self) -> float:
        return self.now

    def step(self) -> None:
        self.used.append(torch.get_num_threads())
        self.now += self.seconds[f"with_{self.used[-1]}"]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has said how many threads to take, and there may be two."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)


# --- before a run ------------------------------------------------------------------------------------


def test_numbers_are_timed_in_turns_and_the_first_round_does_not_count() -> None:
    machine = Machine(with_1=1.0, with_2=0.6)
    assert threads.timed(machine.step, [1, 2], 100.0, machine.clock) == pytest.approx({1: 1.0, 2: 0.6})
    assert machine.used == [1, 2] * threads.ROUNDS
    assert torch.get_num_threads() != 2 or machine.used[-1] == 2  # restored
    short = Machine(with_1=1.0, with_2=5.0)
    assert threads.timed(short.step, [1, 2], 0.5, short.clock) == {1: 1.0, 2: 5.0}
    assert short.used == [1, 2]  # no time for another round


@pytest.mark.parametrize(
    ("took", "chosen"),
    [({1: 1.0, 2: 0.6}, 2), ({1: 1.0, 2: 5.0}, 1), ({1: 1.0, 2: 0.97}, 1), ({1: 4.0, 4: 1.4, 8: 1.35}, 4)],
)
def test_the_fewest_of_the_fastest_are_taken(took: dict[int, float], chosen: int) -> None:
    assert threads.fastest(took) == chosen


def test_the_choice_is_one_half_or_all_unless_it_was_made(monkeypatch: pytest.MonkeyPatch, two_cores: None) -> None:
    assert threads.numbers() == [1, 2]
    torch.set_num_threads(8)
    assert threads.numbers() == [1, 4, 8]
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert threads.numbers() == [8]


def begun(short: dict, **more: object) -> dict:
    """The settings that a run ends up with."""
    vitkit.train(TrainConfig(**{**short, "steps": 2, "evaluations": 1, "baseline": "no", **more}))
    return json.loads((Path(str(more.get("out", short["out"]))) / "config.json").read_text())


def test_a_run_records_what_was_measured_and_a_resume_keeps_it(
    short: dict, monkeypatch: pytest.MonkeyPatch, two_cores: None
) -> None:
    monkeypatch.setattr(run, "by_threads", lambda *_: {1: 0.2, 2: 0.5})
    seen: list[int] = []

    class Told(Watcher):
        def step(self, *_: object) -> None:
            seen.append(torch.get_num_threads())

    config = TrainConfig(**{**short, "save_every": 0.0})
    run.train(config, watcher=Told())
    out = Path(short["out"])
    about = json.loads((out / "config.json").read_text())
    assert about["train"]["threads"] == 1
    assert about["train"]["costs"] == {"threads": {"1": 0.2, "2": 0.5}}
    assert any(line.startswith("threads: 1, as measured: 0.20 s with 1, 0.50 s with 2") for line in about["chosen"])
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2  # as it was
    whole = finished(out)
    monkeypatch.setattr(run, "by_threads", None)  # nothing is measured again
    seen.clear()
    run.train(TrainConfig(out=short["out"]), restart=True, watcher=Told())
    assert set(seen) == {1}
    assert finished(out) == whole


def test_what_was_asked_for_is_not_measured(
    short: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_cores: None
) -> None:
    monkeypatch.setattr(run, "by_threads", None)
    assert begun(short, threads=1)["train"]["threads"] == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert begun(short, out=str(tmp_path / "environment"))["train"]["threads"] == 2
    with pytest.raises(vitkit.VitkitError, match="threads=-1 must not be negative"):
        TrainConfig(threads=-1)


def test_steps_are_measured_without_a_trace(short: dict, monkeypatch: pytest.MonkeyPatch, two_cores: None) -> None:
    """Weights and random numbers are as if nothing had been measured: bit for bit those of a run told the number."""
    monkeypatch.setattr(threads, "fastest", lambda took: 1)
    measured = begun(short)
    assert set(measured["train"]["costs"]["threads"]) == {"1", "2"}
    one = (Path(short["out"]) / "model.safetensors").read_bytes()
    told = str(Path(short["out"]).with_name("told"))
    begun(short, out=told, threads=1)
    assert (Path(told) / "model.safetensors").read_bytes() == one


@pytest.mark.slow
def test_where_a_budget_chooses_the_size_the_smallest_is_measured(
    short: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_cores: None
) -> None:
    changes = {"depth": 2, "width": 32, "heads": 2, "mlp_width": 32, "channels": 1, "classes": 2}
    vitkit.save(vitkit.create("vit-8px/2", image_size=64, patch_size=4, **changes), tmp_path / "large.safetensors")
    sizes: list[object] = []

    def measured(config: TrainConfig, *_: object) -> dict[int, float]:
        sizes.append(config.image_size)
        return {1: 1.0, 2: 1.0}

    monkeypatch.setattr(run, "by_threads", measured)
    monkeypatch.setattr(budget, "measured", lambda *_: Costs(1e-5, 1e-5, 1e-6))
    for module in ("budget", "loop", "frozen"):
        monkeypatch.setattr(f"vitkit.training.{module}.time", Clock())
    settings = {"data": short["data"], "init": str(tmp_path / "large.safetensors"), "freeze": "backbone"}
    run.train(TrainConfig(**settings, out=short["out"], budget=4.0, baseline="no"), started=0.0)
    run.train(TrainConfig(**settings, out=short["out"] + "-2", baseline="no"))
    assert sizes == [(28, 28), None]


def test_the_number_of_one_process_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    device = torch.device("cpu")
    threads.apply(TrainConfig(threads=3), vitkit.world.World(0, 2, device))
    assert torch.get_num_threads() == 2
    threads.apply(TrainConfig(threads=3), vitkit.world.World(0, 1, device))
    assert torch.get_num_threads() == 3


def test_a_plan_is_for_the_faster_number(monkeypatch: pytest.MonkeyPatch, two_cores: None) -> None:
    def step(*_: object) -> object:
        return lambda: (1.0, 0.1) if torch.get_num_threads() == 1 else (3.0, 0.1)

    monkeypatch.setattr(estimate, "timed_step", step)
    setup = complete(Setup("mu", batch_size=8))
    found = estimate.measured_step(vitkit.create("mu").config, setup, seconds=0.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert found.total < 0.5 * estimate.measured_step(vitkit.create("mu").config, setup, seconds=0.0).total
    assert torch.get_num_threads() == 2


# --- while it runs -----------------------------------------------------------------------------------


class Run:
    """Steps that take what a table says for the number of threads."""

    def __init__(self, now: int, expected: float) -> None:
        self.number, self.said = now, list[str]()
        self.pace = Pace(now, [1, 2], expected, self.use)

    def use(self, number: int) -> None:
        self.number = number

    def steps(self, count: int, **seconds: float) -> int:
        """How many were made with two threads."""
        two = 0
        for _ in range(count):
            two += self.number == 2
            self.said.append(self.pace.note(seconds[f"with_{self.number}"]))
        return two


IDLE, BUSY = {"with_1": 1.0, "with_2": 0.6}, {"with_1": 1.0, "with_2": 2.6}


def test_a_neighbour_that_comes_and_goes() -> None:
    one = Run(2, expected=0.6)
    assert one.steps(1_000, **IDLE) == 1_000
    assert not any(one.said)  # nothing to say, nothing tried
    late = one.steps(WINDOW + 4 * TRIED + 200, **BUSY)
    assert one.pace.now == 1
    assert late <= WINDOW + 4 * TRIED  # to notice, to compare, and once more after a while
    assert [line for line in one.said if line] == [
        "threads: 1 from here on, in place of 2; a step takes 1.00 s with 1, 2.60 s with 2"
    ]
    one.steps(8 * AGAIN, **IDLE)
    assert one.pace.now == one.number == 2


def test_more_threads_are_tried_ever_less_often() -> None:
    one = Run(1, expected=1.0)
    assert one.steps(10_000, **BUSY) <= 14 * TRIED
    assert not any(one.said)


def test_steps_that_are_slow_with_any_number_are_named_once() -> None:
    one = Run(2, expected=0.1)
    one.steps(1_000, **IDLE)
    assert one.pace.now == 2
    said = [line for line in one.said if line]
    assert said == [
        "steps take 6.0 times as long as expected, by no fault of the threads: 1.00 s with 1, 0.60 s with 2"
    ]


def test_a_run_with_a_budget_switches_and_remembers_it(
    short: dict, monkeypatch: pytest.MonkeyPatch, two_cores: None
) -> None:
    """Measured with two threads at 1 ms a step, but steps take 30 ms with two and 10 ms with one."""
    clock = Clock()
    for module in ("budget", "loop"):
        monkeypatch.setattr(f"vitkit.training.{module}.time", clock)
    monkeypatch.setattr(run, "by_threads", lambda *_: {1: 2.0, 2: 1.0})
    monkeypatch.setattr(budget, "measured", lambda *_: Costs(1e-6, 1e-3, 1e-6))

    def slow(*_: object) -> float:
        clock.now += 0.03 if torch.get_num_threads() == 2 else 0.01
        return 1.0

    monkeypatch.setattr(run.Loop, "train_step", slow)
    notes: list[str] = []

    class Told(Watcher):
        def note(self, text: str) -> None:
            notes.append(text)

    config = TrainConfig(**{**short, "steps": 0, "budget": 8.0, "evaluations": 1, "baseline": "no"})
    run.train(config, started=0.0, watcher=Told())
    lines = [json.loads(line) for line in (Path(short["out"]) / "log.jsonl").read_text().splitlines()]
    used = [line["threads"] for line in lines if "threads" in line]
    assert (used[0], used[-1]) == (2, 1)
    assert any("threads: 1 from here on, in place of 2" in line for line in notes)
    state = torch.load(next((Path(short["out"]) / "checkpoints").glob("step-*")) / "state.pt", weights_only=True)
    assert state["threads"] == 1
    assert json.loads((Path(short["out"]) / "config.json").read_text())["train"]["threads"] == 2


# --- neighbours --------------------------------------------------------------------------------------


def test_what_others_take_is_what_is_busy_and_not_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [Used(0.0, 10.0, 1.0), Used(1.0, 12.0, 2.0), Used(10.0, 29.0, 10.0), Used(20.0, 41.0, 20.0)]
    monkeypatch.setattr(threads, "usable", lambda: {0, 1})
    one = Neighbours(iter(looks).__next__)
    assert one.missing() == 0.0  # too early to say
    assert one.missing() == 1.0  # 1.9 cores busy, 0.9 of them ours
    assert one.missing() == 0.0  # 1.2 busy, 0.2 of others: enough is left
    assert one.taken == 0.2
    assert Neighbours(lambda: None).missing() == 0.0  # the system does not tell


def test_the_kernel_is_read_as_it_writes() -> None:
    assert threads.busy_ticks(["cpu0", "10", "1", "5", "1000", "50", "2", "3", "4", "0", "0"]) == 25
    found = threads.used()
    if found is not None:
        assert found.cores > 0
    assert threads.ticks_of(None) == 0
    assert not Path("/proc/self/stat").exists() or threads.ticks_of(os.getpid()) >= 0


def test_the_view_and_doctor_say_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    PlainView().step(0.1, {"step": 1, "epoch": 0.0, "loss": 1.0, "lr": 0.1}, Rate(1.0, 8, 1.2))
    assert "img/s (other processes take 1.2 cores)" in capsys.readouterr().err
    monkeypatch.setattr(doctor, "CHECKS", {})
    for taken, said in ((1.2, True), (0.1, False)):
        monkeypatch.setattr(doctor, "taken_by_others", lambda taken=taken: taken)
        done = CliRunner().invoke(app, ["doctor"])
        assert ("other processes take 1.2 of" in done.output) == said
        assert "taken_by_others" in done.output
