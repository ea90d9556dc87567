"""Token merging: against a reference in plain numpy, and that nothing else of the model's interface changes."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import vitkit
from peers import randomize
from vitkit.errors import ConfigError
from vitkit.model.config import ViTConfig
from vitkit.model.merge_plan import METHODS, SCHEDULES, MergePlan
from vitkit.model.merging import MERGINGS, PiToMe, Pruning, ToMe

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
    merging = ToMe(4, prefix)
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


# --- other methods and schedules -------------------------------------------------------------------------


def test_every_method_has_a_word_and_a_row() -> None:
    assert list(MERGINGS) == METHODS


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("per_block", "depth"), [(8, 12), (3, 5), (1, 1), (7, 24)])
def test_schedules_spend_the_same_in_all(schedule: str, per_block: int, depth: int) -> None:
    counts = MergePlan(per_block, "tome", schedule).counts(depth)
    assert len(counts) == depth
    assert sum(counts) == per_block * depth
    assert min(counts) >= 0
    rising = [b - a for a, b in pairwise(counts)]
    if schedule == "constant":
        assert set(counts) == {per_block}
    elif schedule == "late":  # from 0 to twice as many, but for rounding
        assert min(rising, default=0) >= -1
        assert depth == 1 or counts[-1] > counts[0]
    else:
        assert counts == tuple(reversed(MergePlan(per_block, "tome", "late").counts(depth)))


def test_what_a_user_writes_comes_back() -> None:
    for spec in (0, 8, "pitome:8", "prune:3:late", "tome:8:early"):
        assert MergePlan.of(spec).spec == spec
    assert MergePlan.of("8").spec == MergePlan.of("tome:8").spec == 8
    for wrong, words in (
        ("pitme:8", "Did you mean pitome"),
        ("tome:8:lat", "late"),
        ("many", "write 8"),
        (-2, "negative"),
    ):
        with pytest.raises(ConfigError, match=words):
            MergePlan.of(wrong)


def planted(clusters: list[int], alone: int) -> torch.Tensor:
    """Unit keys 1 1 N K: clusters of equal keys, then some that are like nothing else; all at right angles."""
    rows = [i for i, size in enumerate(clusters) for _ in range(size)] + [len(clusters) + i for i in range(alone)]
    return torch.eye(len(clusters) + alone, dtype=torch.float64)[rows][None, None]


def test_pitome_merges_within_clusters_and_protects_what_stands_alone() -> None:
    """Energies in closed form: of n patches, one in a cluster of c has (c (1 - m) + (n - c) (exp(-m) - 1)) / n."""
    keys = planted([6, 4], alone=5)
    n, m = 15, 0.9
    merging = PiToMe((3, 0, 0), 0)
    merging.block = 1
    metric = keys[0, 0]
    energy = torch.nn.functional.elu(metric @ metric.T - merging.margin()).mean(-1)
    for place, c in ((0, 6), (6, 4), (10, 1)):
        assert energy[place].item() == pytest.approx((c * (1 - m) + (n - c) * (np.exp(-m) - 1)) / n)
    x = torch.arange(n, dtype=torch.float64)[None, :, None]
    merging = PiToMe((3, 0, 0), 0)
    after = merging.merge(x, keys)
    assert after.shape == (1, 12, 1)
    where = merging.where(after)[0]
    for token in range(12):
        members = np.flatnonzero(where.numpy() == token)
        assert after[0, token, 0].item() == pytest.approx(members.mean())
        assert merging.sizes[0, token, 0].item() == len(members)
        if len(members) > 1:
            assert members.max() < 6, "the largest cluster has the most energy: 3 of its 6 join the other 3"


@pytest.mark.parametrize("prefix", [0, 2])
def test_pitome_agrees_with_loops(prefix: int) -> None:
    """Two steps, patch by patch in plain numpy."""
    random = np.random.default_rng(3)
    x, merging = random.normal(size=(1, prefix + 12, 4)), PiToMe((2, 3), prefix)
    tokens, sizes, ours = list(x[0]), [1] * len(x[0]), torch.from_numpy(x)
    for block, r in enumerate((2, 3)):
        keys = random.normal(size=(1, 2, len(tokens), 5))
        ours = merging.merge(ours, torch.from_numpy(keys))
        metric = keys[0].mean(0)[prefix:]
        metric /= np.linalg.norm(metric, axis=1, keepdims=True)
        gap = metric @ metric.T - (0.9 - 0.9 * block / 2)
        energy = np.where(gap > 0, gap, np.exp(gap) - 1).mean(1)
        order = np.argsort(-energy)
        gone, partners, alone = order[: 2 * r : 2], order[1 : 2 * r : 2], order[2 * r :]
        sums = {i: tokens[prefix + i] * sizes[prefix + i] for i in range(len(metric))}
        count = {i: sizes[prefix + i] for i in range(len(metric))}
        for i in gone:
            j = partners[int(np.argmax([metric[i] @ metric[k] for k in partners]))]
            sums[j], count[j] = sums[j] + sums[i], count[j] + count[i]
        stay = [*alone, *partners]
        tokens = tokens[:prefix] + [sums[i] / count[i] for i in stay]
        sizes = sizes[:prefix] + [count[i] for i in stay]
    np.testing.assert_allclose(ours[0].numpy(), np.stack(tokens), atol=1e-12)
    assert merging.sizes[0, :, 0].tolist() == sizes


def test_pruning_drops_what_the_class_token_looks_at_least() -> None:
    """Two heads, keys along one axis: attention is a softmax of planted numbers."""
    liking = torch.tensor([0.0, 5.0, -3.0, 2.0, -1.0, 4.0], dtype=torch.float64)  # class token, then 5 patches
    keys = torch.stack([liking, liking])[None, :, :, None].expand(1, 2, 6, 4).contiguous()
    merging = Pruning((2, 1), 1)
    merging._look(torch.ones_like(keys), keys)
    x = torch.arange(6, dtype=torch.float64)[None, :, None]
    after = merging.merge(x)
    assert after[0, :, 0].tolist() == [0, 1, 3, 5]  # patches 2 and 4, with -3 and -1, are gone
    assert merging.sizes is None
    merging._look(torch.ones_like(keys[:, :, [0, 1, 3, 5]]), keys[:, :, [0, 1, 3, 5]])
    assert merging.merge(after)[0, :, 0].tolist() == [0, 1, 5]


@pytest.mark.parametrize("spec", ["pitome:3", "prune:3", "pitome:3:late", "tome:3:early", "prune:3:late"])
def test_who_looks_changes_nothing_with_any_method(spec: str) -> None:
    for pooling in ("cls", "mean"):
        model, images, seen = model_of(pooling=pooling, registers=2), torch.randn(2, 3, 20, 20), []
        plain = model(images)
        model.merge = spec
        fewer = model(images)
        assert not torch.equal(fewer, plain)
        torch.testing.assert_close(model(images, on_weights=seen.append), fewer, atol=1e-5, rtol=1e-5)
        assert [w.shape for w in seen] == [(2, 4, 28, 28)] * 4
        for weights in seen:
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 28))
        assert model.tokens(images).shape == (2, 28, 32)
        model.merge = 100 if spec.startswith("tome") else spec.replace("3", "100")
        assert model(images).isfinite().all()


def test_pruning_needs_a_class_token() -> None:
    with pytest.raises(ConfigError, match="use tome or pitome"):
        model_of(class_token=False, pooling="mean").merge = "prune:2"
