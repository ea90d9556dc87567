"""The variants do what their names say; the mistakes are the mistakes of the articles."""

import pytest
import torch
from torch import Tensor, nn

from vitkit.data import normalise
from vitkit.explanation.distance import receptive_reach
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


@pytest.mark.parametrize("variant", ["unseen-token", "late-token"])
def test_patches_do_not_see_the_token(variant: str, images: Tensor) -> None:
    for model, seen in zip(pair(variant), (True, False), strict=True):
        before = model.tokens(images)
        with torch.no_grad():
            model.class_token.neg_()  # type: ignore[union-attr]
        moved = (model.tokens(images) - before).abs().amax(dim=(0, 2))  # of each token
        assert moved[0] > 0.01
        assert (moved[1:] > 0.01).all() if seen else (moved[1:] == 0).all()


def test_a_late_token_meets_the_patches_as_it_was(images: Tensor) -> None:
    """By hand: the last block sees the patches that the others made, and the token of the start."""
    _, late = pair("late-token")
    _, unseen = pair("unseen-token")
    x, place = unseen.embedded(images)
    before = unseen.features(images, layers=(1,))[0]
    last = unseen.encoder.blocks[2](torch.cat([x[:, :1], before[:, 1:]], dim=1), place)
    assert torch.allclose(late(images), unseen.head(unseen.norm(last)), atol=1e-5)


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
    assert moved(image, 1, 0)[0, 0].tolist() == [[1, 2, 3], [1, 2, 3], [4, 5, 6]]
    assert moved(image, 0, -1)[0, 0].tolist() == [[2, 3, 3], [5, 6, 6], [8, 9, 9]]
    assert torch.equal(moved(image, 0, 0), image)
    assert shifts(28) == [0, 1, 2, 3, 4, 6, 7]
    assert shifts(8) == [0, 1, 2]


def shuffled(images: Tensor) -> Tensor:
    """The four patches of 4 x 4 of each image in another order."""
    upper, lower = images.split(4, dim=2)
    return torch.cat([lower, upper], dim=2)


@pytest.mark.parametrize("variant", ["", "positions-each", "positions-shared", "positions-beside"])
def test_positions_tell_places_apart(variant: str, images: Tensor) -> None:
    """Without any, a mean over patches does not change when patches change places."""
    _, model = pair(variant, positions="none", pooling="mean", class_token=False, patch_size=4)
    for name, p in model.named_parameters():
        if "learned" in name:
            nn.init.normal_(p, std=1.0)
    apart = float((model(images) - model(shuffled(images))).detach().abs().max())
    assert (apart < 1e-4) == (variant == "")


def test_a_shared_table_is_one(images: Tensor) -> None:
    counts = {v: len(list(pair(v, positions="none")[1].parameters())) for v in ("positions-each", "positions-shared")}
    bare = len(list(pair("", positions="none")[0].parameters()))
    assert counts == {"positions-each": bare + S.vit().depth, "positions-shared": bare + 1}


def test_the_first_patch_is_read_and_a_fixed_token_never_learns(images: Tensor) -> None:
    _, model = pair("first-patch", pooling="mean", class_token=False)
    assert torch.equal(model(images), model.head.classifier(model.tokens(images)[:, 0]))
    _, model = pair("fixed-token")
    model(images).sum().backward()
    assert model.class_token is not None
    assert model.class_token.grad is None


def test_batch_norm_normalises_over_images_and_tokens(images: Tensor) -> None:
    _, model = pair("batch-norm")
    seen: list[Tensor] = []
    norm = model.encoder.blocks[0].norm1
    nn.init.ones_(norm.weight)
    nn.init.zeros_(norm.bias)
    norm.register_forward_hook(lambda module, given, out: seen.append(out))
    model.train()(images)
    assert torch.allclose(seen[0].mean(dim=(0, 1)), torch.zeros(48), atol=1e-5)
    assert torch.allclose(seen[0].var(dim=(0, 1), unbiased=False), torch.ones(48), atol=1e-3)


def test_scores_are_those_of_the_formula(tiny: str) -> None:
    """Queries and keys that are their biases alone: the score of every pair is their product."""
    sets = open_sets(tiny)
    for variant, scale in (("", 12**-0.5), ("scale-none", 1.0)):
        model = start(Run(S.vit(), 1, 1e-3, 0, variant), sets)
        qkv = model.encoder.blocks[0].attention.qkv
        nn.init.zeros_(qkv.weight)
        nn.init.constant_(qkv.bias, 0.5)
        found = measures.scores(model, sets)
        assert (found["deviation"], found["evenness"]) == (pytest.approx(0.0, abs=1e-6), pytest.approx(1.0))
        nn.init.normal_(qkv.weight, std=3.0)
        scores: list[Tensor] = []
        with torch.no_grad():
            x, _ = model.embedded(normalise(sets.test.pixels[:256], model.config.preprocessing))
            q, k, _ = qkv(model.encoder.blocks[0].norm1(x)).chunk(3, dim=-1)
            scores = [q[..., h : h + 12] @ k[..., h : h + 12].mT * scale for h in range(0, 48, 12)]
        found, deviation = measures.scores(model, sets), float(torch.stack(scores).std())
        assert found["deviation"] == pytest.approx(deviation, rel=1e-4)
        assert found["unit"] == pytest.approx(deviation / scale / float(q.std() * k.std()), rel=1e-4)


def test_a_long_token_is_an_outlier(tiny: str) -> None:
    sets = open_sets(tiny)
    model = start(Run(S.vit(), 1, 1e-3, 0), sets)
    before = measures.norms(model, sets)
    with torch.no_grad():
        model.positions.learned[1] += 100.0  # the first patch
    after = measures.norms(model, sets)
    assert after["outliers"] == pytest.approx(1 / 16)
    assert before["outliers"] < 1 / 16
    assert after["longest"] > 10 * before["longest"]


def test_a_stage_of_a_cnn_sees_farther_than_the_one_before() -> None:
    torch.manual_seed(0)
    model = build(Setting(32, 3, 10).resnet()).eval()
    found = receptive_reach(model, torch.randn(4, 3, 32, 32))
    assert found == sorted(found)
    assert found[0] > 0.3
    assert found[-1] < 16
    corner = torch.zeros(1, 3, 32, 32)
    corner[..., 16, 16] = 1.0
    assert receptive_reach(model, corner)[0] < 8  # norms aside, a stage cannot see beyond its filters
