"""A budget is kept: the rules by made-up costs, and runs that remember what was chosen."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vitkit
from peers import randomize
from train.test_frozen import digests
from train.test_runs import KILLER, Clock
from vitkit import world as worlds
from vitkit.data import open_data, preset
from vitkit.data.dataset import Dataset
from vitkit.data.order import stratified_order, stratified_part
from vitkit.data.sources.arrays import from_arrays
from vitkit.errors import ConfigError
from vitkit.evaluation.features import features
from vitkit.model import zoo
from vitkit.model.summary import summarize
from vitkit.training import budget, costs, run
from vitkit.training.budget import Chooser, Wanted, cut_features, cut_steps
from vitkit.training.config import TrainConfig
from vitkit.training.costs import Costs
from vitkit.training.loop import ending
from vitkit.training.parts import open_init, task_for
from vitkit.training.recipe import choose_augmentation, complete
from vitkit.training.result import Watcher

PHOTOS = Wanted(budget=120.0, train=2_640, validation=330, test=330, batch=32)
CHEAP = Costs(image=1e-3, update=1e-3, evaluated=3e-4)
DEAR = Costs(image=3.0, update=0.05, evaluated=1.0)  # a ViT-S/14 at 518 pixels on two cores


# --- the rules ---------------------------------------------------------------------------------------


def test_what_fits_is_left_as_it_is() -> None:
    cut = cut_steps(PHOTOS, CHEAP, spent=5.0)
    assert (cut.validation, cut.test, cut.batch) == (330, 330, 32)
    assert cut.evaluations >= 3
    assert cut.whole


@given(
    image=st.floats(1e-5, 1.0),
    ratio=st.floats(0.1, 1.0),
    spent=st.floats(0.0, 20.0),
    seconds=st.sampled_from([60.0, 120.0, 600.0]),
    images=st.integers(100, 50_000),
)
def test_validation_takes_a_tenth_and_learning_seven(
    image: float, ratio: float, spent: float, seconds: float, images: int
) -> None:
    wanted = replace(PHOTOS, budget=seconds, train=images, validation=images // 10, test=images // 5)
    costs = Costs(image, 1e-3, image * ratio)
    cut = cut_steps(wanted, costs, spent)
    least = budget.LEAST_IMAGES * costs.evaluated
    assert cut.evaluations * cut.validation * costs.evaluated <= 0.1 * seconds + least + 1e-6
    if spent + ending(spent) < 0.2 * seconds:  # else starting up has taken what evaluation could have had
        assert cut.learning >= 0.7 * seconds - 2 * least - 1e-6
    total = spent + ending(spent) + cut.learning + (cut.evaluations * cut.validation + cut.test) * costs.evaluated
    assert total == pytest.approx(seconds)
    assert cut.test == wanted.test or cut.test < wanted.test


def test_more_evaluations_than_there_is_time_for_are_smaller_ones() -> None:
    few, many = (cut_steps(replace(PHOTOS, evaluations=n), Costs(0.1, 0, 0.03), 5.0) for n in (2, 20))
    assert few.evaluations == 2
    assert many.evaluations == 20
    assert few.validation > many.validation


def test_slow_steps_get_small_batches_unless_the_batch_was_asked_for() -> None:
    costs = Costs(0.2, 0.0, 0.05)
    cut = cut_steps(PHOTOS, costs, 5.0)
    assert cut.batch < 32
    assert cut.learning >= budget.STEPS * costs.step(cut.batch) or cut.batch == budget.LEAST_BATCH
    assert cut_steps(replace(PHOTOS, batch_is_fixed=True), costs, 5.0).batch == 32


def test_features_of_a_part_only_where_all_do_not_fit() -> None:
    frozen = replace(PHOTOS, views=1)
    assert cut_features(frozen, Costs(0, 0, 0.02, 1e-3), 5.0).whole
    cut = cut_features(frozen, DEAR, 5.0)
    assert not cut.whole
    assert cut.train + cut.validation + cut.test <= 120 - 5 - ending(5.0)
    assert cut.train > 4 * cut.validation


# --- the image size ----------------------------------------------------------------------------------

S14 = zoo.config("vit-s/16", patch_size=14, image_size=518)


class Measured:
    """Costs in proportion to the multiply-adds, as a machine of so many seconds for the own size would have them."""

    def __init__(self, own: float, dearer: float = 1.0) -> None:
        self.own, self.dearer, self.asked = own, dearer, list[tuple[int, int]]()

    def __call__(self, config: TrainConfig) -> Costs:
        size = config.image_size or S14.image_size
        self.asked.append(size)
        share = budget.work(S14, size) / budget.work(S14, S14.image_size)
        share *= 1 + (self.dearer - 1) * size[0] / 518
        return Costs(3 * self.own * share, 0.01, self.own * share)


def chosen(measure: Measured, seconds: float, images: int, frozen: bool = False) -> tuple[int, int]:
    views = 1 if frozen else 0
    wanted = Wanted(seconds, images, images // 8, images // 8, 32, views=views)
    config = TrainConfig(budget=seconds, freeze="backbone", head="converge") if frozen else TrainConfig(budget=seconds)
    return Chooser(config, wanted, measure, lambda: 8.0, S14).size() or (0, 0)


def test_the_size_follows_budget_images_and_machine() -> None:
    assert chosen(Measured(1e-4), 120.0, 245) == (518, 518)
    sides = [chosen(Measured(1.0), seconds, 245)[0] for seconds in (60.0, 120.0, 600.0, 3600.0)]
    assert sides == sorted(sides)
    assert len(set(sides)) > 2
    assert all(side % 14 == 0 and side >= 98 for side in sides)
    assert chosen(Measured(1.0), 600.0, 245)[0] > chosen(Measured(1.0), 600.0, 2_640)[0]
    assert chosen(Measured(1.0), 120.0, 2_640, frozen=True)[0] > chosen(Measured(1.0), 120.0, 2_640)[0] == 98


def test_what_is_chosen_was_measured_and_few_sizes_are() -> None:
    plain, dearer = Measured(0.3), Measured(0.3, dearer=3.0)  # large images cost more than their multiply-adds say
    side = chosen(plain, 600.0, 300)
    assert plain.asked[-1] == side
    less = chosen(dearer, 600.0, 300)
    assert less < side
    assert len(dearer.asked) < 6


def test_the_smallest_size_has_seven_patches() -> None:
    assert budget.sizes_of(S14)[-1] == (98, 98)
    assert budget.sizes_of(zoo.config("vit-8px/2")) == [(8, 8)]
    wide = budget.sizes_of(zoo.config("vit-s/16", image_size=(224, 448)))
    assert (wide[0], wide[-1]) == ((224, 448), (112, 224))


# --- stratified parts --------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=10, max_size=200), st.integers(0, 3))
def test_every_beginning_has_each_class_with_its_share(groups: list[int], seed: int) -> None:
    labels = np.array(groups)
    order = stratified_order(labels, seed)
    assert sorted(order) == list(range(len(labels)))
    for count in (len(labels) // 3, len(labels) // 2):
        share = np.bincount(labels[order[:count]], minlength=5) - count * np.bincount(labels, minlength=5) / len(labels)
        assert np.abs(share).max() <= 5 / 2 + 1e-9  # half an image for each class that could round the other way


def test_a_part_of_a_split_is_always_the_same() -> None:
    source = open_data("digits").split("val")
    one, two = (stratified_part(source, 40, seed=3) for _ in range(2))
    assert len(one) == 40
    assert torch.equal(one.pixels, two.pixels)
    assert stratified_part(source, 0) is source
    assert stratified_part(source, 10_000) is source


# --- measuring ---------------------------------------------------------------------------------------


class Seconds:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("each", "most", "runs"), [(0.01, 64, [1, 4, 16, 16]), (5.0, 64, [1]), (1e-6, 8, [1, 4, 8, 8])]
)
def test_an_image_is_timed_with_as_few_as_will_do(
    monkeypatch: pytest.MonkeyPatch, each: float, most: int, runs: list[int]
) -> None:
    clock, seen = Seconds(), []
    monkeypatch.setattr(costs, "time", clock)

    def work(count: int) -> None:
        seen.append(count)
        clock.now += count * each

    assert costs.per_image(work, most, enough=0.1) == pytest.approx(each)
    assert seen == runs


def test_costs_are_measured_without_a_trace(short: dict, tmp_path: Path) -> None:
    """Neither weights nor random numbers nor files of the run know of it."""
    world, data = worlds.join(), open_data(short["data"])
    vitkit.save(vitkit.create("vit-8px/2", **short["changes"]), tmp_path / "init.safetensors")
    config = TrainConfig(
        **{**short, "model": "", "init": str(tmp_path / "init.safetensors"), "steps": 0, "budget": 60.0}
    )
    init = open_init(config)
    assert init is not None
    config, _ = complete(config, data, world, init.config)
    state, weights = torch.random.get_rng_state(), {name: t.clone() for name, t in init.tensors.items()}
    found = budget.measured(config, data, world, init)
    assert all(cost > 0 for cost in found[:3])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(init.tensors[name], weight) for name, weight in weights.items())
    assert not Path(short["out"]).exists()


# --- runs --------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """One for all that looks at the time: no run here depends on how busy the machine is."""
    one = Clock()
    for module in ("budget", "loop", "frozen"):
        monkeypatch.setattr(f"vitkit.training.{module}.time", one)
    return one


@pytest.mark.usefixtures("clock")
def test_a_run_says_what_it_left_out_and_remembers_it(short: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, fixed = [], Costs(1e-3, 1e-4, 0.02, 1e-5)  # at which not all of 32 validation images are affordable
    monkeypatch.setattr(budget, "measured", lambda *_: fixed)

    class Told(Watcher):
        def note(self, text: str) -> None:
            notes.append(text)

    config = TrainConfig(**{**short, "steps": 0, "budget": 4.0, "evaluations": 1, "baseline": "no"})
    result = run.train(config, started=0.0, watcher=Told())
    out = Path(short["out"])
    about, kept = (json.loads((out / name).read_text()) for name in ("config.json", "result.json"))
    count = about["train"]["validation_images"]
    assert 0 < count < 32
    assert kept["images"]["validation"] == [count, 32]
    assert any(f"validation: {count} of 32 images" in line for line in notes)
    assert about["train"]["costs"]["evaluated image"] == fixed.evaluated
    assert f"{count} of 32 images" in str(result.rows())


def test_a_budget_that_cannot_be_kept_says_which_can(short: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "measured", lambda *_: DEAR)
    monkeypatch.setattr(budget, "time", Seconds())
    config = TrainConfig(**{**short, "steps": 0, "budget": 30.0, "evaluations": 0})
    with pytest.raises(ConfigError, match="--budget 30s cannot be kept") as error:
        run.train(config, started=0.0)
    assert not (Path(short["out"]) / "config.json").exists()
    nearest = str(error.value).rpartition("--budget ")[2].split(",")[0]
    enough = config.replace(budget=vitkit.training.config.parse_duration(nearest))
    assert cut_steps(Wanted(enough.budget, 96, 32, 0, 16, batch_is_fixed=True), DEAR, 1.0).needs < enough.budget


@pytest.fixture
def large(tmp_path: Path) -> str:
    """A checkpoint for 64 pixels."""
    changes = {"depth": 2, "width": 32, "heads": 2, "mlp_width": 32, "channels": 1, "classes": 2}
    model = vitkit.create("vit-8px/2", image_size=64, patch_size=4, **changes)
    randomize(model)
    vitkit.save(model, tmp_path / "large.safetensors")
    return str(tmp_path / "large.safetensors")


def sized(config: TrainConfig, *_: object) -> Costs:
    side = (config.image_size or (64, 64))[0]
    return Costs(2e-6 * side**2, 1e-4, 1e-6 * side**2)


def test_a_smaller_size_is_chosen_and_explained(
    short: dict, large: str, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "measured", sized)
    settings = {**short, "model": "", "changes": {}, "init": large, "steps": 0, "baseline": "no", "evaluations": 0}
    config = TrainConfig(**settings, budget=5.0)
    result = run.train(config, started=0.0)
    about = json.loads((Path(short["out"]) / "config.json").read_text())
    side = about["train"]["image_size"][0]
    assert 28 <= side < 64
    assert result.model.config.image_size == (side, side)
    (line,) = [line for line in about["chosen"] if line.startswith("image size")]
    assert f"{side}x{side}" in line
    assert "64x64" in line
    asked = config.replace(out=str(tmp_path / "asked"), image_size=(64, 64))
    assert run.train(asked, started=clock.now).model.config.image_size == (64, 64)


def colours(count: int) -> Dataset:
    """Noise of 32 pixels in two classes."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
    return from_arrays("noise", {"train": (pixels, np.arange(count) % 2)}, ["a", "b"])


