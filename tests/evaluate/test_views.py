"""Several views of an image: what they are by hand, and that their mean is what several calls give."""

import pytest
import torch
from torch import nn

from evaluate.subjects import CONFIG, in_memory
from vitkit.errors import ConfigError
from vitkit.evaluation import evaluate
from vitkit.evaluation.views import over_views, views
from vitkit.model.base import VisionModel


def test_views_are_the_image_its_mirror_image_and_both_moved() -> None:
    image = torch.arange(32 * 16.0).view(1, 1, 32, 16)
    found = list(views(image, 10, mirror=True))
    assert len(found) == 10
    assert torch.equal(found[0], image)
    assert torch.equal(found[1], image.flip(-1))
    up_left, mirrored, down_right = found[2], found[3], found[4]
    assert torch.equal(up_left[..., :30, :15], image[..., 2:, 1:])  # a sixteenth: 2 rows, 1 column
    assert torch.equal(up_left[..., 30:, :15], image[..., 31:, 1:].expand(1, 1, 2, 15))  # the edge is repeated
    assert torch.equal(mirrored, up_left.flip(-1))
    assert torch.equal(down_right[..., 2:, 1:], image[..., :30, :15])
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


def test_without_mirror_images_there_are_five() -> None:
    image = torch.rand(2, 3, 8, 8)
    found = list(views(image, 5, mirror=False))
    with_them = list(views(image, 10, mirror=True))
    assert all(torch.equal(a, b) for a, b in zip(found, with_them[::2], strict=True))
    with pytest.raises(ConfigError, match="from 1 to 5, since a mirror image"):
        over_views(nn.Identity(), 6, mirror=False)


def test_outputs_are_averaged() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4), nn.GELU())
    images = torch.rand(2, 3, 8, 8)
    with torch.inference_mode():
        mean = sum(model(view) for view in views(images, 6, mirror=True)) / 6
        torch.testing.assert_close(over_views(model, 6, mirror=True)(images), mean)
        assert torch.equal(over_views(model, 1, mirror=True)(images), model(images))


def test_a_mark_that_one_view_alone_shows_is_found_by_the_mean() -> None:
    """The class is told by a pixel at the right edge, which the model reads at the left: only mirror images show it."""

    class Left(VisionModel):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.config = config
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen = images[:, 0, 0, 0] > 0
            return torch.stack([~seen * 1.0, seen * 2.0], 1)

    source = in_memory(40, ("dark", "bright"))
    source.pixels.zero_()  # type: ignore[union-attr]
    source.pixels[:, 0, 0, -1] = torch.as_tensor(source.labels).to(torch.uint8) * 255  # type: ignore[index]
    model = Left(CONFIG.replace(classes=2))
    assert evaluate(model, source).top1 == pytest.approx((source.labels == 0).mean())
    assert evaluate(model, source, views=2).top1 == 1.0
