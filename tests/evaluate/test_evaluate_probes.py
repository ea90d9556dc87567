"""Probes: nearest neighbours and few-shot least squares, against scikit-learn and by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier

import vitkit
from evaluate.subjects import CONFIG, in_memory
from peers import randomize
from vitkit.data import open_data
from vitkit.errors import ConfigError
from vitkit.evaluation import fewshot, knn
from vitkit.evaluation.probes import BIAS, L2, draw_shots, features, knn_votes, least_squares, linear


def clouds(count: int, classes: int, seed: int, width: int = 6) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, count)
    centres = np.random.default_rng(0).normal(0, 1, (classes, width))
    return (centres[labels] + random.normal(0, 0.7, (count, width))).astype(np.float32), labels


@given(st.integers(0, 1000), st.integers(1, 20), st.integers(2, 5))
def test_votes_are_those_of_scikit_learn(seed: int, k: int, classes: int) -> None:
    (x, y), (z, _) = clouds(40, classes, seed), clouds(25, classes, seed + 1)
    y[:classes] = np.arange(classes)  # every class occurs
    theirs = KNeighborsClassifier(k, weights=lambda d: np.exp((1 - d) / 0.07), metric="cosine", algorithm="brute")
    expected = theirs.fit(x, y).predict_proba(z)
    ours = knn_votes(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(z), classes, k).numpy()
    np.testing.assert_allclose(ours / ours.sum(axis=1, keepdims=True), expected, atol=1e-4)


def test_votes_do_not_depend_on_the_size_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, z = (torch.from_numpy(v) for v in (*clouds(40, 3, 0), clouds(25, 3, 1)[0]))
    whole = knn_votes(x, y, z, 3, 20)
    monkeypatch.setattr("vitkit.evaluation.probes._SIMILARITIES_AT_ONCE", 120)
    np.testing.assert_allclose(knn_votes(x, y, z, 3, 20), whole, rtol=1e-4)


@pytest.mark.parametrize(("count", "width"), [(40, 6), (8, 30)])
def test_least_squares_is_ridge_regression(count: int, width: int) -> None:
    """More samples than features, and the other way round."""
    (x, y), (z, _) = clouds(count, 3, 0, width), clouds(25, 3, 1, width)
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
    x_, z_ = (np.pad((v - mean) / std, ((0, 0), (0, 1)), constant_values=BIAS) for v in (x, z))
    expected = Ridge(L2, fit_intercept=False).fit(x_, 2 * np.eye(3)[y] - 1).predict(z_)
    x, y, z = (torch.from_numpy(v) for v in (x, y, z))
    np.testing.assert_allclose(least_squares(x, y, z, 3), expected, atol=1e-4)


def test_shots_are_drawn_evenly_and_a_small_class_gives_all_it_has() -> None:
    labels = np.array([0] * 20 + [1] * 3 + [3] * 9)
    drawn = draw_shots(labels, 4, 5, seed=0)
    assert [len(d) for d in drawn] == [5, 3, 0, 5]
    assert all((labels[d] == c).all() for c, d in enumerate(drawn))
    assert not np.array_equal(drawn[0], draw_shots(labels, 4, 5, seed=1)[0])


def test_the_representation_is_what_the_classifier_sees() -> None:
    source = in_memory(9)
    for changes in ({}, {"distillation_token": True}, {"pooling": "mean"}, {"pre_logits": 5}, {"classes": 0}):
        model = randomize(vitkit.create(CONFIG.replace(**changes)))
        found = features(model, source, batch_size=4).values
        headless = vitkit.create(CONFIG.replace(**{**changes, "classes": 0})).eval()
        headless.load_state_dict({k: v for k, v in model.state_dict().items() if k in headless.state_dict()})
        with torch.inference_mode():
            images = source.pixels.float().div(255).sub(0.5).div(0.5)
            torch.testing.assert_close(found, headless(images), atol=1e-5, rtol=1e-5)


def test_of_a_cnn_too() -> None:
    from vitkit.model.config import ResNetConfig, StemConfig

    config = ResNetConfig(image_size=8, channels=1, classes=4, stem=StemConfig((1, 1), 4, "small"))
    model = randomize(vitkit.create(config))
    found = features(model, in_memory(5)).values
    assert found.shape == (5, config.stem.out_channels)
    scored = found @ model.head.weight.detach().T + model.head.bias.detach()
    with torch.inference_mode():
        images = in_memory(5).pixels.float().div(255).sub(0.5).div(0.5)
        torch.testing.assert_close(scored, model(images), atol=1e-4, rtol=1e-4)


def test_digits_are_recognised_by_an_untrained_model_far_above_chance() -> None:
    """Random features of tiny images still tell digits apart, if nothing is mixed up on the way."""
    model = vitkit.create(CONFIG.replace(classes=0, pooling="mean", patch_size=8, width=64))
    train, test = open_data("digits").split("train"), open_data("digits").split("test")
    near = knn(model, train, test)
    assert near.accuracy["top1"] > 0.9
    assert near.accuracy["top1"] <= near.accuracy["top5"] <= 1
    few = fewshot(model, train, test)
    assert few.accuracy.keys() == {"5", "10"}
    assert 0.5 < few.accuracy["5"] < few.accuracy["10"]
    assert few.learned_from <= 3 * 10 * 10
    assert few.to_dict()["settings"] == {"shots": [5, 10], "seeds": 3, "l2": 1024.0}


def test_unreadable_images_are_left_out(tmp_path: Path) -> None:
    from data.making import write_folder

    root = write_folder(tmp_path / "photos", {"train/cats": 12, "train/dogs": 12, "test/cats": 4, "test/dogs": 4})
    for name in ("train/cats/001.jpg", "train/dogs/011.jpg", "test/dogs/002.jpg"):
        (root / name).write_bytes(b"")
    model = randomize(vitkit.create(CONFIG.replace(classes=0, channels=3)))
    train, test = open_data(root).split("train+val"), open_data(root).split("test")
    for probe in (knn(model, train, test), fewshot(model, train, test, shots=(2, 12))):
        assert {Path(b.path).name for b in probe.bad_files} == {"001.jpg", "011.jpg", "002.jpg"}
        assert (probe.samples, probe.learned_from) == (7, 22)


def test_a_subset_gives_the_chosen_samples() -> None:
    whole = in_memory(20)
    some = whole.take(np.array([3, 11, 17]))
    assert [some.where(i) for i in range(3)] == ["made up[3]", "made up[11]", "made up[17]"]
    assert torch.equal(some.pixels, whole.pixels[[3, 11, 17]])
    assert some.labels.tolist() == whole.labels[[3, 11, 17]].tolist()


def test_several_labels_cannot_be_probed() -> None:
    source = in_memory(several=True)
    for probe in (knn, fewshot):
        with pytest.raises(ConfigError, match="one class per image"):
            probe(vitkit.create(CONFIG), source, source)


def test_the_linear_probe_tells_planted_classes_apart() -> None:
    """Bright and dark images: a line tells them apart in the features of any model."""
    source = in_memory(60, ("dark", "bright"))
    source.pixels = source.pixels // 3 + 120 * torch.from_numpy(source.labels)[:, None, None, None].to(torch.uint8)
    train, test = (source.take(rows) for rows in np.split(np.arange(60), [40]))
    found = linear(randomize(vitkit.create(CONFIG)), train, test)
    assert found.accuracy["top1"] == 1
    assert (found.learned_from, found.samples) == (40, 20)