@pytest.mark.parametrize(
    ("seconds", "expected", "measured"),
    [
        (60.0, "hybrid-32px/8", 1),
        (350.0, "hybrid-32px/8", 2),
        (500.0, "hybrid-32px/8-m", 3),
        (2000.0, "hybrid-32px/8-l", 3),
    ],
)
def test_the_largest_model_that_sees_every_image_often_enough(seconds: float, expected: str, measured: int) -> None:
    """By made-up costs: a second for 100 million multiply-adds, of a set of 600 images."""
    data, world, asked = colours(600), worlds.join(), TrainConfig(data="noise", budget=seconds, baseline="no")

    tried = set()

    def measure(config: TrainConfig) -> Costs:
        tried.add(config.model)
        gmacs = summarize(zoo.config(config.model))["gmacs"]
        return Costs(image=10 * gmacs / 6, update=0.0, evaluated=gmacs / 10)

    config, reasons = complete(asked, data, world, None)
    config, reasons = budget.keep(asked, config, reasons, data, world, None, time.monotonic(), measure=measure)
    assert config.model == expected
    assert len(tried) == measured  # no model is where a smaller one sees images too seldom
    (line,) = [line for line in reasons if line.startswith("model: ")]
    assert line.startswith(f"model: {expected}, ")
    assert ("a larger one" in line) == (expected != "hybrid-32px/8")
    asked = asked.replace(model="mu")
    named, reasons = complete(asked, data, world, None)
    config, _ = budget.keep(asked, named, reasons, data, world, None, time.monotonic(), measure=measure)
    assert config.model == "mu"


