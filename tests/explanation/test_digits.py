"""A model that has learned to read digits: maps must be faithful, and differ between classes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitkit
from vitkit.explanation.attention import output_attention
from vitkit.explanation.faithfulness import faithfulness_curves, occlusion_map
from vitkit.explanation.relevance import class_relevance, correlation

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """A small ViT on scikit-learn's digits, and images it has not seen and reads rightly."""
    datasets = pytest.importorskip("sklearn.datasets")
    torch.manual_seed(0)
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    train, test = order[:1437], order[1437:]
    model, epochs = vitkit.create("vit-8px/2", depth=3), 16
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * 23)
    for _ in range(epochs):
        for some in train[torch.randperm(len(train))].split(64):
            loss = F.cross_entropy(model(images[some]), labels[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        right = model(images[test]).argmax(1) == labels[test]
    assert right.float().mean() > 0.9
    return model, images[test][right][:24], labels[test][right][:24]


def test_deletion_by_relevance_beats_random_deletion(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, images, labels = trained
    found = class_relevance(model, images, labels)
    maps = {
        "relevance": found.relevance[:, 0],
        "rollout": output_attention(model, images).rollout,
        "occlusion": occlusion_map(model, images, labels).drop,
    }
    table = {row["method"]: row for row in faithfulness_curves(model, images, labels, maps).table()}
    assert table["relevance"]["deletion_ratio"] < 0.75
    assert table["relevance"]["insertion_ratio"] > 1.1
    assert table["occlusion"]["deletion_ratio"] < 0.75


def test_maps_of_two_classes_differ(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, images, _ = trained
    with torch.no_grad():
        likeliest = model(images).topk(2).indices
    maps = class_relevance(model, images, likeliest).relevance
    alike = np.mean([correlation(m[0], m[1]) for m in maps])
    assert alike < 0.8
