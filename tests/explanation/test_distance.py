"""Mean attention distance and entropy: closed forms, an independent implementation, streaming."""

import math

import numpy as np
import pytest
import torch

import vitkit
from peers import randomize
from vitkit.explanation.distance import attention_distance, entropy, mean_distance, patch_distances
from vitkit.explanation.inside import attention_weights, without_prefix


def uniform(n: int) -> torch.Tensor:
    return torch.full((1, 2, n, n), 1 / n, dtype=torch.float64)


def plain_distance(weights: np.ndarray, grid: tuple[int, int], patch: tuple[int, int], prefix: int) -> float:
    """Loops and nothing else."""
    h, w = grid
    total = 0.0
    for q in range(h * w):
        row = weights[prefix + q, prefix:]
        row = row / row.sum()
        for k in range(h * w):
            dy, dx = (q // w - k // w) * patch[0], (q % w - k % w) * patch[1]
            total += row[k] * math.hypot(dy, dx)
    return total / (h * w)


def test_uniform_attention_on_14x14() -> None:
    """Sum over offsets of (14 - |dy|) (14 - |dx|) |offset| / 14^4, in patches of 16 pixels."""
    n = 14
    offsets = range(1 - n, n)
    known = 16 * sum((n - abs(y)) * (n - abs(x)) * math.hypot(y, x) for y in offsets for x in offsets) / n**4
    found = mean_distance(uniform(n * n), patch_distances((n, n), (16, 16)))
    assert found.numpy() == pytest.approx(known, abs=1e-9)
    assert float(patch_distances((n, n), (16, 16)).mean()) == pytest.approx(known, abs=1e-9)
    assert known == pytest.approx(116.3, abs=0.5)  # near 0.5214 of the side, the mean distance within a square


def test_identity_looks_nowhere() -> None:
    weights = torch.eye(12)[None, None]
    assert mean_distance(weights, patch_distances((3, 4), (16, 16))).item() == 0
    assert entropy(weights).item() == 0


@pytest.mark.parametrize(("down", "across"), [(0, 1), (2, 0), (1, 2)])
def test_a_fixed_offset_gives_its_length(down: int, across: int) -> None:
    """On a ring of rows and columns every patch looks at the one so far away; those that would wrap are left out."""
    h, w, patch = 5, 6, (8, 4)
    weights = torch.zeros(h * w, h * w)
    inside = []
    for y in range(h):
        for x in range(w):
            if y + down < h and x + across < w:
                weights[y * w + x, (y + down) * w + x + across] = 1
                inside.append(y * w + x)
    rows = weights[inside]
    found = mean_distance(rows[None, None], patch_distances((h, w), patch)[inside])
    assert found.item() == pytest.approx(math.hypot(down * 8, across * 4), abs=1e-6)


def test_uniform_entropy_is_log_n() -> None:
    assert entropy(uniform(196)).numpy() == pytest.approx(math.log(196), abs=1e-12)


def test_prefix_is_left_out_and_rows_renormalised() -> None:
    weights = torch.rand(2, 3, 7, 7).softmax(-1)
    patches = without_prefix(weights, 2)
    assert patches.shape == (2, 3, 5, 5)
    torch.testing.assert_close(patches.sum(-1), torch.ones(2, 3, 5))
    torch.testing.assert_close(patches[0, 0, 0], weights[0, 0, 2, 2:] / weights[0, 0, 2, 2:].sum())


def test_against_loops_on_a_rectangular_model_with_registers() -> None:
    model = randomize(vitkit.create("mu", image_size=(16, 32), patch_size=(8, 4), registers=2), scale=0.5)
    images = torch.randn(3, 3, 16, 32)
    found = attention_distance(model, images)
    for layer, weights in enumerate(attention_weights(model, images)):
        for b in range(3):
            for head in range(2):
                known = plain_distance(weights[b, head].double().numpy(), (2, 8), (8, 4), prefix=3)
                assert found.distance[b, layer, head] == pytest.approx(known, rel=1e-5)
    assert found.uniform_entropy == pytest.approx(math.log(16))
    assert (found.entropy <= found.uniform_entropy + 1e-5).all()


def test_batches_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomize(vitkit.create("mu"), scale=0.3)
    images = torch.randn(5, 3, 32, 32)
    whole = attention_distance(model, images)
    monkeypatch.setattr("vitkit.explanation.inside.WEIGHTS_BUDGET", 1)  # one image at a time
    single = attention_distance(model, images)
    np.testing.assert_allclose(whole.distance, single.distance, rtol=1e-5)
    np.testing.assert_allclose(whole.entropy, single.entropy, rtol=1e-5)
