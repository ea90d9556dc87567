"""What varies is a row in a table: names and rules in `config`, what is computed beside the code."""

import pytest
import torch
from torch import Tensor, nn

import vitkit
from vitkit.errors import ConfigError
from vitkit.model import blocks, head, mlp, norms, positions
from vitkit.model import config as options
from vitkit.model.config import Size, ViTConfig
from vitkit.model.positions import Added

TWINS = {
    "positions": (options.POSITIONS, positions.POSITIONS),
    "resizes": (options.RESIZES, positions.RESIZES),
    "activations": (options.ACTIVATIONS, mlp.ACTIVATIONS),
    "norms": (options.NORMS, norms.NORMS),
    "blocks": (options.BLOCKS, blocks.BLOCKS),
    "poolings": (options.POOLINGS, head.POOLINGS),
}


@pytest.mark.parametrize("table", TWINS)
def test_every_word_has_a_rule_and_a_meaning(table: str) -> None:
    words, meanings = TWINS[table]
    assert list(words) == list(meanings)


class Ramp(Added):
    """A toy: the number of the row times one learned vector."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.slope = nn.Parameter(torch.empty(config.width))

    def vectors(self, grid: Size) -> Tensor:
        return torch.arange(grid[0] * grid[1])[:, None] // grid[1] * self.slope


def test_a_new_position_encoding_is_a_class_and_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(options.POSITIONS, "ramp", lambda config: "needs 4 heads" if config.heads != 4 else "")
    monkeypatch.setitem(positions.POSITIONS, "ramp", Ramp)
    with pytest.raises(ConfigError, match="positions='ramp' needs 4 heads"):
        vitkit.create("mu", positions="ramp")
    model = vitkit.create("mu", positions="ramp", heads=4, classes=0).eval()
    assert model.positions.slope.std() > 0  # initialised with the rest
    assert ViTConfig.from_json(model.config.to_json()) == model.config
    images = torch.zeros(1, 3, 48, 32)
    embedded = model.embedded(images)[0][0, 1:].unflatten(0, (6, 4))
    torch.testing.assert_close(embedded[5, 2] - embedded[0, 2], 5 * model.positions.slope)
    model.merge = 2
    assert model(images).shape == (1, 32)


def test_a_new_pooling_is_a_class_and_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Largest(head.MeanPool):
        def forward(self, tokens: Tensor, on_weights: object = None) -> Tensor:
            return tokens[:, self.prefix :].amax(dim=1)

    monkeypatch.setitem(options.POOLINGS, "max", options.Pooling(class_token=False))
    monkeypatch.setitem(head.POOLINGS, "max", Largest)
    model, images = vitkit.create("mu", pooling="max", classes=0).eval(), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(images), model.tokens(images)[:, 1:].amax(dim=1))
