"""Metrics against scikit-learn, and against closed forms."""

import itertools

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitkit.model.base import Outputs
from vitkit.tasks import metrics
from vitkit.tasks.classify import Classify, MultiLabel

ONE, SEVERAL = Classify(Outputs(), 0), MultiLabel(Outputs(), 0)


@st.composite
def answered(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Logits (N, C), sometimes with equal values, and labels (N,)."""
    n, c = draw(st.integers(1, 60)), draw(st.integers(2, 12))
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    logits = random.normal(0, 3, (n, c)).astype(np.float32)
    if draw(st.booleans()):
        logits = logits.round()
    return logits, random.integers(0, c, n)


@given(answered())
def test_accuracy_confusion_and_rates_are_scikit_learns(case: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = case
    classes = logits.shape[1]
    predicted = logits.argmax(axis=1)
    everything = np.arange(classes)
    assert metrics.top_k(*map(torch.from_numpy, case), 1) == pytest.approx(sk.accuracy_score(labels, predicted))
    matrix = metrics.confusion(labels, predicted, classes)
    assert (matrix == sk.confusion_matrix(labels, predicted, labels=everything)).all()
    theirs = sk.precision_recall_fscore_support(labels, predicted, labels=everything, zero_division=0)
    ours = metrics.per_class(matrix)
    for mine, their in zip((ours.precision, ours.recall, ours.f1, ours.support), theirs, strict=True):
        np.testing.assert_allclose(mine, their)


@given(answered())
def test_loss_is_scikit_learns(case: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = case
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    theirs = sk.log_loss(labels, p, labels=np.arange(logits.shape[1]))
    loss = ONE.record(torch.from_numpy(logits), torch.from_numpy(labels))["loss"]
    assert loss.double().mean() == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@given(answered())
def test_top_5_is_scikit_learns_where_no_scores_are_equal(case: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = case
    if logits.shape[1] < 6 or (logits == logits.round()).all():
        return
    theirs = sk.top_k_accuracy_score(labels, logits, k=5, labels=np.arange(logits.shape[1]))
    assert metrics.top_k(*map(torch.from_numpy, case), 5) == pytest.approx(theirs)


@given(answered(), st.integers(1, 12))
def test_a_class_stands_where_a_stable_sort_puts_it(case: tuple[np.ndarray, np.ndarray], k: int) -> None:
    logits, labels = case
    order = np.argsort(-logits, axis=1, kind="stable")
    place = (order == labels[:, None]).argmax(axis=1)
    assert (metrics.place_of_label(*map(torch.from_numpy, case)).numpy() == place).all()
    assert metrics.top_k(*map(torch.from_numpy, case), k) == (place < k).mean()


@given(answered())
def test_what_is_kept_of_a_batch_agrees_with_the_metrics(case: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = case
    kept = {k: v.numpy() for k, v in ONE.record(torch.from_numpy(logits), torch.from_numpy(labels)).items()}
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    assert (kept["place"] == (np.argsort(-logits, axis=1, kind="stable") == labels[:, None]).argmax(axis=1)).all()
    assert (kept["predicted"] == logits.argmax(axis=1)).all()
    assert ((kept["place"] == 0) == (kept["predicted"] == labels)).all()
    np.testing.assert_allclose(kept["probability"], p.max(axis=1), rtol=1e-4)


def test_a_model_that_says_nothing_has_the_accuracy_of_chance() -> None:
    """A fresh head is all zeros: equal scores must not count as hits."""
    labels = torch.arange(100) % 10
    assert metrics.top_k(torch.zeros(100, 10), labels, 1) == pytest.approx(0.1)
    assert metrics.top_k(torch.zeros(100, 10), labels, 5) == pytest.approx(0.5)


def test_scores_that_are_no_numbers_are_never_hits() -> None:
    labels, nan = torch.arange(3), float("nan")
    for broken, places in (([[nan] * 3] * 3, [3, 3, 3]), ([[0, nan, 0], [nan, 0, 0], [nan, nan, 9.0]], [1, 1, 2])):
        assert metrics.top_k(torch.tensor(broken), labels, 1) == 0
        assert ONE.record(torch.tensor(broken), labels)["place"].tolist() == places


# --- calibration -------------------------------------------------------------------------------------


def test_claims_that_come_true_have_no_calibration_error() -> None:
    confidence = np.repeat([0.25, 0.5, 0.75, 1.0], 100)
    correct = np.concatenate([np.arange(100) < 100 * c for c in (0.25, 0.5, 0.75, 1.0)])
    assert metrics.reliability(confidence, correct).ece == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("claimed", "true"), [(1.0, 0.0), (0.9, 0.5), (0.3, 0.8)])
def test_the_error_of_one_constant_claim_is_its_gap(claimed: float, true: float) -> None:
    correct = np.arange(1000) < 1000 * true
    assert metrics.reliability(np.full(1000, claimed), correct).ece == pytest.approx(abs(claimed - true))


def test_bins_hold_their_upper_edge_and_zero_falls_into_the_first() -> None:
    bins = metrics.reliability(np.array([0.0, 0.2, 0.2000001, 1.0]), np.ones(4), bins=5)
    assert bins.count.tolist() == [2, 1, 0, 0, 1]
    assert bins.edges.tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=80))
def test_calibration_error_by_the_definition(claims: list[tuple[float, bool]]) -> None:
    confidence, correct = (np.array(v, dtype=float) for v in zip(*claims, strict=True))
    edges = np.linspace(0, 1, 16)
    expected = 0.0
    for low, high in itertools.pairwise(edges):
        inside = ((confidence > low) & (confidence <= high)) | ((confidence == 0) & (low == 0))
        if inside.any():
            expected += inside.sum() / len(claims) * abs(correct[inside].mean() - confidence[inside].mean())
    bins = metrics.reliability(confidence, correct)
    assert bins.ece == pytest.approx(expected, abs=1e-12)
    assert bins.count.sum() == len(claims)


# --- several labels ----------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(1, 6), st.integers(0, 10_000), st.booleans())
def test_average_precision_is_scikit_learns(n: int, c: int, seed: int, equals: bool) -> None:
    random = np.random.default_rng(seed)
    labels, scores = random.integers(0, 2, (n, c)), random.normal(0, 2, (n, c))
    scores = scores.round() if equals else scores
    for k in range(c):
        mine = metrics.average_precision(labels[:, k], scores[:, k])
        if labels[:, k].any():
            assert mine == pytest.approx(sk.average_precision_score(labels[:, k], scores[:, k]))
        else:
            assert np.isnan(mine)
    if labels.any(axis=0).all():
        theirs = sk.average_precision_score(labels, scores, average="macro")
        assert metrics.mean_average_precision(labels, scores) == pytest.approx(theirs)
    rates = metrics.per_label(labels, scores)
    theirs = sk.precision_recall_fscore_support(labels, (scores > 0).astype(int), zero_division=0, average=None)
    if c > 1:
        for mine, their in zip((rates.precision, rates.recall, rates.f1, rates.support), theirs, strict=True):
            np.testing.assert_allclose(mine, their)


@given(st.integers(1, 20), st.integers(0, 10_000))
def test_loss_of_several_labels_is_pytorchs(n: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    labels, logits = random.integers(0, 2, (n, 3)), random.normal(0, 30, (n, 3))
    y, z = torch.from_numpy(labels).double(), torch.from_numpy(logits)
    theirs = torch.nn.functional.binary_cross_entropy_with_logits(z, y, reduction="none").numpy()
    np.testing.assert_allclose(SEVERAL.record(z, y)["loss"].numpy(), theirs.mean(axis=1), rtol=1e-5, atol=1e-6)
