"""Each way of resizing a position table equals that of the family it is named after.

All are interpolations of values of order 1 with a handful of terms: fp32 rounds to 1e-7, hence 1e-6.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage  # type: ignore[import-untyped]
from torch import Tensor

import peers
from vitkit.model.config import RESIZES
from vitkit.model.positions import resize_grid

TOLERANCE = 1e-6
SQUARE = [(14, 24), (14, 7), (14, 15), (4, 1), (1, 4), (7, 7), (2, 37)]
ANY = [((14, 14), (7, 28)), ((3, 8), (8, 3)), ((5, 4), (11, 2)), ((1, 6), (4, 9)), ((6, 1), (2, 1)), ((4, 4), (1, 16))]
GRIDS = [((a, a), (b, b)) for a, b in SQUARE] + ANY


def table(grid: tuple[int, int], width: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*grid, width, generator=torch.Generator().manual_seed(sum(grid)), dtype=dtype)


def close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_official_is_scipy_zoom(old: tuple[int, int], new: tuple[int, int]) -> None:
    zoom = (new[0] / old[0], new[1] / old[1], 1)
    for dtype, tolerance in ((torch.float32, TOLERANCE), (torch.float64, 1e-14)):
        before = table(old, dtype=dtype)
        expected = torch.from_numpy(np.asarray(ndimage.zoom(before.double().numpy(), zoom, order=1)))
        close(resize_grid(before, new, "official"), expected, tolerance)


# timm hands PyTorch a channels-last table, whose antialiased resize to one column is wrong: not compared.
@pytest.mark.parametrize(("old", "new"), [(old, new) for old, new in GRIDS if new[1] > 1])
def test_timm(old: tuple[int, int], new: tuple[int, int]) -> None:
    timm, before = peers.import_timm(), table(old)
    expected = timm.layers.resample_abs_pos_embed(
        before.flatten(0, 1)[None], new_size=list(new), old_size=list(old), num_prefix_tokens=0
    )
    close(resize_grid(before, new, "timm").flatten(0, 1), expected[0])
    expected = timm.layers.resample_abs_pos_embed(
        before.flatten(0, 1)[None], list(new), list(old), 0, interpolation="bilinear", antialias=False
    )
    close(resize_grid(before, new, "timm-npz").flatten(0, 1), expected[0])


@pytest.mark.parametrize(("old", "new"), [((6, 1), (2, 1)), ((4, 4), (1, 1)), ((3, 5), (7, 1))])
def test_timm_to_one_column(old: tuple[int, int], new: tuple[int, int]) -> None:
    """What timm means to compute there, in float64 and with channels first."""
    before = table(old)
    wide = before.double().permute(2, 0, 1)[None].contiguous()
    expected = F.interpolate(wide, new, mode="bicubic", antialias=True)[0].permute(1, 2, 0)
    close(resize_grid(before, new, "timm"), expected)


@pytest.mark.parametrize(("old", "new"), [((4, 4), (4, 4)), ((4, 4), (6, 5)), ((4, 4), (2, 8)), ((7, 7), (3, 1))])
def test_huggingface(old: tuple[int, int], new: tuple[int, int]) -> None:
    hf = peers.import_transformers()
    config = hf.ViTConfig(image_size=old[0] * 8, patch_size=8, hidden_size=8)
    theirs: Any = hf.models.vit.modeling_vit.ViTEmbeddings(config)
    before = table(old, 8)
    theirs.position_embeddings.data = torch.cat([torch.ones(1, 8), before.flatten(0, 1)])[None]
    tokens = torch.zeros(1, 1 + new[0] * new[1], 8)
    expected = theirs.interpolate_pos_encoding(tokens, new[0] * 8, new[1] * 8)
    assert torch.equal(expected[0, 0], torch.ones(8))
    close(resize_grid(before, new, "huggingface").flatten(0, 1), expected[0, 1:])


@pytest.mark.parametrize(("old", "new"), SQUARE)
def test_torchvision(old: int, new: int) -> None:
    vision_transformer = peers.import_torchvision().models.vision_transformer
    before = table((old, old))
    state = {"encoder.pos_embedding": torch.cat([torch.ones(1, 5), before.flatten(0, 1)])[None]}
    state = vision_transformer.interpolate_embeddings(image_size=new * 16, patch_size=16, model_state=state)
    close(resize_grid(before, (new, new), "torchvision").flatten(0, 1), state["encoder.pos_embedding"][0, 1:])


@pytest.mark.parametrize(("old", "new"), [((37, 37), (16, 16)), ((37, 37), (45, 30)), ((16, 16), (16, 17))])
def test_dinov2(old: tuple[int, int], new: tuple[int, int]) -> None:
    """Its published formula: the scale is (size + 0.1) / sqrt(N) per axis, in fp32, bicubic."""
    before = table(old)
    side = (old[0] * old[1]) ** 0.5
    scale = ((new[0] + 0.1) / side, (new[1] + 0.1) / side)
    expected = F.interpolate(before.permute(2, 0, 1)[None], scale_factor=scale, mode="bicubic")
    assert tuple(expected.shape[-2:]) == new
    close(resize_grid(before, new, "dinov2"), expected[0].permute(1, 2, 0))


@pytest.mark.parametrize("way", RESIZES)
def test_the_ways_differ_and_the_same_grid_is_left_alone(way: str) -> None:
    before = table((4, 4))
    assert torch.equal(resize_grid(before, (4, 4), way), before)
    same = {way} | ({"official", "official-exact"} if way.startswith("official") else set())  # at this size
    for other in set(RESIZES) - same:  # antialiasing shows only where a side shrinks
        differences = [resize_grid(before, grid, way) - resize_grid(before, grid, other) for grid in ((6, 9), (3, 9))]
        assert max(difference.abs().max() for difference in differences) > 1e-3


@pytest.mark.parametrize("way", RESIZES)
def test_changed_shape_with_unchanged_count_is_resized(way: str) -> None:
    before = table((14, 14))
    after = resize_grid(before, (7, 28), way)
    assert after.shape == (7, 28, 5)
    assert not torch.equal(after.flatten(), before.flatten())
