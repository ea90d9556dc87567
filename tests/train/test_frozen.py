"""A head on a frozen backbone: features once, trained to convergence, at least as good as scikit-learn's."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV, RidgeCV

import vitkit
from peers import randomize
from train.test_runs import KILLER
from vitkit.data import open_data, preset
from vitkit.data.descriptor import describe
from vitkit.evaluation.features import features
from vitkit.evaluation.linear import FOLDS, Minimised, Ridge, fit, stratified
from vitkit.model.base import Outputs
from vitkit.tasks import Settings
from vitkit.tasks.classify import Classify, MultiLabel
from vitkit.tasks.regress import Regress
from vitkit.training.config import TrainConfig
from vitkit.training.log import read
from vitkit.training.result import Watcher
from vitkit.training.stopping import Stopped

CLASSES = Outputs("classes", tuple("0123456789"))


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.data))
    return data.data[order].astype(np.float32), data.target[order]


@pytest.fixture
def backbone(tmp_path: Path) -> str:
    """A small ViT with random weights: its features tell squares apart, as any do."""
    model = vitkit.create("vit-8px/2", depth=2, width=32, heads=2, mlp_width=32, channels=1, classes=2)
    randomize(model)
    vitkit.save(model, tmp_path / "backbone.safetensors")
    return str(tmp_path / "backbone.safetensors")


# --- the head ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("described", "less"),
    [pytest.param(True, 0.0, marks=pytest.mark.slow), (False, 0.004)],
    ids=["descriptor", "pixels"],
)
def test_the_head_is_as_good_as_scikit_learns(
    digits: tuple[np.ndarray, np.ndarray], described: bool, less: float
) -> None:
    """Of 1,497 digits; on pixels both choose from noisy folds: 0.4 points are one standard error of the difference."""
    x, y = digits
    if described:
        x = describe(torch.from_numpy(x * 15.9).to(torch.uint8).view(-1, 1, 8, 8)).numpy()
    head = fit(Classify(CLASSES, 10), torch.from_numpy(x[:300]), torch.from_numpy(y[:300]), y[:300])
    theirs = LogisticRegressionCV(max_iter=300, scoring="accuracy", l1_ratios=(0,), use_legacy_attributes=False)
    expected = theirs.fit(x[:300], y[:300]).score(x[300:], y[300:])
    assert (head(torch.from_numpy(x[300:])).argmax(dim=1).numpy() == y[300:]).mean() >= expected - less
    assert head.folds == FOLDS


def test_the_minimum_is_that_of_scikit_learn(digits: tuple[np.ndarray, np.ndarray]) -> None:
    """The objective is convex: at equal strength both reach one minimum. Theirs is C * sum of losses + |w|^2 / 2."""
    x, y = torch.from_numpy(digits[0][:300]).double() / 16, torch.from_numpy(digits[1][:300])
    ours = Minimised(Classify(CLASSES, 10), x, y, precise=True).at(0.01)
    theirs = LogisticRegression(C=1 / (0.01 * 300), tol=1e-9, max_iter=5000).fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(ours[:, :-1], theirs.coef_, atol=1e-4)  # both stop at a gradient of 1e-7 to 1e-9


def test_few_samples_have_that_minimum_too(digits: tuple[np.ndarray, np.ndarray]) -> None:
    """Of 50 samples with 64 features only the 50 dimensions that they span are searched; scikit-learn takes all 64."""
    x, y = digits[0][:50].astype(np.float64), digits[1][:50]
    head = fit(Classify(CLASSES, 10), torch.from_numpy(x), torch.from_numpy(y), y)
    ours = head(torch.from_numpy(digits[0])).numpy()
    mean, std = x.mean(axis=0), x.std(axis=0)
    scales = np.where(std > 1e-6, std, np.inf), np.full_like(std, np.sqrt((std**2).mean()))
    found = []
    for scale in scales:  # each feature by its own, or all by one: cross-validation chose
        theirs = LogisticRegression(C=1 / (head.strength * 50), tol=1e-10, max_iter=20_000).fit((x - mean) / scale, y)
        expected = theirs.decision_function((digits[0] - mean) / scale)
        apart = ours - ours.mean(axis=1, keepdims=True) - expected + expected.mean(axis=1, keepdims=True)
        found.append(np.abs(apart).max() / np.abs(expected).max())
    assert min(found) < 1e-4  # float32 weights, and where both stop


@pytest.mark.parametrize(("count", "width"), [(60, 8), (20, 40)])
def test_ridge_is_that_of_scikit_learn(count: int, width: int) -> None:
    random = np.random.default_rng(0)
    x, w = random.normal(size=(count, width)), random.normal(size=(width, 2))
    y = x @ w + 3 + random.normal(size=(count, 2))
    ours = Ridge(None, torch.from_numpy(x), torch.from_numpy(y)).at(0.1)
    theirs = RidgeCV([0.1 * count]).fit(x, y)  # the sum of squares, where ours is the mean
    np.testing.assert_allclose(ours[:, :-1], theirs.coef_, atol=1e-8)
    np.testing.assert_allclose(ours[:, -1], theirs.intercept_, atol=1e-8)


def test_several_labels_and_values_have_a_head(digits: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = torch.from_numpy(digits[0][:500]), digits[1][:500]
    labels = torch.from_numpy(np.stack([y % 2 == 0, y > 4], axis=1).astype(np.int64))
    task = MultiLabel(Outputs("labels", ("even", "large")), 2)
    head = fit(task, x[:400], labels[:400], y[:400])
    assert task.metrics(head(x[400:]), labels[400:])["map"] > 0.9
    ink = x.sum(dim=1, keepdim=True).double()
    task = Regress(Outputs("values", ("ink",), (300.0,), (60.0,)), 1, Settings(loss="mse"))
    head = fit(task, x[:400], ink[:400], np.zeros(400, dtype=np.int64))
    assert task.metrics(head(x[400:]), ink[400:])["r2"] > 0.999  # a linear function of the features


def test_folds_are_stratified_and_views_of_an_image_stay_together() -> None:
    groups = np.array([0] * 50 + [1] * 23 + [2] * 2)
    parts = stratified(groups)
    assert np.ptp(np.bincount(parts)) <= 1
    for group in (0, 1):
        counts = np.bincount(parts[groups == group], minlength=FOLDS)
        assert np.ptp(counts) <= 1


# --- the run -----------------------------------------------------------------------------------------


@pytest.fixture
def frozen(short: dict, backbone: str) -> dict:
    kept = {k: short[k] for k in ("data", "out")}
    return {**kept, "init": backbone, "freeze": "backbone"}


def test_a_frozen_run_is_an_ordinary_run(frozen: dict, command) -> None:
    result = vitkit.train(TrainConfig(**frozen))
    out = Path(frozen["out"])
    assert result.best["top1"] > 0.9
    about = json.loads((out / "config.json").read_text())
    assert about["train"]["head"] == "converge"
    assert any("computed once" in line for line in about["chosen"])
    assert (out / "best.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert json.loads((out / "result.json").read_text())["validation"] == result.validation
    assert (out / "curves.png").exists()
    evaluated = vitkit.evaluate(out, frozen["data"], split="val")
    assert evaluated.metrics["top1"] == result.validation["top1"]
    before, after = vitkit.load(frozen["init"]).state_dict(), vitkit.load(out).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.classifier.weight", "head.classifier.bias"}
    code, _, err = command("train", frozen["data"], "--out", out)
    assert (code, "already holds a run" in err) == (2, True)


class Counting(Watcher):
    def __init__(self) -> None:
        self.done: dict[str, int] = {}

    def update(self, what: str, done: float, total: float | None = None) -> None:
        if "features" in what:
            self.done[what] = self.done.get(what, 0) + 1


def test_features_are_computed_once_and_again_for_other_data(frozen: dict, tmp_path: Path) -> None:
    vitkit.train(TrainConfig(**frozen))
    first, again = Counting(), Counting()
    vitkit.train(TrainConfig(**frozen, views=0), resume=True, watcher=again)
    assert not again.done
    arrays = dict(np.load(frozen["data"]))
    arrays["x_train"][0] = 200
    other = tmp_path / "other.npz"
    np.savez(other, **arrays)
    config = json.loads((Path(frozen["out"]) / "config.json").read_text())
    config["train"]["data"] = str(other)
    (Path(frozen["out"]) / "config.json").write_text(json.dumps(config))
    settings = TrainConfig(**{**frozen, "data": str(other)})
    vitkit.train(settings, resume=True, accept_changed_data=True, watcher=first)
    assert first.done
    assert len(list((Path(frozen["out"]) / "features").iterdir())) == 1, "those of the other data are gone"


class Listening(Watcher):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def test_nothing_is_announced_that_is_not_done(frozen: dict) -> None:
    """Sizes of all splits, as `data check` has them; neither epochs nor an optimiser, which such a head has not."""
    heard = Listening()
    vitkit.train(TrainConfig(**frozen), watcher=heard)
    splits = open_data(frozen["data"]).splits
    named = ", ".join(f"{name} {count}" for name, count in splits.items())
    assert heard.lines[0].startswith(f"data: {sum(splits.values())} images ({named}) of about 8x8 pixels")
    assert not [line for line in heard.lines if line.startswith(("length:", "optimiser:"))]
    assert any("regularization" in line for line in heard.lines)


def test_augmented_views_are_asked_for(frozen: dict) -> None:
    vitkit.train(TrainConfig(**frozen, augment=preset("light", flip=0.0), epochs=3))
    kept = sorted(p.name for p in Path(frozen["out"]).glob("features/*/*.f32"))
    assert kept == ["train-0.f32", "train-1.f32", "train-2.f32", "val.f32"]
    one, two = (np.fromfile(next(Path(frozen["out"]).glob(f"features/*/train-{i}.f32")), np.float32) for i in (0, 1))
    assert np.abs(one - two).max() > 1e-3


@pytest.mark.parametrize("asked", [{"optimizer": "sgd", "steps": 3}, {"head": "steps", "steps": 3}])
def test_steps_on_request(frozen: dict, asked: dict) -> None:
    assert vitkit.train(TrainConfig(**frozen, **asked)).steps == 3
    assert not (Path(frozen["out"]) / "features").exists()


def test_two_classifiers_are_averaged(squares: str, tmp_path: Path) -> None:
    model = vitkit.create("vit-8px/2", depth=1, width=16, heads=2, channels=1, classes=2, distillation_token=True)
    randomize(model)
    vitkit.save(model, tmp_path / "two.safetensors")
    settings = {"data": squares, "init": str(tmp_path / "two.safetensors"), "freeze": "backbone"}
    result = vitkit.train(TrainConfig(**settings, out=str(tmp_path / "run")))
    assert vitkit.evaluate(tmp_path / "run", squares, split="val").metrics["top1"] == result.validation["top1"]


def digests(out: Path) -> list[str]:
    names = ("best.safetensors", "model.safetensors", "log.jsonl")
    return [hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names]


def test_a_pass_that_is_stopped_continues(frozen: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after a batch of many: the rest is computed later, the numbers are the same."""
    model, source = vitkit.load(frozen["init"]), open_data(frozen["data"]).split("train")
    whole = features(model, source, batch_size=16)
    path = Path(frozen["out"]) / "part.f32"
    calls = []

    def check() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise Stopped("enough")

    with pytest.raises(Stopped):
        features(model, source, path=path, check=check, batch_size=16)
    pooled = type(model).pooled
    monkeypatch.setattr(type(model), "pooled", lambda self, x: (calls.append(None), pooled(self, x))[1])
    calls.clear()
    resumed = features(model, source, path=path, batch_size=16)
    assert len(calls) == 4  # of six batches
    assert torch.equal(resumed.values, whole.values)


@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_same_bits(frozen: dict, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    settings = TrainConfig(**{**frozen, "augment": preset("light", flip=0.0), "views": 3})
    vitkit.train(settings.replace(out=str(tmp_path / "whole")))
    out = Path(settings.out)
    for wait in ("train-0.json", "train-2.json", "val.json", ""):
        mode = "resume" if (out / "config.json").exists() else "new"
        process = subprocess.Popen([sys.executable, "-c", KILLER, settings.to_json(), mode])
        deadline = time.monotonic() + 120
        while wait and process.poll() is None and time.monotonic() < deadline:
            if list(out.glob(f"features/*/{wait}")):
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        process.wait(timeout=240)
    assert digests(out) == digests(tmp_path / "whole")
    assert read(out / "log.jsonl")[-1]["val_top1"] > 0.9