def test_features_stop_when_the_time_is_over_and_stay_so(squares: str, large: str, tmp_path: Path) -> None:
    model, source = vitkit.load(large, image_size=16), open_data(squares).split("train")
    asked = []

    def enough() -> bool:
        asked.append(None)
        return len(asked) == 2

    path = tmp_path / "train.f32"
    some = features(model, source, path=path, enough=enough, batch_size=16)
    assert some.indices.tolist() == list(range(32))
    again = features(model, source, path=path, batch_size=16)
    assert torch.equal(again.values, some.values)


def test_a_frozen_run_resumes_with_what_was_chosen(
    short: dict, large: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after its features: the same size, the same images, the same bits; nothing is measured again."""
    monkeypatch.setattr(budget, "measured", sized)
    kept = {k: short[k] for k in ("data", "out")}
    config = TrainConfig(**kept, init=large, freeze="backbone", budget=3.2)
    run.train(config, started=0.0)
    whole, out = digests(Path(config.out)), Path(config.out)
    about = (out / "config.json").read_text()
    assert json.loads(about)["train"]["image_size"][0] < 64
    for name in ("best.safetensors", "model.safetensors", "log.jsonl", "result.json"):
        (out / name).unlink()
    monkeypatch.setattr(budget, "measured", None)
    run.train(TrainConfig(out=config.out), resume=True, started=clock.now)
    assert digests(out) == whole
    assert (out / "config.json").read_text() == about


@pytest.mark.slow
def test_killed_and_resumed_a_budget_run_continues_with_the_recorded_choices(short: dict) -> None:
    """kill -9 in the middle; the clock decides where such a run ends, its configuration does not change."""
    settings = TrainConfig(**{**short, "steps": 0, "budget": 25.0, "save_every": 0.01, "evaluations": 0})
    out = Path(settings.out)
    process = subprocess.Popen([sys.executable, "-c", KILLER, settings.to_json(), "new"])
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and not list(out.glob("checkpoints/step-*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    about = (out / "config.json").read_text()
    done = subprocess.run([sys.executable, "-c", KILLER, settings.to_json(), "resume"], check=False)
    assert done.returncode == 0
    assert (out / "config.json").read_text() == about
    assert json.loads((out / "result.json").read_text())["images"]["validation"][1] == 32


@pytest.mark.parametrize(
    ("passes", "pixels", "fine", "name"),
    [
        (1.2, 96, False, "none"),
        (1.2, 8, True, "none"),
        (20, 96, False, "light"),
        (300, 96, False, "medium"),
        (300, 8, False, "light"),
        (300, 96, True, "light"),
        (0.0, 96, False, "light"),
    ],
)
def test_augmentation_follows_from_how_often_images_are_seen(
    passes: float, pixels: int, fine: bool, name: str, tmp_path: Path
) -> None:
    images = np.random.default_rng(0).integers(0, 255, (40, pixels, pixels, 3), dtype=np.uint8)
    np.savez(tmp_path / "some.npz", x_train=images, y_train=np.arange(40) % 4)
    source = open_data(str(tmp_path / "some.npz")).split("train")
    asked = TrainConfig(init="x" if fine else None)
    reasons: list[str] = []
    chosen = choose_augmentation(asked, task_for(asked, source), source, reasons, passes)["augment"]
    smoothing = 0.0 if fine else 0.1
    assert chosen == preset(name, smoothing=smoothing)
    assert reasons[0].startswith(f"augmentation: {name}")
    if passes:
        assert f"{passes:.3g} passes over {len(source)} images of 4 classes" in reasons[0]
