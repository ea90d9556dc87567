"""Baselines, forecasts and advice: each sentence follows from numbers, and changes when they do."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import RidgeClassifier

import vitkit
from train.test_runs import finished
from vitkit.data import open_data
from vitkit.data.descriptor import describe
from vitkit.model.base import Outputs
from vitkit.tasks.classify import Classify, MultiLabel
from vitkit.tasks.regress import Regress
from vitkit.training.advice import Curves, Seen, advise, few_images, forecast
from vitkit.training.baseline import Baseline, baseline, check_labels, compare, fit
from vitkit.training.baseline import _described as described
from vitkit.training.config import TrainConfig
from vitkit.training.live import PlainView, View

ACCURACY = Classify.score
CLASSES = Outputs("classes", tuple("0123456789"))


# --- forecast ----------------------------------------------------------------------------------------


def curve(rate: float, end: float, points: int, until: float, noise: float, seed: int) -> list[tuple[float, float]]:
    """Scores that approach their end, with the noise of a validation split."""
    random, x = np.random.default_rng(seed), np.linspace(until / points, until, points)
    y = end - 0.5 * (np.exp(-rate * x) - np.exp(-rate)) + noise * random.normal(size=points)
    return list(zip(x.tolist(), y.tolist(), strict=True))


def test_a_forecast_meets_a_planted_end() -> None:
    """The band is meant for four in five; of 120 planted curves three in four is two standard errors below."""
    inside, errors = 0, []
    for seed in range(120):
        rate, until = 2.0 + seed % 5, 0.4 + 0.1 * (seed % 4)
        ahead = forecast(curve(rate, 0.9, 8, until, 0.01, seed), most=1.0)
        assert ahead is not None
        inside += ahead.low <= 0.9 <= ahead.high
        errors.append(abs(ahead.expected - 0.9))
    assert inside / 120 >= 0.73
    assert np.median(errors) < 0.03


@given(st.floats(1.0, 8.0), st.floats(0.3, 0.99), st.floats(0.3, 0.95))
def test_a_forecast_lies_in_its_band_and_below_perfect(rate: float, end: float, until: float) -> None:
    ahead = forecast(curve(rate, end, 6, until, 0.005, 0), most=1.0)
    assert ahead is not None
    assert ahead.low <= ahead.expected <= ahead.high <= 1.0


def test_it_is_too_early_to_tell() -> None:
    assert forecast(curve(3.0, 0.9, 3, 0.6, 0.0, 0)) is None
    assert forecast(curve(3.0, 0.9, 8, 0.2, 0.0, 0)) is None
    assert forecast([(0.1 * n, float("nan")) for n in range(1, 9)]) is None
    assert forecast(curve(3.0, 0.9, 8, 1.0, 0.0, 0)) is None, "at the end nothing is left to forecast"


def test_more_evaluations_and_less_noise_narrow_the_band() -> None:
    wide, narrow = (forecast(curve(3.0, 0.9, 12, 0.8, noise, 1)) for noise in (0.03, 0.003))
    assert wide is not None
    assert narrow is not None
    assert narrow.high - narrow.low < wide.high - wide.low


def test_views_show_what_is_expected(capsys: pytest.CaptureFixture[str]) -> None:
    PlainView().expected("81.20% (79.50% to 83.00%)")
    assert "expected at the end: 81.20% (79.50% to 83.00%)" in capsys.readouterr().err
    view = View()
    view.expected("81%")
    assert view.ahead == "81%"


# --- advice ------------------------------------------------------------------------------------------

FLAT = tuple((n / 10, 0.80) for n in range(1, 11))
RISING = tuple((n / 10, 0.30 + 0.05 * n) for n in range(1, 11))
SIMPLE = Baseline("edges and colours", "top1", 0.5, 2000, 300, 1.0, ((500, 0.5), (1000, 0.5), (2000, 0.5)))
SEEN = Seen(ACCURACY, "photos", 50_000, 224, True, 1000, Curves(FLAT, (0.5, 0.5), (SIMPLE,)))


def first(seen: Seen) -> str:
    return (advise(seen) or [""])[0].partition(":")[0]


def test_nothing_stands_out() -> None:
    assert advise(SEEN) == []


def test_each_remedy_follows_from_its_numbers() -> None:
    way = SEEN.on_the_way
    assert first(replace(SEEN, on_the_way=way._replace(scores=RISING))) == "more time"
    steep = replace(SIMPLE, curve=((500, 0.4), (1000, 0.5), (2000, 0.6)))
    assert first(replace(SEEN, on_the_way=way._replace(baselines=(steep,)))) == "more data"
    assert first(replace(SEEN, on_the_way=way._replace(losses=(0.05, 0.9)))) == "more data"
    assert first(replace(SEEN, init=False, images=2_640)) == "a checkpoint"
    better = way._replace(baselines=(replace(SIMPLE, score=0.9),))
    assert first(replace(SEEN, on_the_way=better)) == "another checkpoint"
    noisy = replace(SIMPLE, doubtful=100, checked=1000, agreed=0.9)
    assert first(replace(SEEN, on_the_way=way._replace(baselines=(noisy,)))) == "cleaner labels"


@given(st.floats(0.0, 0.2), st.floats(0.0, 0.2))
def test_a_steeper_end_speaks_more_for_time(a: float, b: float) -> None:
    """And it is never said below what chance would give: two standard errors of 1,000 images."""

    def said(rise: float) -> bool:
        scores = tuple((n / 10, 0.7 + (rise * (n - 7) / 3 if n > 7 else 0.0)) for n in range(1, 11))
        return first(replace(SEEN, on_the_way=Curves(scores, (0.5, 0.5)))) == "more time"

    low, high = sorted((a, b))
    assert said(low) <= said(high)
    assert not said(0.01)
    assert said(0.2)


def test_numbers_are_in_the_sentences_and_the_largest_gain_comes_first() -> None:
    few = replace(SEEN, init=False, images=2_640, on_the_way=Curves(RISING, (0.05, 0.9), (replace(SIMPLE, score=0.9),)))
    lines = advise(few)
    assert [line.partition(":")[0] for line in lines] == ["a checkpoint", "more data", "more time"]
    assert "2,640 images" in lines[0]
    assert "90.00%" in lines[0], "the baseline is better than the model"
    assert "0.05 in training and 0.90 in validation" in lines[1]
    assert "from 67.50% to 80.00%" in lines[2]
    by_heart = few.on_the_way._replace(losses=(0.8, 0.9))
    assert first(replace(few, init=True, on_the_way=by_heart)) == "more time"


def test_few_photographs_and_many_small_images() -> None:
    assert "2,640 images are few" in few_images(2_640, 224)
    assert "--init" in few_images(2_640, 224)
    assert not few_images(2_640, 28)
    assert not few_images(100_000, 224)


# --- the baseline ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor, np.ndarray, torch.Tensor, torch.Tensor]:
    data = open_data("digits")
    train, val = data.split("train"), data.split("val")
    return (
        *(describe(train.pixels), torch.from_numpy(train.labels), train.groups),
        *(describe(val.pixels), torch.from_numpy(val.labels)),
    )


def test_the_map_is_as_good_as_scikit_learns(digits: tuple) -> None:
    """At the strength each finds best on the validation images: half a point is one of 180 images."""
    x, y, groups, v, wanted = digits
    outputs = fit(Classify(CLASSES, 10), x[:600], y[:600], groups[:600], 0)(v)
    ours = (outputs.argmax(dim=1) == wanted).double().mean().item()
    scale = x[:600].std(dim=0).clamp(min=1e-6)
    known, asked = (t / scale for t in (x[:600], v))
    theirs = [RidgeClassifier(alpha).fit(known, y[:600]).score(asked, wanted) for alpha in (1e1, 1e2, 1e3, 1e4)]
    assert ours >= max(theirs) - 0.006


def test_more_images_are_better_and_wrong_labels_are_counted(digits: tuple) -> None:
    x, y, groups, v, wanted = digits
    task = Classify(CLASSES, 10)
    found = compare(task, "edges", x[:800], y[:800], groups[:800], v, wanted)
    assert found is not None
    assert [count for count, _ in found.curve] == [200, 400, 800]
    assert found.curve[0][1] < found.curve[-1][1] == found.score
    assert Baseline.of(json.loads(json.dumps(found.to_dict()))) == found
    clean = check_labels(x[:800], y[:800].numpy(), task)
    wrong = y[:800].clone()
    wrong[::10] = (wrong[::10] + 1) % 10
    noisy = check_labels(x[:800], wrong.numpy(), task)
    assert clean[0] / 800 < 0.02
    assert 0.06 < noisy[0] / 800 < 0.14
    assert noisy[2] < clean[2]


def test_labels_and_values_have_a_baseline(digits: tuple) -> None:
    x, y, groups, v, wanted = digits
    both = lambda y: torch.stack([y % 2 == 0, y > 4], dim=1).long()  # noqa: E731
    task = MultiLabel(Outputs("labels", ("even", "large")), 2)
    found = compare(task, "edges", x[:400], both(y[:400]), groups[:400], v, both(wanted))
    assert found is not None
    assert found.score > 0.9
    values = Regress(Outputs("values", ("digit",), (4.5,), (2.9,)), 1)
    number = lambda y: y[:, None].double()  # noqa: E731
    found = compare(values, "edges", x[:800], number(y[:800]), np.zeros(800, dtype=np.int64), v, number(wanted))
    assert found is not None
    assert found.key == "r2"
    assert found.score > 0.6


class Slow:
    """A second for every image that is described."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def describe(self, source, rows):
        self.now += len(rows)
        return described(source, rows)


