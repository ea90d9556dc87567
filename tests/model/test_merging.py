"""Token merging: against a reference in plain numpy, and that nothing else of the model's interface changes."""

import numpy as np
import pytest
import torch

import vitkit
from peers import randomize
from vitkit.errors import ConfigError
from vitkit.model.config import ViTConfig
from vitkit.model.merging import Merging

BASE = {"image_size": 20, "patch_size": 4, "width": 32, "depth": 4, "heads": 4, "mlp_width": 48, "classes": 7}


def model_of(**changes):
    torch.manual_seed(0)
    return randomize(vitkit.create(ViTConfig(**(BASE | changes))), scale=0.2)


def reference_merge(x: np.ndarray, keys: np.ndarray, groups: list[list[int]], r: int, prefix: int):
    """One image, token by token, with dictionaries and loops: x T D, keys H T K, the patches of each token."""
    metric = keys.mean(axis=0)
    metric = metric / np.linalg.norm(metric, axis=1, keepdims=True)
    first = list(range(prefix + 1, len(x), 2))
    second = list(range(prefix, len(x), 2))
    best = {}
    for i in first:
        likeness = [float(metric[i] @ metric[j]) for j in second]
        best[i] = (max(likeness), second[int(np.argmax(likeness))])
    gone = sorted(first, key=lambda i: -best[i][0])[:r]
    sums = {i: x[i] * len(groups[i]) for i in range(len(x))}
    members = {i: list(groups[i]) for i in range(len(x))}
    for i in gone:
        sums[best[i][1]] = sums[best[i][1]] + sums[i]
        members[best[i][1]] += members[i]
    order = [*range(prefix), *(i for i in first if i not in gone), *second]
    return np.stack([sums[i] / len(members[i]) for i in order]), [members[i] for i in order]


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("patches", [16, 25])
def test_three_steps_agree_with_plain_numpy(prefix: int, patches: int) -> None:
    random = np.random.default_rng(prefix + patches)
    x = random.normal(size=(2, prefix + patches, 6))
    merging = Merging(4, prefix)
    expected = [(x[b], [[i] for i in range(prefix + patches)]) for b in range(2)]
    ours = torch.from_numpy(x)
    for _ in range(3):
        keys = random.normal(size=(2, 2, ours.shape[1], 5))
        ours = merging.merge(ours, torch.from_numpy(keys))
        expected = [reference_merge(*expected[b][:1], keys[b], expected[b][1], 4, prefix) for b in range(2)]
    assert ours.shape[1] == prefix + patches - 12
    where = merging.where(ours)
    for b, (states, groups) in enumerate(expected):
        np.testing.assert_allclose(ours[b].numpy(), states, atol=1e-12)  # float64 on both sides
        assert merging.sizes is not None
        np.testing.assert_array_equal(merging.sizes[b, :, 0].numpy(), [len(g) for g in groups])
        for token, group in enumerate(groups):
            assert sorted(group) == np.flatnonzero(where[b].numpy() == token).tolist()


def test_no_merging_is_the_same_to_the_last_bit() -> None:
    model, images = model_of(), torch.randn(3, 3, 20, 20)
    plain = model(images)
    model.merge = 3
    assert not torch.equal(model(images), plain)
    model.merge = 0
    assert torch.equal(model(images), plain)


@pytest.mark.parametrize("pooling", ["cls", "mean", "cls+mean", "map"])
def test_identical_patches_may_merge_without_any_change(pooling: str) -> None:
    """Without positions equal patches stay equal, so that merging them is exact: sizes, attention and pooling count."""
    model = model_of(pooling=pooling, positions="none", depth=3)
    few = torch.randn(2, 3, 4, 4)
    images = torch.stack([few] * 25, dim=1).unflatten(1, (5, 5))  # B 5 5 C 4 4
    images[:, 0, 0] = torch.randn(2, 3, 4, 4)
    images = images.permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 20, 20)
    plain = model(images)
    model.merge = 4
    torch.testing.assert_close(model(images), plain, atol=2e-5, rtol=1e-4)  # sums in another order


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_who_looks_changes_nothing_and_sees_every_token(pooling: str) -> None:
    model, images, seen = model_of(pooling=pooling, registers=2), torch.randn(2, 3, 20, 20), []
    model.merge = 3
    plain = model(images)
    looked = model(images, on_weights=seen.append)
    torch.testing.assert_close(looked, plain, atol=1e-5, rtol=1e-5)
    assert [w.shape for w in seen] == [(2, 4, 28, 28)] * 4
    for weights in seen:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 28))
    assert model.tokens(images).shape == (2, 28, 32)


def test_gradients_reach_the_attention_of_merged_tokens() -> None:
    model, seen = model_of(), []
    model.merge = 3
    model(torch.randn(1, 3, 20, 20), on_weights=seen.append)[0, 2].backward(inputs=list(model.parameters()))
    grads = torch.autograd.grad(model(torch.randn(1, 3, 20, 20), on_weights=seen.append)[0, 2], seen[4:])
    assert all(g.abs().sum() > 0 for g in grads)


def test_more_than_there_is_cannot_be_merged() -> None:
    model = model_of()
    model.merge = 100
    assert model(torch.randn(2, 3, 20, 20)).isfinite().all()


def test_training_merges_nothing() -> None:
    model, images = model_of().train(), torch.randn(2, 3, 20, 20)
    plain = model(images)
    model.merge = 3
    assert torch.equal(model(images), plain)


def test_what_cannot_be_merged_is_refused() -> None:
    for positions in ("relative", "rope-2d"):
        with pytest.raises(ConfigError, match="leave merging out"):
            model_of(positions=positions).merge = 2
    with pytest.raises(ConfigError, match="negative"):
        model_of().merge = -1
