"""Positions: closed forms, resizing to any grid, and the memory of resized tables."""

import math

import pytest
import torch

import vitkit
from peers import randomize
from vitkit.model.config import POSITIONS, RESIZES, ViTConfig
from vitkit.model.positions import Learned2D, Place, SinCos2D, resize_grid
from vitkit.model.relative import RelativeBias
from vitkit.model.rotary import Rotary


def small(**changes: object) -> ViTConfig:
    return ViTConfig(image_size=(24, 32), patch_size=8, width=16, depth=2, heads=2, mlp_width=16, classes=4).replace(
        **changes
    )


@pytest.mark.parametrize("way", RESIZES)
@pytest.mark.parametrize("grid", [(3, 4), (6, 8), (2, 6), (1, 12), (5, 1)])
def test_resize_keeps_a_constant_and_the_shape(way: str, grid: tuple[int, int]) -> None:
    table = torch.full((3, 4, 5), 0.7)
    resized = resize_grid(table, grid, way)
    assert resized.shape == (*grid, 5)
    torch.testing.assert_close(resized, torch.full((*grid, 5), 0.7))


def test_same_count_other_shape_is_resized_too() -> None:
    """14x14 -> 7x28 has the same number of rows, and still must not be read as it stands."""
    ramp = torch.arange(14.0)[:, None, None].expand(14, 14, 1)  # grows with the row only
    resized = resize_grid(ramp, (7, 28), "official")
    torch.testing.assert_close(resized[:, 0, 0], torch.linspace(0, 13, 7))
    torch.testing.assert_close(resized[:, 0], resized[:, 27])
    assert not torch.equal(resized.flatten(), ramp.flatten())


def test_official_is_linear_between_corners() -> None:
    table = torch.stack(torch.meshgrid(torch.arange(3.0), torch.arange(5.0), indexing="ij"), -1)
    rows, columns = torch.linspace(0, 2, 7), torch.linspace(0, 4, 4)
    expected = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)
    torch.testing.assert_close(resize_grid(table, (7, 4), "official"), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_resize_works_in_other_precisions(dtype: torch.dtype) -> None:
    table = torch.randn(3, 4, 5)
    resized = resize_grid(table.to(dtype), (6, 7))
    assert resized.dtype == dtype
    torch.testing.assert_close(resized.float(), resize_grid(table, (6, 7)), atol=0.02, rtol=0.02)


def test_sincos_closed_form() -> None:
    table = SinCos2D(small(positions="sincos-2d")).vectors((3, 4)).unflatten(0, (3, 4))
    for row, column, i in [(0, 0, 0), (2, 3, 1), (1, 2, 3)]:
        omega = 10_000 ** (-i / 3)
        expected = [math.sin(column * omega), math.cos(column * omega), math.sin(row * omega), math.cos(row * omega)]
        assert table[row, column, [i, 4 + i, 8 + i, 12 + i]].tolist() == pytest.approx(expected)


def test_learned_2d_is_column_then_row() -> None:
    positions = randomize(Learned2D(small(positions="learned-2d")))
    table = positions.vectors((3, 4)).unflatten(0, (3, 4))
    assert torch.equal(table[2, 1], torch.cat([positions.columns[1], positions.rows[2]]))


def test_relative_bias_depends_on_the_offset_alone() -> None:
    relative = randomize(RelativeBias(small(positions="relative")))
    bias = relative((3, 4))  # 2 heads, 1 class token and 12 patches
    assert bias.shape == (2, 13, 13)
    at = lambda r, c: 1 + 4 * r + c  # noqa: E731
    assert torch.equal(bias[:, at(0, 0), at(1, 2)], bias[:, at(1, 1), at(2, 3)])
    assert torch.equal(bias[:, at(0, 0), at(1, 2)], relative.by_offset[:, -1 + 2, -2 + 3])
    assert torch.equal(bias[:, 5, 0], relative.with_prefix[:, 0])
    assert torch.equal(bias[:, 0, 5], relative.with_prefix[:, 1])
    assert torch.equal(bias[:, 0, 0], relative.with_prefix[:, 2])


def test_rotary_scores_depend_on_the_offset_alone() -> None:
    rotary = Rotary.of(small(positions="rope-2d"))
    assert rotary is not None
    q, k = torch.randn(2, 8, dtype=torch.float64)
    rotate = rotary.turn(Place((3, 4)), q).rotate
    assert rotate is not None
    scores = (rotate(q.expand(13, 8)) @ rotate(k.expand(13, 8)).mT)[1:, 1:].unflatten(0, (3, 4)).unflatten(2, (3, 4))
    torch.testing.assert_close(scores[0, 0, 1, 2], scores[1, 1, 2, 3])
    assert not torch.isclose(scores[0, 0, 1, 2], scores[0, 0, 2, 1])
    torch.testing.assert_close(rotate(q.expand(13, 8))[0], q)  # the class token is not turned
    torch.testing.assert_close(rotate(q.expand(13, 8)).norm(dim=-1), q.norm().expand(13))


@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("prefix", ["all", "class", "none"])
def test_any_grid_runs(kind: str, prefix: str) -> None:
    model = randomize(vitkit.ViT(small(positions=kind, positioned_prefix=prefix, registers=2))).eval()
    for size in [(24, 32), (48, 32), (8, 8), (32, 24)]:
        with torch.no_grad():
            assert model.tokens(torch.randn(1, 3, *size)).shape == (1, 3 + size[0] * size[1] // 64, 16)


@pytest.mark.parametrize("kind", sorted(POSITIONS.keys() - {"none", "rope-2d"}))
def test_remembered_table_is_never_stale(kind: str) -> None:
    model = randomize(vitkit.ViT(small(positions=kind)).eval())
    images = torch.randn(1, 3, 48, 64)
    with torch.no_grad():
        assert torch.equal(model(images), model(images))
        for parameter in [p for n, p in model.named_parameters() if "positions" in n or "relative" in n]:
            before = model.tokens(images)
            parameter.add_(0.5 * torch.randn_like(parameter))  # in place, as an optimizer does
            assert not torch.equal(model.tokens(images), before)
        model.train().eval()
        after = model(images)
    fresh = vitkit.ViT(model.config).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(after, fresh(images))
    assert torch.equal(model.double()(images.double()), fresh.double()(images.double()))


def test_memory_made_in_inference_mode_can_be_trained_through() -> None:
    model = randomize(vitkit.ViT(small(positions="relative"))).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("relative" not in name)
    with torch.inference_mode():
        model(torch.randn(1, 3, 48, 64))
    model(torch.randn(1, 3, 48, 64)).sum().backward()
    assert model.patches.weight.grad is not None


def test_gradients_reach_a_resized_table() -> None:
    model = randomize(vitkit.ViT(small()))
    model(torch.randn(1, 3, 48, 64)).sum().backward()
    assert model.positions.learned.grad is not None
    assert (model.positions.learned.grad.abs().sum(-1) > 0).all()
