"""Descriptions without a model: gradients equal scikit-image's, colours equal counts by hand."""

import numpy as np
import pytest
import torch

from vitkit.data import open_data
from vitkit.data.descriptor import SIDE, colours, describe, gradients, width
from vitkit.errors import DataError


@pytest.mark.parametrize("channels", [1, 3])
def test_gradients_are_those_of_scikit_image(channels: int) -> None:
    skimage = pytest.importorskip("skimage.feature")
    image = np.random.default_rng(channels).random((SIDE, SIDE, channels)).astype(np.float32)
    theirs = skimage.hog(image, 9, (16, 16), (2, 2), block_norm="L2-Hys", channel_axis=-1)
    ours = gradients(torch.from_numpy(image).permute(2, 0, 1)[None])[0]
    assert np.abs(ours.numpy() - theirs).max() < 1e-5  # single precision


def test_colours_are_shares_of_pixels() -> None:
    image = torch.zeros(1, 3, SIDE, SIDE)
    image[:, 0, :, : SIDE // 2] = 255  # the left half red, the right half black
    shares = colours(image).square().view(5, 64)  # the whole, then the quarters
    red, black = 3, 0
    assert shares[0, [red, black]].tolist() == pytest.approx([0.5, 0.5])
    assert shares[1:, red].tolist() == pytest.approx([1, 0, 1, 0])
    assert shares.sum(dim=1).tolist() == pytest.approx([1] * 5)


@pytest.mark.parametrize(("channels", "size"), [(1, (8, 8)), (2, (5, 90)), (3, (300, 200)), (4, (64, 64))])
def test_any_image_is_described(channels: int, size: tuple[int, int]) -> None:
    images = torch.randint(0, 256, (3, channels, *size), dtype=torch.uint8)
    found = describe(images)
    assert found.shape == (3, width(channels))
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    assert found.norm(dim=1).numpy() == pytest.approx(np.sqrt(3), abs=1e-5)  # three parts of norm 1
    assert torch.equal(describe(images[1:2]), found[1:2]), "a description does not depend on its neighbours"
    assert describe(images[:0]).shape == (0, width(channels))
    assert describe(torch.zeros(1, channels, 9, 9, dtype=torch.uint8)).isfinite().all()  # no edges, no layout


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(DataError, match="uint8 images N C H W"):
        describe(torch.zeros(1, 3, 8, 8))


def test_neighbours_share_a_class() -> None:
    """The share of digits whose nearest neighbour has their class; 1 of 10 by chance."""
    data = open_data("digits")
    train, test = data.split("train"), data.split("test")
    similar = describe(test.pixels) @ describe(train.pixels).T
    right = train.labels[similar.argmax(dim=1).numpy()] == test.labels
    assert right.mean() > 0.95
