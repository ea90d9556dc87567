"""The variants do what their names say; the mistakes are the mistakes of the articles."""

import pytest
import torch
from torch import Tensor, nn

from vitkit.model.build import build
from vitkit.model.vit import ViT
from vitkit.study import measures, variants
from vitkit.study.measures import moved, neighbours, shifts
from vitkit.study.runs import Run, start
from vitkit.study.sets import open_sets
from vitkit.study.table import Setting

S = Setting(8, 1, 4)
TOLERANCE = 2e-6  # float32, a few dozen additions in another order


def pair(variant: str, **changes: object) -> tuple[ViT, ViT]:
    models = []
    for name in ("", variant):
        torch.manual_seed(0)
        model = build(S.vit(**changes))
        for p in model.parameters():  # the head starts at zero, which would hide everything
            nn.init.normal_(p, std=0.3)
        variants.apply(model, name)
        models.append(model.eval())
    return models[0], models[1]  # type: ignore[return-value]


@pytest.fixture
def images() -> Tensor:
    return torch.randn(6, 1, 8, 8)


@pytest.mark.parametrize("pooling", [{}, {"pooling": "mean", "class_token": False}])
@pytest.mark.parametrize("variant", ["torch", "linear-patches", "conv-patches"])
def test_equal_functions(variant: str, pooling: dict, images: Tensor) -> None:
    ours, other = pair(variant, **pooling)
    expected = ours(images)
    assert (other(images) - expected).abs().max() < TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("variant", ["torch-batch", "torch-keep-value"])
def test_batch_first_false_attends_across_the_batch(variant: str, images: Tensor) -> None:
    ours, other = pair(variant, pooling="mean", class_token=False)
    assert torch.allclose(ours(images)[0], ours(images[:1])[0], atol=1e-4)
    assert (other(images)[0] - other(images[:1])[0]).abs().max() > 0.01


def test_a_class_token_then_never_sees_its_patches(images: Tensor) -> None:
    _, other = pair("torch-batch")
    answers = other(images)
    assert (answers - answers[0]).abs().max() < 1e-4  # the same for every image


def test_detaching_changes_gradients_and_no_value(images: Tensor) -> None:
    _, plain = pair("torch-batch", pooling="mean", class_token=False)
    _, detached = pair("torch-keep-value", pooling="mean", class_token=False)
    assert torch.equal(plain(images), detached(images))
    for model in (plain, detached):
        model(images).square().sum().backward()
    assert not torch.allclose(plain.patches.weight.grad, detached.patches.weight.grad)


def test_the_scale_after_the_softmax(images: Tensor) -> None:
    """Against the formula of the articles, written out for one layer."""
    ours, wrong = pair("scale-after", depth=1)
    x, _ = ours.embedded(images)
    block = wrong.encoder.blocks[0]
    y = block.norm1(x)
    q, k, v = block.attention.qkv(y).unflatten(-1, (3, 4, 12)).permute(2, 0, 3, 1, 4)
    expected = (torch.softmax(q @ k.mT, -1) / 48**0.5) @ v
    expected = block.attention.out(expected.transpose(1, 2).flatten(2))
    assert torch.allclose(block.attention(y), expected, atol=1e-5)
    _, width = pair("scale-width", depth=1)
    expected = torch.softmax(q @ k.mT / 48**0.5, -1) @ v
    expected = block.attention.out(expected.transpose(1, 2).flatten(2))
    assert torch.allclose(width.encoder.blocks[0].attention(y), expected, atol=1e-5)


def test_unknown_variants_are_named() -> None:
    with pytest.raises(Exception, match="no variant 'sideways'"):
        variants.apply(build(S.vit()), "sideways")


def test_neighbours_measures_the_leak(tiny: str) -> None:
    sets = open_sets(tiny)
    config = S.vit(pooling="mean", class_token=False)
    found = {}
    for variant in ("", "torch", "torch-batch"):
        model = start(Run(config, 1, 1e-3, 0, variant), sets)
        for p in model.parameters():
            torch.manual_seed(p.numel())
            nn.init.normal_(p, std=0.5)
        found[variant] = neighbours(model, sets)
    assert found[""]["changed"] == found["torch"]["changed"] == 0
    assert found[""]["differs_from_ours"] is None
    assert found["torch"]["differs_from_ours"] < 1e-4
    assert found["torch-batch"]["differs_from_ours"] > 1e-2


class Gossip(nn.Module):
    """Answers for each image with a class that depends on all images of the batch, or on itself alone."""

    config = S.vit()

    def __init__(self, across: bool) -> None:
        super().__init__()
        self.across = across

    def forward(self, x: Tensor) -> Tensor:
        told = (x * 127.5 + 127.5).round().sum(dim=(1, 2, 3)).long()
        told = told.sum().expand(len(x)) if self.across else told
        return nn.functional.one_hot(told % 4, 4).float()


def test_changed_answers_are_counted(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "_distance_to_ours", lambda model, images: None)
    assert neighbours(Gossip(across=False), open_sets(tiny))["changed"] == 0  # type: ignore[arg-type]
    assert neighbours(Gossip(across=True), open_sets(tiny))["changed"] > 0.25  # type: ignore[arg-type]


def test_moving_images() -> None:
    image = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3)
    assert moved(image, 1, 0)[0, 0].tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 6]]
    assert moved(image, 0, -1)[0, 0].tolist() == [[2, 3, 0], [5, 6, 0], [8, 9, 0]]
    assert torch.equal(moved(image, 0, 0), image)
    assert shifts(28) == [0, 1, 2, 3, 4, 6, 7]
    assert shifts(8) == [0, 1, 2]
