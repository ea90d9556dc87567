"""Everything runs where the model is: tensors are made there, not on a default or a fixed device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import vitkit
from peers import randomize
from vitkit.explanation import build
from vitkit.explanation.attention import output_attention, query_attention, rollouts
from vitkit.explanation.inside import predictions
from vitkit.explanation.relevance import class_relevance
from vitkit.explanation.tokens import token_states
from vitkit.explanation.weights import position_similarity
from vitkit.model.vit import ViT

CLASSES = torch.tensor([[1, 2], [3, 4]])
CALLS: dict[str, Callable[[ViT, Tensor], object]] = {
    "attention": output_attention,
    "rollouts": lambda model, images: rollouts(model, images, [0, 1], (1, 2)),
    "query": lambda model, images: query_attention(model, images, (1, 2)),
    "tokens": token_states,
    "relevance": lambda model, images: class_relevance(model, images, CLASSES),
    "predictions": predictions,
    "positions": lambda model, images: position_similarity(model),
}
MODELS = {"cls": {}, "map": {"pooling": "map"}, "mean": {"pooling": "mean"}}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", MODELS)
def test_tensors_are_made_where_the_model_is(name: str, kind: str) -> None:
    """A tensor made elsewhere would be on the default device, here one without numbers, and could not be used."""
    model, images = randomize(vitkit.create("mu", **MODELS[kind]), scale=0.2), torch.randn(2, 3, 32, 32)
    with torch.device("meta"):
        CALLS[name](model, images)


def test_the_device_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def resolve(wanted: str | None) -> torch.device:
        asked.append(wanted)
        return torch.device("meta")

    monkeypatch.setattr(build, "resolve_device", resolve)
    subject = build.make_subject("mu", device="cuda:1")
    assert asked == ["cuda:1"]
    assert {p.device.type for p in subject.model.parameters()} == {"meta"}
