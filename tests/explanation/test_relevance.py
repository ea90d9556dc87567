"""Relevance and Grad-CAM against plain implementations that keep the whole graph."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

import vitkit
from peers import randomize
from strategies import configs
from vitkit.errors import InputError
from vitkit.explanation.attention import output_attention
from vitkit.explanation.distance import attention_distance
from vitkit.explanation.faithfulness import occlusion_map
from vitkit.explanation.inside import readout
from vitkit.explanation.relevance import class_relevance
from vitkit.model.config import ViTConfig


def plain_relevance(model: torch.nn.Module, image: torch.Tensor, wanted: int) -> np.ndarray:
    """R = R + A R from the first layer to the last, with one backward pass through the whole model."""
    kept: list[torch.Tensor] = []
    tokens = model.tokens(image[None], on_weights=kept.append)
    score = model.head(tokens, on_weights=kept.append)[0, wanted]
    grads = torch.autograd.grad(score, kept)
    steps = [(a * g)[0].detach().double().numpy() for a, g in zip(kept, grads, strict=True)]
    count = steps[0].shape[-1]
    relevance = np.eye(count)
    for step in steps[: model.config.depth]:
        mean = np.zeros((count, count))
        for head_map in step:
            mean += np.maximum(head_map, 0) / len(step)
        relevance = relevance + mean @ relevance
    if model.config.pooling == "map":
        row = np.maximum(steps[-1], 0).mean(axis=0)[0]
    else:
        row = readout(model, image[None])[0].double().numpy()
    return (row @ relevance)[model.config.prefix_tokens :].reshape(model.config.grid)


@pytest.mark.parametrize("pooling", ["cls", "mean", "cls+mean", "map"])
def test_relevance_against_the_whole_graph(pooling: str) -> None:
    config = {"pooling": pooling, "registers": 1, "image_size": (16, 32), "depth": 3}
    model = randomize(vitkit.create("mu", **config), scale=0.3)
    images = torch.randn(2, 3, 16, 32)
    found = class_relevance(model, images, torch.tensor([[1, 7], [4, 0]]))
    for b, classes in enumerate([[1, 7], [4, 0]]):
        for k, wanted in enumerate(classes):
            known = plain_relevance(model, images[b], wanted)
            np.testing.assert_allclose(found.relevance[b, k], known, rtol=1e-3, atol=1e-6)


def test_gradcam_of_a_class_token_model_reads_what_the_last_attention_reads() -> None:
    model = randomize(vitkit.create("mu"), scale=0.3)
    image = torch.randn(1, 3, 32, 32)
    found = class_relevance(model, image, torch.tensor([3])).gradcam[0, 0]
    kept: list[torch.Tensor] = []
    hook = model.encoder.blocks[-1].norm1.register_forward_hook(lambda m, i, o: kept.append(o))
    gradient = torch.autograd.grad(model(image)[0, 3], kept)[0]
    hook.remove()
    channels = gradient[0, 1:].mean(dim=0)
    known = F.relu((kept[0][0, 1:] * channels).sum(-1)).detach().reshape(4, 4)
    np.testing.assert_allclose(found, known.numpy(), rtol=1e-3, atol=1e-6)


def test_gradcam_of_a_mean_pooled_model_is_the_class_activation_map() -> None:
    """With mean pooling and a linear classifier the channels' weights are the classifier's own, over N."""
    model = randomize(vitkit.create("mu", pooling="mean"), scale=0.3)
    image = torch.randn(1, 3, 32, 32)
    found = class_relevance(model, image, torch.tensor([3])).gradcam[0, 0]
    with torch.no_grad():
        known = F.relu(model.tokens(image)[0, 1:] @ model.head.classifier.weight[3] / 16).reshape(4, 4)
    np.testing.assert_allclose(found, known.numpy(), rtol=1e-3, atol=1e-6)


def test_maps_differ_between_classes() -> None:
    model = randomize(vitkit.create("mu"), scale=0.3)
    found = class_relevance(model, torch.randn(1, 3, 32, 32), torch.tensor([[2, 5]]))
    assert not np.allclose(found.relevance[0, 0], found.relevance[0, 1], rtol=0.1)


def test_the_model_is_left_as_it_was() -> None:
    model = randomize(vitkit.create("mu"))
    class_relevance(model, torch.randn(1, 3, 32, 32), torch.tensor([1]))
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("changes", "wanted", "message"), [({"classes": 0}, 0, "no classifier"), ({}, 10, "0 to 9"), ({}, -1, "0 to 9")]
)
def test_a_class_that_does_not_exist(changes: dict, wanted: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        class_relevance(vitkit.create("mu", **changes), torch.randn(1, 3, 32, 32), torch.tensor([wanted]))


@given(config=configs(classes=3))
@settings(max_examples=20)
def test_any_model_can_be_explained(config: ViTConfig) -> None:
    model = randomize(vitkit.create(config))
    images = torch.randn(2, config.channels, *config.image_size)
    classes = torch.tensor([0, 2])
    found = class_relevance(model, images, classes)
    maps = [found.relevance[:, 0], found.gradcam[:, 0], output_attention(model, images).rollout]
    maps.append(occlusion_map(model, images, classes).drop)
    reach = attention_distance(model, images)
    for values in maps:
        assert values.shape == (2, *config.grid)
        assert np.isfinite(values).all()
    assert reach.distance.shape == (2, config.depth, config.all_heads)
    assert np.isfinite(reach.distance).all()
    assert (reach.distance >= 0).all()
