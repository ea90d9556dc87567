"""Tasks: what a predicted row looks like, what the targets are, and that one more is a file and a row."""

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics as sk
import torch

import vitkit
from vitkit.data import preset
from vitkit.data.keys import sample_keys
from vitkit.data.source import Names, Source
from vitkit.errors import ConfigError
from vitkit.model.base import Outputs
from vitkit.tasks import Settings, task_of
from vitkit.tasks.classify import Classify, MultiLabel
from vitkit.tasks.regress import Regress
from vitkit.tasks.table import TASKS, task_of_data


def measured(values: np.ndarray, names: tuple[str, ...]) -> Source:
    """Images with a number or several each."""
    count = len(values)
    source = Source(
        pixels=torch.zeros(count, 1, 8, 8, dtype=torch.uint8),
        name="measured",
        split="train",
        splits={"train": count},
        labels=values,
        names=Names(f"measured[{i}]" for i in range(count)),
    )
    source.targets = names
    return source


def test_the_row_of_a_classifier_names_the_likeliest() -> None:
    task = Classify(Outputs("classes", ("ant", "bee", "cow")), 3)
    assert task.columns(2) == {"class": str, "probability": float, "class_2": str, "probability_2": float}
    (row,) = task.rows(torch.tensor([[0.0, 2.0, 1.0]]), top=2)
    assert list(row) == list(task.columns(2))
    assert (row["class"], row["class_2"]) == ("bee", "cow")
    assert row["probability"] == pytest.approx(0.665241, abs=1e-6)
    assert len(task.rows(torch.zeros(1, 3), top=9)[0]) == 6  # no more than there are
    assert Classify(Outputs(), 3).rows(torch.zeros(1, 3), top=1)[0]["class"] == "0"  # nobody named them


def test_labels_are_questions_of_their_own() -> None:
    task = MultiLabel(Outputs("labels", ("ant", "bee")), 2)
    (row,) = task.rows(torch.tensor([[3.0, 2.0]]))
    assert row["probability"] + row["probability_2"] > 1.8


def test_values_are_written_in_their_own_units() -> None:
    task = Regress(Outputs("values", ("angle", "path"), (10.0, 1e9), (2.0, 1.0)), 2)
    assert task.columns() == {"angle": float, "value_path": float}
    assert task.rows(torch.tensor([[0.5, 0.25]])) == [{"angle": 11.0, "value_path": 1e9}]


@pytest.mark.parametrize("kind", ["classes", "labels", "values"])
def test_the_model_says_its_task(kind: str) -> None:
    model = vitkit.create("mu", classes=2)
    model.outputs = Outputs(kind, ("a", "b"))  # type: ignore[arg-type]
    assert task_of(model).kind == kind
    if kind == "classes":  # a file of an older version does not say that its classes are labels
        assert task_of(model, "labels").kind == "labels"


def test_a_model_without_a_head_predicts_no_rows() -> None:
    with pytest.raises(ConfigError, match="vitkit embed"):
        task_of(vitkit.create("mu", classes=0)).columns()


# --- regression --------------------------------------------------------------------------------------


def test_metrics_of_values_are_those_of_scikit_learn_and_scipy() -> None:
    random = np.random.default_rng(0)
    labels = random.normal(5, 3, (40, 2)).round(1)  # rounded: some are equal
    outputs = torch.from_numpy(random.normal(0, 1, (40, 2))).float()
    task = Regress(Outputs("values", ("a", "b"), (5.0, 4.0), (3.0, 2.0)), 2)
    values = task.activate(outputs).numpy()
    found = task.metrics(outputs, torch.from_numpy(labels))
    assert found["r2"] == pytest.approx(sk.r2_score(labels, values))
    ranked = [scipy.stats.spearmanr(labels[:, i], values[:, i]).statistic for i in range(2)]
    assert found["spearman"] == pytest.approx(np.mean(ranked))
    assert found["mae_b"] == pytest.approx(sk.mean_absolute_error(labels[:, 1], values[:, 1]))
    assert found["rmse_a"] == pytest.approx(sk.root_mean_squared_error(labels[:, 0], values[:, 0]))


def test_the_mean_of_the_data_scores_nothing_and_the_truth_everything() -> None:
    labels = np.array([[1.0], [2.0], [6.0]])
    task = task_of_data(measured(labels, ("x",)), "", Settings())
    assert task.outputs == Outputs("values", ("x",), (3.0,), (np.std([1, 2, 6]),))
    nothing = task.metrics(torch.zeros(3, 1), torch.from_numpy(labels))
    assert (nothing["r2"], nothing["spearman"], nothing["loss"]) == pytest.approx((0, 0, 1))
    _, perfect = task.targets(torch.zeros(3, 1, 8, 8), torch.from_numpy(labels), sample_keys(0, 0, [0, 1, 2]))
    found = task.metrics(perfect, torch.from_numpy(labels))
    assert (found["r2"], found["spearman"]) == pytest.approx((1, 1))
    assert task.score.text(found["r2"]) == "1.0000"


def test_mixup_blends_values_as_it_blends_images() -> None:
    labels = torch.tensor([[0.0], [4.0]], dtype=torch.float64)
    task = task_of_data(measured(labels.numpy(), ("x",)), "regress", Settings(augment=preset("strong")))
    images = torch.stack([torch.zeros(1, 8, 8), torch.ones(1, 8, 8)])
    mixed, targets = task.targets(images, labels, sample_keys(0, 0, [0, 1]))
    torch.testing.assert_close(task.activate(targets)[:, 0] / 4, mixed[:, 0, 0, 0].double())
    assert 0 < mixed[0, 0, 0, 0] < 1


def test_a_head_that_predicts_the_value_already_is_kept_in_the_new_units() -> None:
    model = vitkit.create("mu", classes=1)
    torch.nn.init.normal_(model.head.classifier.weight)
    images = torch.randn(
        3, *model(torch.zeros(0, 3, 16, 16)).shape[:0], model.config.channels, *model.config.image_size
    )
    model.outputs = Outputs("values", ("x",), (5.0,), (2.0,))
    before = task_of(model).activate(model(images))
    Regress(Outputs("values", ("x",), (-1.0,), (7.0,)), 1).prepare(model)
    torch.testing.assert_close(task_of(model).activate(model(images)), before, atol=1e-4, rtol=1e-4)
    Regress(Outputs("values", ("y",), (-1.0,), (7.0,)), 1).prepare(model)
    assert (task_of(model).activate(model(images)) == -1).all()  # another value: its mean, to begin with


@pytest.mark.parametrize(
    ("values", "settings", "task", "words"),
    [
        ([[1.0], [1.0]], Settings(), "", "'x' of measured is the same for every image"),
        ([[1.0], [np.nan]], Settings(), "", "not a finite number"),
        ([[1.0], [2.0]], Settings(class_weights=True), "", "has values; leave it out"),
        ([[1.0], [2.0]], Settings(loss="softmax"), "", "Choose one of: mse, huber"),
        ([[1.0], [2.0]], Settings(), "classify", "needs classes, and measured has values"),
        ([[1.0], [2.0]], Settings(), "regres", "Did you mean regress"),
    ],
)
def test_what_cannot_be_is_said(values: list[list[float]], settings: Settings, task: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        task_of_data(measured(np.array(values), ("x",)), task, settings)


def test_every_task_is_told_apart_by_its_name_and_has_a_loss_and_a_score() -> None:
    for name, task in TASKS.items():
        assert task.name == name
        assert task.losses
        assert task.score.words
