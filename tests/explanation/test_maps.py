"""Occlusion, faithfulness, token states and the training view against plain implementations."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import vitkit
from peers import randomize
from vitkit.errors import DataError, InputError
from vitkit.explanation.confusion import Outcome
from vitkit.explanation.faithfulness import RANDOM, area, faithfulness_curves, hide, masks_of, occlusion_map
from vitkit.explanation.tokens import token_colours, token_similarity, token_states
from vitkit.explanation.training import read_log, smooth


def test_occlusion_against_one_patch_at_a_time() -> None:
    model = randomize(vitkit.create("mu", image_size=(16, 24), patch_size=(8, 4)), scale=0.3)
    images = torch.randn(2, 3, 16, 24)
    found = occlusion_map(model, images, torch.tensor([1, 2]), most=5)
    with torch.no_grad():
        for b, wanted in enumerate([1, 2]):
            whole = model(images[b : b + 1]).softmax(-1)[0, wanted].item()
            assert found.probability[b] == pytest.approx(whole, abs=1e-6)
            for row in range(2):
                for column in range(6):
                    hidden = images[b : b + 1].clone()
                    patch = hidden[0, :, 8 * row : 8 * row + 8, 4 * column : 4 * column + 4]
                    patch[:] = images[b].mean(dim=(1, 2))[:, None, None]
                    drop = whole - model(hidden).softmax(-1)[0, wanted].item()
                    assert found.drop[b, row, column] == pytest.approx(drop, abs=1e-5)


def test_hiding_nothing_and_everything() -> None:
    image = torch.randn(3, 8, 8)
    both = torch.stack([torch.zeros(2, 2), torch.ones(2, 2)]).bool()
    nothing, everything = hide(image, both, (4, 4))
    assert torch.equal(nothing, image)
    torch.testing.assert_close(everything, image.mean((1, 2), keepdim=True).expand(3, 8, 8))


def test_masks_follow_the_order() -> None:
    masks = masks_of(np.array([2, 0, 1]), np.array([0, 1, 3]))
    assert masks.tolist() == [[False] * 3, [False, False, True], [True] * 3]


def test_area_of_known_curves() -> None:
    assert area(np.full((2, 5), 0.3), np.linspace(0, 1, 5)) == pytest.approx([0.3, 0.3])
    assert area(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == pytest.approx(0.5)


def test_curves_begin_and_end_where_all_is_shown_or_hidden() -> None:
    model = randomize(vitkit.create("mu"), scale=0.3)
    images, classes = torch.randn(2, 3, 32, 32), torch.tensor([0, 5])
    maps = {"one": np.random.default_rng(0).random((2, 4, 4)), "two": np.zeros((2, 4, 4))}
    found = faithfulness_curves(model, images, classes, maps)
    assert found.methods == ["one", "two", RANDOM]
    with torch.no_grad():
        whole = model(images).softmax(-1)[range(2), classes].numpy()
    for m in range(3):
        np.testing.assert_allclose(found.deletion[:, m, 0], whole, atol=1e-6)
        np.testing.assert_allclose(found.insertion[:, m, -1], whole, atol=1e-6)
        np.testing.assert_allclose(found.deletion[:, m, -1], found.insertion[:, m, 0], atol=1e-6)
    rows = found.table()
    assert rows[-1]["deletion_ratio"] == 1
    assert rows[0]["deletion"] == pytest.approx(area(found.deletion, found.fractions)[:, 0].mean())


def test_deletion_follows_the_map_patch_by_patch() -> None:
    model = randomize(vitkit.create("mu"), scale=0.3)
    image, order = torch.randn(1, 3, 32, 32), np.random.default_rng(1).permutation(16)
    importance = np.zeros(16)
    importance[order] = np.arange(16, 0, -1)
    found = faithfulness_curves(model, image, torch.tensor([3]), {"map": importance.reshape(1, 4, 4)}, steps=16)
    with torch.no_grad():
        for step in range(17):
            hidden = torch.zeros(16, dtype=torch.bool)
            hidden[order[:step]] = True
            known = model(hide(image[0], hidden.reshape(1, 4, 4), (8, 8))).softmax(-1)[0, 3].item()
            assert found.deletion[0, 0, step] == pytest.approx(known, abs=1e-6)


def test_token_states_are_those_of_the_model() -> None:
    model = randomize(vitkit.create("mu", registers=1), scale=0.3)
    images = torch.randn(2, 3, 32, 32)
    states = token_states(model, images)
    assert states.shape == (2, 3, 4, 4, 32)
    with torch.no_grad():
        last = model.norm(torch.from_numpy(states[:, -1]).flatten(1, 2))
        torch.testing.assert_close(last, model.tokens(images)[:, 2:])
        torch.testing.assert_close(torch.from_numpy(states[:, 0]).flatten(1, 2), model.embedded(images)[0][:, 2:])
    np.testing.assert_array_equal(token_states(model, images, [-1])[:, 0], states[:, -1])
    with pytest.raises(InputError, match="no state 3"):
        token_states(model, images, [3])


def test_token_similarity_against_loops() -> None:
    states = np.random.default_rng(0).normal(size=(2, 3, 4, 8)).astype(np.float32)
    found = token_similarity(states, (1, 2))
    for s in range(2):
        for i in range(3):
            for j in range(4):
                a, b = states[s, 1, 2].astype(float), states[s, i, j].astype(float)
                assert found[s, i, j] == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), abs=1e-5)


def test_colours_are_components_of_all_images_together() -> None:
    states = np.random.default_rng(0).normal(size=(2, 3, 4, 8)) * np.array([9, 5, 3, 1, 1, 1, 1, 1])
    colours, share = token_colours(states.astype(np.float32))
    assert colours.shape == (2, 3, 4, 3)
    assert colours.min() >= 0
    assert colours.max() <= 1
    flat = states.reshape(-1, 8) - states.reshape(-1, 8).mean(axis=0)
    values = np.linalg.eigvalsh(flat.T @ flat)[::-1]
    np.testing.assert_allclose(share, values[:3] / values.sum(), rtol=1e-4)
    first = flat @ np.linalg.eigh(flat.T @ flat)[1][:, -1]
    assert abs(np.corrcoef(first, colours[..., 0].reshape(-1))[0, 1]) > 0.99


def test_colours_of_fewer_than_three_channels() -> None:
    colours, share = token_colours(np.random.default_rng(0).normal(size=(1, 2, 2, 2)).astype(np.float32))
    assert colours.shape == (1, 2, 2, 3)
    assert share[2] == 0


def test_a_log_is_read_however_it_is(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "val_top1": 0.5, "note": "x", "best": True}]
    text = "\n".join([json.dumps(lines[0]), "[1]", "{cut sho", json.dumps(lines[1]), '{"step": 3, "loss": NaN}'])
    (tmp_path / "log.jsonl").write_text(text)
    curves = read_log(tmp_path)
    assert set(curves) == {"loss", "val_top1"}
    assert [c.tolist() for c in curves["loss"]] == [[1, 2], [2, 1]]
    (tmp_path / "log.jsonl").write_text("nothing\n")
    with pytest.raises(DataError, match="holds no numbers"):
        read_log(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        read_log(tmp_path / "absent")


def test_smoothing_is_a_running_mean() -> None:
    assert smooth(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1, 2, 4, 6]


def test_outcome_against_loops() -> None:
    generator = np.random.default_rng(0)
    probability = generator.dirichlet(np.ones(4), 300)
    labels = generator.integers(0, 4, 300)
    found = Outcome(probability, labels)
    confusion, bins = np.zeros((4, 4)), [[] for _ in range(10)]
    for p, label in zip(probability, labels, strict=True):
        confusion[label, p.argmax()] += 1
        bins[min(9, int(p.max() * 10))].append((p.max(), p.argmax() == label))
    np.testing.assert_array_equal(found.confusion, confusion)
    error = sum(abs(sum(c for c, _ in b) - sum(r for _, r in b)) for b in bins) / 300
    assert found.calibration.ece == pytest.approx(error)
    assert (found.predicted == labels).mean() == pytest.approx(np.trace(confusion) / 300)
    own = probability[np.arange(300), labels]
    assert own[found.worst[0]] == own.min()