@pytest.mark.parametrize(("seconds", "learned"), [(1e6, 1467), (1100.0, 1467 // 4), (100.0, None)])
def test_fewer_images_where_they_are_slow(monkeypatch: pytest.MonkeyPatch, seconds: float, learned: int | None) -> None:
    clock, data = Slow(), open_data("digits")
    monkeypatch.setattr("vitkit.training.baseline.time", clock)
    train, val = data.split("train"), data.split("val")
    found = baseline(Classify(CLASSES, 10), train, val, clock.describe, "edges", seconds)
    assert (None if found is None else found.learned_from) == learned
    assert clock.now <= max(seconds, 64)


def test_a_run_has_a_baseline_that_changes_no_bit_of_it(short: dict, tmp_path: Path, command) -> None:
    ends = []
    for name in ("yes", "no"):
        result = vitkit.train(TrainConfig(**{**short, "out": str(tmp_path / name), "baseline": name}))
        ends.append(finished(tmp_path / name))
        kept = json.loads((tmp_path / name / "result.json").read_text())
        assert len(kept["baseline"]) == len(result.baseline) == (name == "yes")
        assert any("baseline" in row[0] for row in result.rows()) == (name == "yes")
    assert ends[0] == ends[1]
    (one,) = json.loads((tmp_path / "yes" / "result.json").read_text())["baseline"]
    assert one["score"] > 0.9
    assert one["evaluated"] == 32
    vitkit.train(TrainConfig(out=str(tmp_path / "yes")), resume=True)
    again = json.loads((tmp_path / "yes" / "result.json").read_text())["baseline"]
    assert again == [one], "a resumed run keeps it"
