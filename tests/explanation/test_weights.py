"""Filters and positions against plain implementations."""

import math

import numpy as np
import pytest
import torch

import vitkit
from peers import randomize
from vitkit.errors import InputError
from vitkit.explanation.weights import as_tiles, patch_filters, position_offsets, position_similarity, row_column_score
from vitkit.model.patches import conv_to_linear


def plain_components(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvectors of the covariance, whose entries are summed one by one."""
    mean = rows.sum(axis=0) / len(rows)
    size = rows.shape[1]
    covariance = np.zeros((size, size))
    for row in rows:
        for i in range(size):
            covariance[i] += (row[i] - mean[i]) * (row - mean)
    values, vectors = np.linalg.eigh(covariance)
    return vectors[:, ::-1][:, :count].T, values[::-1][:count] / values.sum()


def test_filters_are_the_principal_components() -> None:
    model = randomize(vitkit.create("mu", patch_size=4))
    found = patch_filters(model)
    assert found.components.shape == (28, 4, 4, 3)
    rows = model.patches.weight.detach().double().permute(0, 2, 3, 1).flatten(1).numpy()
    vectors, share = plain_components(rows, 28)
    np.testing.assert_allclose(found.explained, share, atol=1e-9)
    cosine = np.abs((found.components.reshape(28, -1) * vectors).sum(axis=1))
    np.testing.assert_allclose(cosine, 1, atol=1e-6)
    tiles = as_tiles(found)
    assert tiles.min() >= 0
    assert tiles.max() <= 1


def test_filters_do_not_depend_on_the_form_of_the_embedding() -> None:
    conv = randomize(vitkit.create("mu"))
    linear = vitkit.create("mu", patch_embedding="linear")
    with torch.no_grad():
        linear.patches.weight.copy_(conv_to_linear(conv.patches.weight))
    np.testing.assert_allclose(patch_filters(conv).components, patch_filters(linear).components, atol=1e-9)


def test_fewer_components_than_asked_for() -> None:
    assert len(patch_filters(vitkit.create("vit-8px/2")).components) == 4


@pytest.mark.parametrize("kind", ["learned", "learned-2d", "sincos-2d"])
def test_similarity_against_loops(kind: str) -> None:
    model = randomize(vitkit.create("mu", positions=kind, image_size=(24, 32)))
    found = position_similarity(model)
    table = model.positions.vectors((3, 4)).detach().double().numpy()
    for a in range(12):
        for b in range(12):
            known = table[a] @ table[b] / math.sqrt((table[a] @ table[a]) * (table[b] @ table[b]))
            assert found[a // 4, a % 4, b // 4, b % 4] == pytest.approx(known, abs=1e-9)


def test_rotary_similarity_depends_on_the_offset_alone() -> None:
    found = position_similarity(vitkit.create("mu", positions="rope-2d"))
    np.testing.assert_allclose(found[0, 0, 1, 2], found[2, 1, 3, 3], atol=1e-9)
    np.testing.assert_allclose(found[1, 1, 1, 1], 1, atol=1e-9)


def test_two_dimensional_tables_show_rows_and_columns() -> None:
    model = vitkit.create("mu", positions="learned-2d", width=256)
    score = row_column_score(position_similarity(model))
    assert score["row"] > 0.3
    assert score["column"] > 0.3
    fresh = row_column_score(position_similarity(vitkit.create("mu", width=256)))
    assert abs(fresh["row"]) < 0.1
    assert row_column_score(np.ones((1, 5, 1, 5))) == {"row": 0.0, "column": 0.0}


def test_score_against_loops() -> None:
    similarity = np.random.default_rng(0).normal(size=(3, 4, 3, 4))
    cells = [(i, j) for i in range(3) for j in range(4)]
    pairs = [(a, b) for a in cells for b in cells if a != b]
    mean = {
        "row": np.mean([similarity[a + b] for a, b in pairs if a[0] == b[0]]),
        "column": np.mean([similarity[a + b] for a, b in pairs if a[1] == b[1]]),
    }
    base = np.mean([similarity[a + b] for a, b in pairs if a[0] != b[0] and a[1] != b[1]])
    assert row_column_score(similarity) == pytest.approx({k: v - base for k, v in mean.items()})


def test_relative_positions_are_their_bias() -> None:
    model = randomize(vitkit.create("mu", positions="relative"))
    found = position_offsets(model)
    assert found.shape == (2, 2, 7, 7)
    assert found[1, 0, 3, 3] == pytest.approx(model.encoder.blocks[1].relative.by_offset[0, 3, 3].item())
    with pytest.raises(InputError, match="position_offsets"):
        position_similarity(model)
    with pytest.raises(InputError, match="no bias by offset"):
        position_offsets(vitkit.create("mu"))
