"""The verdict of pre-training: what counts as learning, as a collapse, and as neither."""

import numpy as np
import pytest
import torch

from vitkit.model.base import Outputs
from vitkit.tasks.pretraining import health
from vitkit.tasks.pretraining.dino import Dino
from vitkit.tasks.pretraining.lejepa import LejepaMethod
from vitkit.tasks.pretraining.mae import Mae
from vitkit.tasks.pretraining.method import RETRIEVAL, Method

START = {"knn": 0.3, "linear": 0.4, "pixel_knn": 0.25, "pixel_linear": 0.3, "retrieval": 0.3, "pixel_retrieval": 0.2}
START |= {"rank": 20.0, "spread": 0.3, "images": 1000.0}


def method(kind: type[Method] = Mae, labelled: bool = True) -> Method:
    found = kind(Outputs(), 0)
    found.classes = 10 if labelled else 0
    if not labelled:
        found.score = RETRIEVAL
    return found


def verdict(changes: dict[str, float], kind: type[Method] = Mae, labelled: bool = True, **start: float) -> str:
    return method(kind, labelled).verdict({**START, **start}, {**START, **changes})


@pytest.mark.parametrize("key", ["knn", "linear"])
def test_learning_is_better_than_chance_allows(key: str) -> None:
    """Of 1,000 images an accuracy of 30% has a standard error of 1.45%, a difference of two one of 2.1%."""
    assert verdict({key: START[key] + 0.08}).startswith("learning: k-NN accuracy")
    assert verdict({key: START[key] + 0.03}).startswith("not better than its start")
    assert verdict({key: START[key] + 0.08, "images": 100.0}).startswith("not better than its start")


def test_a_loss_of_accuracy_is_said() -> None:
    assert "It is worse." in verdict({"knn": 0.2})
    assert "It is worse." not in verdict({"knn": 0.29})


def test_learning_below_raw_pixels_is_said() -> None:
    assert "Raw pixels still do better" not in verdict({"knn": 0.5})
    assert "Raw pixels still do better" in verdict({"knn": 0.5, "pixel_knn": 0.9, "pixel_linear": 0.9})


def test_a_test_that_all_pass_before_the_first_step_shows_nothing() -> None:
    """Where random weights find all images already, finding all of them is no proof of learning."""
    said = verdict({"retrieval": 1.0}, labelled=False, retrieval=1.0)
    assert said.startswith("not better than its start")
    assert "no test left room for more" in said
    assert verdict({"retrieval": 0.5}, labelled=False).startswith("learning: accuracy of finding an image")


def test_a_collapse_is_measured_from_the_start() -> None:
    """Few images allow only a low rank, and fresh weights only a small spread: neither is a collapse by itself."""
    assert verdict({"rank": 3.0, "knn": 0.28}).startswith("collapsed: the features vary in few directions (rank 3, 20")
    assert verdict({"rank": 1.8}, rank=1.9).startswith("not better")
    assert verdict({"spread": 0.004}).startswith(
        "collapsed: all images have nearly the same features (spread 0.004, 0.3"
    )
    assert verdict({"spread": 0.004}, spread=0.02).startswith("not better")
    assert verdict({"rank": 3.0, "knn": 0.6}).startswith("learning")  # better neighbours in few directions
    assert verdict({"rank": 3.0, "linear": 0.6}).startswith("collapsed")  # a linear probe enlarges what is left


def test_features_that_are_not_numbers() -> None:
    now = {"knn": 0.0, "rank": 0.0, "spread": 0.0, "images": 1000.0}
    assert method().verdict(START, now).startswith("collapsed: the features are not finite numbers")


def test_lejepa_must_widen_its_projections() -> None:
    for now, before, words in ((0.003, 0.2, "collapsed"), (0.05, 0.06, "not better"), (0.8, 0.2, "not better")):
        assert verdict({"projection_std": now}, LejepaMethod, projection_std=before).startswith(words)


def test_dino_collapses_to_few_codes_or_to_all_alike() -> None:
    """Counted from the start: of random weights 55 of 256 codes are in use, of sound runs nearly all."""
    healthy, start = {"code_information": 0.05, "codes_in_use": 200.0}, {"code_information": 0.2, "codes_in_use": 55.0}
    assert verdict(healthy, Dino, **start).startswith("not better")
    said = verdict({**healthy, "codes_in_use": 2.7}, Dino, **start)
    assert said.startswith("collapsed: the teacher gives most images the same few codes (2.7 in use, 55 before)")
    said = verdict({**healthy, "code_information": 0.002}, Dino, **start)
    assert said.startswith("collapsed: the teacher gives all images nearly the same code (0.2%")


def test_what_a_masked_method_learned_of_its_own_task_is_said() -> None:
    assert "seeing an image saves 43% of the loss of its hidden patches" in verdict({"context": 0.43})


# --- the numbers behind it ----------------------------------------------------------------------------


def test_linear_probe_leaves_each_image_out() -> None:
    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    features = torch.randn(60, 8) + 3
    features[:, 0] += labels
    x = ((features - features.mean(dim=0)) / features.std(dim=0, correction=0)).double().numpy()
    targets, right = np.eye(3)[labels], 0
    for i in range(60):
        others = np.arange(60) != i
        design = np.c_[x, np.ones(60)]
        penalty = np.diag([*[health.RIDGE * 60] * 8, 0.0])
        weights = np.linalg.solve(design[others].T @ design[others] + penalty, design[others].T @ targets[others])
        right += int((design[i] @ weights).argmax() == int(labels[i]))
    assert health.linear_accuracy(features, labels, 3) == pytest.approx(right / 60)
    assert (
        health.linear_accuracy(torch.randn(60, 100), labels, 3) < 0.7
    )  # more columns than images, and nothing in them


def test_standard_error_covers_repeated_draws() -> None:
    generator, count = np.random.default_rng(0), 200
    gaps = generator.binomial(count, 0.3, 20_000) / count - generator.binomial(count, 0.6, 20_000) / count
    assert health.standard_error(0.3, 0.6, count) == pytest.approx(gaps.std(), rel=0.02)
    assert health.standard_error(0.0, 0.0, 50) > 0.02  # nobody right of 50 does not mean certainty


def test_codes_in_use() -> None:
    assert health.codes_in_use(torch.eye(8)) == pytest.approx(8)
    assert health.codes_in_use(torch.full((5, 8), 1 / 8)) == pytest.approx(8)
    assert health.codes_in_use(torch.eye(8)[[0] * 5]) == pytest.approx(1, abs=1e-6)


def test_context_is_what_seeing_the_image_saves() -> None:
    assert health.context(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])) == pytest.approx(0.5)
    assert health.context(torch.ones(3), torch.ones(3)) == pytest.approx(0)


def test_retrieval_allows_what_a_change_does_to_all_images() -> None:
    torch.manual_seed(0)
    features = torch.randn(50, 16)
    assert health.retrieval_accuracy(features, features + 5) == 1
