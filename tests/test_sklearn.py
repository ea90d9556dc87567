"""`vitkit.sklearn` against scikit-learn itself: its own checks, its pipelines and searches."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import vitkit
from vitkit.errors import VitkitError
from vitkit.sklearn import ViTClassifier, ViTFeatures, ViTRegressor

SMALL = {"changes": {"depth": 1, "width": 32, "heads": 1, "mlp_width": 64}}
ROWS = {"epochs": 30, "batch_size": 64, "settings": SMALL, "image_shape": "pad", "random_state": 0}
QUICK = {"epochs": 2, "batch_size": 32, "settings": SMALL, "random_state": 0}
ROUNDED = "float32: a batch of another size is rounded differently in the last place (3e-7; the check allows 1e-7)"


def not_applicable(estimator: object) -> dict[str, str]:
    """Checks that image input, in float32, cannot pass; docs/sklearn.md states them."""
    names = ("check_methods_subset_invariance", "check_methods_sample_order_invariance")
    return dict.fromkeys(names, ROUNDED)


@pytest.mark.slow
@parametrize_with_checks(
    [ViTClassifier(**ROWS), ViTRegressor(**ROWS), ViTFeatures("conv+8px/2", image_shape="pad", random_state=0)],
    expected_failed_checks=not_applicable,
)
def test_scikit_learns_own_checks(estimator, check) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    found = load_digits(n_class=3)
    return found.images[:120], found.target[:120]  # N 8 8, values 0..16


@pytest.fixture(scope="module")
def fitted(digits) -> ViTClassifier:
    images, labels = digits
    words = np.array(["zero", "one", "two"])[labels]
    return ViTClassifier(epochs=10, batch_size=16, random_state=0, settings=SMALL).fit(images, words)


def test_a_classifier_learns_and_keeps_the_labels_as_they_are(digits, fitted) -> None:
    images, labels = digits
    assert fitted.classes_.tolist() == ["one", "two", "zero"]
    assert fitted.score(images, np.array(["zero", "one", "two"])[labels]) > 0.9
    assert fitted.predict_proba(images[:5]).sum(axis=1) == pytest.approx(np.ones(5), abs=1e-5)
    assert fitted.model_.class_names == ("one", "two", "zero")  # the model of vitkit, for everything else
    assert fitted.model_.config.channels == 1


def test_a_pickle_predicts_the_same_bits_and_holds_no_module(digits, fitted) -> None:
    content = pickle.dumps(fitted)
    assert b"nn.modules" not in content  # weights are the bytes of a .safetensors file
    assert (pickle.loads(content).predict_proba(digits[0]) == fitted.predict_proba(digits[0])).all()


def test_layouts_of_one_set_of_images_are_one(digits) -> None:
    grey = (digits[0] * 15).astype(np.uint8)
    layouts = [grey, grey[..., None], grey[:, None].repeat(1, axis=1), grey.reshape(len(grey), 64)]
    found = [ViTFeatures("conv+8px/2", random_state=0).fit(x).transform(x[:4]) for x in layouts[:1]]
    for x in (layouts[1], layouts[3]):
        assert (ViTFeatures("conv+8px/2", random_state=0).fit(x).transform(x[:4]) == found[0]).all()
    colour = np.random.default_rng(0).integers(0, 255, (6, 8, 10, 3), dtype=np.uint8)
    by_layout = [ViTFeatures("conv+8px/2", random_state=0).fit(x) for x in (colour, colour.transpose(0, 3, 1, 2))]
    rows = by_layout[0].transform(colour)
    assert (by_layout[1].transform(colour.transpose(0, 3, 1, 2)) == rows).all()
    flat = ViTFeatures("conv+8px/2", image_shape=(8, 10, 3), random_state=0).fit(colour.reshape(6, -1))
    assert (flat.transform(colour.reshape(6, -1)) == rows).all()


def test_paths_of_files(digits, tmp_path: Path) -> None:
    paths = []
    for i, image in enumerate(digits[0][:24]):
        Image.fromarray((image * 15).astype(np.uint8)).save(tmp_path / f"{i}.png")
        paths.append(tmp_path / f"{i}.png")
    made = ViTClassifier(**QUICK).fit(paths, digits[1][:24])
    assert made.predict(np.array([str(p) for p in paths[:3]])).shape == (3,)
    (tmp_path / "0.png").write_bytes(b"no image")
    with pytest.raises(VitkitError, match=r"0\.png cannot be read"):
        made.predict(paths)
    with pytest.raises(VitkitError, match="fitted on paths"):
        made.predict(digits[0])


def test_pipeline_grid_search_and_cross_validation(digits) -> None:
    images, labels = digits
    rows = images.reshape(len(images), -1)
    piped = make_pipeline(StandardScaler(), ViTClassifier(**QUICK))  # values of any sign
    search = GridSearchCV(piped, {"vitclassifier__lr": [1e-3, 5e-3]}, cv=2).fit(rows, labels)
    assert set(search.best_params_) == {"vitclassifier__lr"}
    linear = make_pipeline(ViTFeatures("conv+8px/2", random_state=0), LogisticRegression(max_iter=200))
    assert cross_val_score(linear, images, labels, cv=3).mean() > 0.5  # by random filters; chance is a third


def test_features_are_those_of_embed(digits, fitted, tmp_path: Path) -> None:
    vitkit.save(fitted.model_, tmp_path / "m.safetensors")
    grey = (digits[0][:5] * 15).astype(np.uint8)
    made = ViTFeatures(str(tmp_path / "m.safetensors")).fit(grey)
    assert (made.transform(grey) == vitkit.embed(fitted.model_, list(grey), runtime="eager")).all()
    assert made.get_feature_names_out()[0] == "vitfeatures0"


def test_a_regressor_learns_values_in_their_own_units(digits) -> None:
    images = digits[0]
    ink = images.mean(axis=(1, 2)) * 1000 + 5000
    made = ViTRegressor(epochs=10, batch_size=16, random_state=0, settings=SMALL).fit(images, ink)
    assert made.score(images, ink) > 0.5
    several = clone(made).set_params(epochs=1).fit(images, np.stack([ink, -ink], axis=1))
    assert several.predict(images[:3]).shape == (3, 2)


def test_part_of_the_images_chooses_the_weights(digits) -> None:
    made = ViTClassifier(**QUICK, validation_fraction=0.25).fit(*digits)
    assert made.predict(digits[0]).shape == (120,)


@pytest.mark.parametrize(
    ("estimator", "rows", "words"),
    [
        (ViTClassifier(), np.zeros((9, 50)), "no square images; give image_shape"),
        (ViTClassifier(image_shape=(4, 4)), np.zeros((9, 50)), r"image_shape=\(4, 4\) does not fit rows of 50"),
        (ViTClassifier(settings={"epochs": 3}), np.zeros((9, 64)), "settings holds epochs; give it by name"),
        (ViTClassifier(settings={"epoch": 3}), np.zeros((9, 64)), "no setting 'epoch'"),
        (ViTClassifier(validation_fraction=1.5), np.zeros((9, 64)), "must be at least 0 and below 1"),
        (ViTFeatures("conv+8px/2", features="tokens"), np.zeros((9, 64)), "choose cls or mean"),
        (ViTClassifier(), np.zeros((9, 2, 2, 2, 2)), "give N H W"),
    ],
)
def test_what_cannot_be_is_said(estimator, rows, words) -> None:
    with pytest.raises(ValueError, match=words):
        estimator.fit(rows, np.arange(9) % 2)
